"""A download that one process of each node does while the others wait for it."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)


def once_per_node(root: Path, name: str, is_there: Callable[[], bool], fetch: Callable[[Path], None]) -> None:
    """Fill `root` with what `fetch` brings, unless it is there already.

    One process of each node fetches, under a lock that the kernel drops when its holder dies, into a temporary folder, and what
    it brought is renamed into `root` when it is whole. Nodes that share `root` may fetch twice; the first to finish wins.

    Args:
        root: folder for the data; made if missing.
        name: what is fetched, for messages.
        is_there: whether `root` has it whole.
        fetch: brings it into the folder it is given.
    """
    if is_there():
        return
    # The lock lies on the node's own disk: locks on shared file systems are not to be trusted.
    key = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    with open(Path(tempfile.gettempdir()) / f"trainer-download-{os.getuid()}-{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_there():
            return
        root.mkdir(parents=True, exist_ok=True)
        logger.info("downloading %s to %s", name, root)
        staging = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
        try:
            fetch(staging)
            for entry in [] if is_there() else sorted(staging.iterdir()):
                _move(entry, root / entry.name)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    if target.is_dir():  # left by an older, broken download
        shutil.rmtree(target, ignore_errors=True)
    source.replace(target)
