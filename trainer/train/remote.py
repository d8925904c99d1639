"""Checkpoints at a URL, by fsspec: an object store has no rename, so a manifest that is written last makes one whole. No torch.

URL/step-00000200/part-00003.MARK.safetensors   what rank 3 wrote in a save; no other save, also of this step, has its MARK
URL/step-00000200/part-00003.MARK.json          its size and sha256, until the manifest has them
URL/step-00000200/manifest.json                 names the parts; where it is, the checkpoint is whole
URL/step-00000200/manifest.damaged              what a manifest is renamed to whose parts are not what it says
"""

from __future__ import annotations

import errno
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.train.files import DamagedError, refuse_damaged, wait_idly, write_hashed
from trainer.train.objects import Objects, saved_at
from trainer.train.place import ID, obsolete
from trainer.train.stored import DAMAGED, MANIFEST, UNFINISHED, Row, name_of, part_name, problem

_LOOK_SECONDS = 0.5
_SPOILED = f"manifest.{DAMAGED}"


class Bucket:
    """A folder at a URL. See `Place` for what the methods do."""

    def __init__(self, url: str, scratch: Path) -> None:
        """
        Args:
            scratch: where on this node copies are made.

        Raises:
            ConfigError: what a URL of this kind needs is not installed.
        """
        self.url, self.scratch = url.rstrip("/"), scratch
        self._objects = Objects(self.url)
        self._first_seen: set[int] | None = None  # steps; what this start adds is newer

    def __str__(self) -> str:
        return self.url

    def newest(self, warn: Callable[[str], None], step: int | None = None) -> int | None:
        """See `Place`; it is copied to this node to be looked at."""
        with self._objects.told():
            found = sorted(number for number, files in self._objects.files().items() if MANIFEST in files)
        for number in reversed(found):
            if step not in (None, number):
                continue
            try:
                self.fetch(number)
            except DamagedError as error:
                warn(f"checkpoint of step {number} is damaged: {error.strerror}")
                self._set_aside(number)
                continue
            if step is None and number != found[-1]:
                warn(f"using the checkpoint of step {number}; {found[-1] - number} steps are lost")
            return number
        return None

    def exists(self, step: int) -> bool:
        """See `Place`; looked up once, as all that this start writes is newer than what it has found."""
        if self._first_seen is None:
            with self._objects.told():
                self._first_seen = {number for number, files in self._objects.files().items() if MANIFEST in files}
        return step in self._first_seen

    def fetch(self, step: int) -> Path:
        """See `Place`.

        Raises:
            DamagedError: it is not what its manifest says.
        """
        target = self.scratch / name_of(step)
        if target.exists():
            return target
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700, parents=True)
        try:
            with self._objects.told():
                self._download(step, partial)
        except FileNotFoundError as error:
            raise DamagedError(errno.EIO, f"{error.filename or error} is missing") from None
        if wrong := problem(partial):
            raise DamagedError(errno.EIO, wrong.replace(str(partial), f"{self.url}/{name_of(step)}"))
        partial.rename(target)
        return target

    def forget(self) -> None:
        """See `Place`."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def rows(self) -> Iterator[Row]:
        """See `Place`; parts are compared by size, and not read."""
        with self._objects.told():
            found = self._objects.files()
        for step, files in sorted(found.items(), reverse=True):
            how = self._how(step, files)
            saved = max(saved_at(about) for about in files.values())
            yield Row(step, how, sum(about["size"] or 0 for about in files.values()), saved)

    def identity(self) -> str:
        """See `Place`."""
        with self._objects.told():
            with suppress(FileNotFoundError, ValueError, KeyError):
                return str(json.loads(self._objects.read(ID))["id"])
            made = uuid.uuid4().hex[:12]
            self._objects.write(ID, {"id": made})
            return made

    def clean(self) -> None:
        """See `Place`."""
        with self._objects.told():
            for step, files in self._objects.files().items():
                if not {MANIFEST, _SPOILED} & files.keys():
                    self._remove(step, files)

    def put(self, step: int, mark: str, rank: int, view: memoryview, sha256: str | None = None) -> None:
        """See `Place`."""
        with self._objects.told():
            with self._objects.open(self._path(step, _part(rank, mark))) as file:
                made = write_hashed(file, view)
            refuse_damaged(made, sha256)
            self._objects.write(self._path(step, _entry(rank, mark)), made)

    def commit(self, step: int, mark: str, ranks: int, keep_last: int, given_up: Callable[[], bool]) -> bool:
        """See `Place`."""
        with self._objects.told():
            while True:
                names = self._objects.files(name_of(step)).get(step, {}).keys()
                if all(_entry(rank, mark) in names for rank in range(ranks)):
                    break
                if any(name.startswith(f"failed.{mark}.") for name in names) or given_up():
                    self._drop(step, mark)
                    return False
                wait_idly(_LOOK_SECONDS)
            entries = [self._path(step, _entry(rank, mark)) for rank in range(ranks)]
            files = {_part(rank, mark): json.loads(self._objects.read(entry)) for rank, entry in enumerate(entries)}
            self._objects.write(self._path(step, MANIFEST), {"step": step, "files": files})
        with suppress(OSError), self._objects.told():  # it is whole, whatever comes of the rest
            self._objects.remove(*entries)
            self._prune(step, keep_last)
        return True

    def fail(self, step: int, mark: str, rank: int) -> bool:
        """See `Place`; whether rank 0 has given up cannot be seen here."""
        with self._objects.told():
            self._objects.write(self._path(step, f"failed.{mark}.{rank:05d}"), {})
        return False

    def drop(self, step: int, mark: str) -> None:
        """See `Place`."""
        with self._objects.told():
            self._drop(step, mark)

    def free(self) -> int | None:
        """See `Place`."""
        return None

    def _download(self, step: int, target: Path) -> None:
        for name in (MANIFEST, *self._named(step)):
            self._objects.download(self._path(step, name), target / name)

    def _named(self, step: int) -> dict[str, Any]:
        """What the manifest says of the parts."""
        try:
            files = json.loads(self._objects.read(self._path(step, MANIFEST)))["files"]
            if any(Path(name).name != name for name in files):
                raise ValueError("names that are none")
            return dict(files)
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(errno.EIO, f"{self.url}/{name_of(step)}/{MANIFEST}: {type(error).__name__}: {error}") from None

    def _how(self, step: int, files: Mapping[str, Mapping[str, Any]]) -> str:
        if MANIFEST not in files:
            return DAMAGED if _SPOILED in files else UNFINISHED
        try:
            with self._objects.told():
                named = self._named(step)
        except DamagedError as error:
            return f"{DAMAGED}: {error.strerror}"
        except OSError as error:
            return f"cannot be read: {error}"
        wrong = [name for name, entry in named.items() if files.get(name, {}).get("size") != entry["bytes"]]
        return f"{DAMAGED}: {wrong[0]} is missing or has another size" if wrong else "whole"

    def _set_aside(self, step: int) -> None:
        with self._objects.told():
            manifest = self._path(step, MANIFEST)
            self._objects.copy(manifest, self._path(step, _SPOILED))
            self._objects.remove(manifest)

    def _drop(self, step: int, mark: str) -> None:
        paths = [self._path(step, name) for name in self._objects.files(name_of(step)).get(step, {}) if f".{mark}." in name]
        if paths:
            self._objects.remove(*paths)

    def _prune(self, newest: int, keep_last: int) -> None:
        found = self._objects.files()
        whole = [step for step, files in found.items() if MANIFEST in files]
        left = {step for step, files in found.items() if step < newest and not {MANIFEST, _SPOILED} & files.keys()}
        for step in obsolete(whole, newest, keep_last) | left:
            self._remove(step, found[step])

    def _remove(self, step: int, names: Mapping[str, Any]) -> None:
        """The manifest first, so that a kill leaves none that is only half there."""
        if MANIFEST in names:
            self._objects.remove(self._path(step, MANIFEST))
        if rest := [self._path(step, name) for name in names if name != MANIFEST]:
            self._objects.remove(*rest)

    def _path(self, step: int, name: str) -> str:
        return f"{name_of(step)}/{name}"


def _part(rank: int, mark: str) -> str:
    return str(Path(part_name(rank)).with_suffix(f".{mark}.safetensors"))


def _entry(rank: int, mark: str) -> str:
    return str(Path(part_name(rank)).with_suffix(f".{mark}.json"))
