"""Machines' names without the name server.

torch's store looks up the name of every peer when a connection is made, only to log it: the client once, and the server in its
one thread, where all others wait meanwhile. A name server that does not answer costs 10 s each time.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SWITCH = Path("/etc/nsswitch.conf")
_DEFAULT = "dns files"  # glibc's own, where the file says nothing


def only_from_files() -> None:
    """From here on, this process and what it forks looks up names in /etc/hosts alone (glibc; elsewhere nothing changes)."""
    _look_in("files")


@contextmanager
def without_dns() -> Iterator[None]:
    """Look up names in /etc/hosts alone for a while."""
    only_from_files()
    try:
        yield
    finally:
        _look_in(_configured())


def _look_in(sources: str) -> None:
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "__nss_configure_lookup"):
        library["__nss_configure_lookup"](b"hosts", sources.encode())  # <nss.h>; musl has none


def _configured() -> str:
    try:
        found = re.search(r"^\s*hosts:([^#\n]*)", _SWITCH.read_text(), re.MULTILINE)
    except OSError:
        return _DEFAULT
    return found[1].strip() if found else _DEFAULT
