"""Files at a URL, by fsspec, with one kind of error for all services. No torch."""

from __future__ import annotations

import errno
import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from trainer.errors import ConfigError
from trainer.train.stored import name_of


class Objects:
    """What lies below a URL. Paths are relative to it; call all but the constructor inside `told`."""

    def __init__(self, url: str) -> None:
        """
        Raises:
            ConfigError: what a URL of this kind needs is not installed, or there is no such kind.
        """
        self.url = url
        self._fs, self._root = _connect(url)

    def files(self, below: str = "") -> dict[int, dict[str, Mapping[str, Any]]]:
        """All files of all checkpoints, or of one, by step and name, with what the service tells of each."""
        self._fs.invalidate_cache()
        found: dict[int, dict[str, Mapping[str, Any]]] = {}
        for path, about in self._fs.find(f"{self._root}/{below}".rstrip("/"), detail=True).items():
            folder, _, name = path.rpartition("/")
            step = folder.rpartition("/")[2].removeprefix("step-")
            if step.isdecimal() and folder == f"{self._root}/{name_of(int(step))}":
                found.setdefault(int(step), {})[name] = about
        return found

    def read(self, path: str) -> bytes:
        """A small file."""
        return bytes(self._fs.cat_file(f"{self._root}/{path}"))

    def write(self, path: str, content: Mapping[str, Any]) -> None:
        """A small file as JSON."""
        self._fs.pipe_file(f"{self._root}/{path}", json.dumps(content, indent=2).encode())

    def open(self, path: str) -> IO[bytes]:
        """A file to write."""
        file: IO[bytes] = self._fs.open(f"{self._root}/{path}", "wb")
        return file

    def download(self, path: str, target: Path) -> None:
        """Copy a file to this machine."""
        self._fs.get_file(f"{self._root}/{path}", str(target))

    def copy(self, path: str, other: str) -> None:
        """Copy a small file."""
        self._fs.pipe_file(f"{self._root}/{other}", self.read(path))

    def remove(self, *paths: str) -> None:
        """Delete files."""
        self._fs.rm([f"{self._root}/{path}" for path in paths])

    @contextmanager
    def told(self) -> Iterator[None]:
        """Each service has errors of its own: here they become OSError, which they are."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {' '.join(str(error).split())}", self.url) from None


def saved_at(about: Mapping[str, Any]) -> float:
    """When a file was written; services call it differently."""
    saved: Any = about.get("LastModified") or about.get("mtime") or about.get("created") or 0
    with suppress(AttributeError):
        return float(saved.timestamp())
    return float(saved) if isinstance(saved, (int, float)) else 0.0


def _connect(url: str) -> tuple[Any, str]:
    more = {"auto_mkdir": True} if url.startswith(("file:", "local:")) else {}
    try:
        fsspec = importlib.import_module("fsspec.core")
        fs, root = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **more)
    except ImportError as error:
        raise ConfigError(
            f"checkpoint.folder={url}: needs fsspec and what it takes for this kind of URL ({error}); "
            "pip install 'ddp-job-kit[remote]'"
        ) from None
    except ValueError as error:
        raise ConfigError(f"checkpoint.folder={url}: {error}; write s3://bucket/path or the like") from None
    return fs, str(root).rstrip("/")
