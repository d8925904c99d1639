"""torch's store on node 0: a process of its own serves it, and each node has one line to it."""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from trainer.names import only_from_files, without_dns
from trainer.process import STOP_SIGNALS, die_with_parent

REQUEST_SECONDS = 10.0  # limit of one request
ANSWER_SECONDS = 20.0  # limit of the first one, and for all nodes to be there: a machine may be busy with their start


def serve(listener: socket.socket, in_child: Callable[[], None]) -> int:
    """Run the store in a process of its own, so that this one keeps a single thread and can fork; returns its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        listener.close()
        return pid
    try:
        in_child()
        die_with_parent(parent)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # its end is the node process's end, or its word
        only_from_files()  # it serves all with one thread
        host, port = listener.getsockname()[:2]
        store = TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False)
        while store:
            signal.pause()
    finally:
        os._exit(1)


def answers(address: str, port: int, seconds: float = ANSWER_SECONDS) -> bool:
    """Whether a store listens there.

    Tried in a child: the store's client waits for ever for a listener that accepts and then says nothing, whatever its timeout.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(parent)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's warnings would be told twice
            only_from_files()
            TCPStore(address, port, is_master=False, wait_for_workers=False)
            os._exit(0)
        finally:
            os._exit(1)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def connect(address: str, port: int) -> tuple[Store, list[int]]:
    """A line to the store, and its sockets.

    Raises:
        ConnectionError: it cannot be had.
    """
    timeout = timedelta(seconds=REQUEST_SECONDS)
    before = _sockets()
    try:
        with without_dns():
            store = TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (DistError, RuntimeError) as error:
        raise ConnectionError(str(error)) from None
    made = sorted(_sockets() - before)
    for fd in made:
        _limit(fd)
    return PrefixStore("nodes", store), made


def _sockets() -> set[int]:
    """The sockets that this process has open, where /proc tells."""
    found = set()
    for path in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else []:
        with suppress(OSError):  # the listing's own is closed again
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                found.add(int(path.name))
    return found


def _limit(fd: int) -> None:
    """Let a request end that is never answered. The store's client waits for ever for a node 0 that is frozen or cut off."""
    limit = struct.pack("ll", int(REQUEST_SECONDS), 0)  # a struct timeval
    with socket.socket(fileno=os.dup(fd)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
