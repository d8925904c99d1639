"""Whether the nodes reach each other on the ports that gloo and NCCL will choose, and how fast: plain TCP, before any collective.

Each node has one listening port of the kernel's choice and tries those of its partners, many at a time; the kernel answers for a
node that is busy. The work of a node is linear in its partners, and the time is bounded: a dead port costs all who try it the
same seconds, and a node that has found enough dead ones stops looking.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

CONNECT_SECONDS = 3.0  # two lost SYNs: the kernel repeats it after 1 s and 3 s
LIMIT_SECONDS = 8.0  # of one whole probe, without the stream itself
_AT_ONCE = 128
_ENOUGH = 20  # failures, after which nothing more is learned
_BLOCK = 1 << 18

Partner = tuple[int, str, int]  # node rank, address, port


def entry(address: str, port: int) -> str:
    """An address and port for a table of them: base64 that needs no padding (8 characters, or 24 for IPv6), so that a table is a
    text that is encoded once and can be cut at any entry."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return b64encode(socket.inet_pton(family, address) + port.to_bytes(2, "big")).decode()


@dataclass(frozen=True)
class Task:
    """What a node is to find out."""

    to: str  # whom it is to try: a table of entries that begins with node rank `first` and goes round the ring
    first: int
    nodes: int
    ipv6: bool = False
    seconds: float = 0.0  # how long a stream lasts
    sends: bool = False  # whether it streams to the first of them
    receives: bool = False  # whether another node streams to it

    @property
    def partners(self) -> list[Partner]:
        """The table, read."""
        family, layout = (socket.AF_INET6, "!16sH") if self.ipv6 else (socket.AF_INET, "!4sH")
        entries = enumerate(struct.iter_unpack(layout, b64decode(self.to)), self.first)
        return [(rank % self.nodes, socket.inet_ntop(family, packed), port) for rank, (packed, port) in entries]


@dataclass(frozen=True)
class Result:
    """What one node has found."""

    failed: list[tuple[int, str]] = field(default_factory=list)  # (node rank, why) of those it did not reach
    received: float | None = None  # bytes/s that came from the one who streamed to it


class Probe:
    """This node's port, and what it finds out about others."""

    def __init__(self, address: str) -> None:
        """
        Args:
            address: of this node, as the route to node 0 has it.
        """
        self._listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._listener.bind((address, 0))
        self._listener.listen(4096)
        self._listener.setblocking(False)
        self.address, self.port = self._listener.getsockname()[:2]

    def close(self) -> None:
        """Give the port back."""
        self._listener.close()

    def run(self, task: Task, pause: Callable[[float], None]) -> Result:
        """Try to reach partners; then stream to the first while another node streams to this one.

        Args:
            pause: called often; what it raises ends the probe.
        """
        to, seconds = task.partners, task.seconds
        with _Sockets(self._listener, seconds) as sockets:
            until = time.monotonic() + LIMIT_SECONDS - 1 + seconds
            sockets.reach(to, until, pause)
            if task.sends and to[0][0] not in dict(sockets.failed):
                sockets.open_stream(to[0])
            while sockets.sending or (task.receives and sockets.received is None):
                pause(0)
                sockets.turn()
                if time.monotonic() > min(until, sockets.idle_since + CONNECT_SECONDS + seconds):
                    break
            return Result(sockets.failed, sockets.rate)


class _Sockets:
    """The connections of one probe, served by one selector."""

    def __init__(self, listener: socket.socket, seconds: float) -> None:
        self.listener, self.seconds = listener, seconds
        self.failed: list[tuple[int, str]] = []
        self.received: float | None = None
        self.sending: socket.socket | None = None
        self.idle_since = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._flying: dict[socket.socket, tuple[int, float]] = {}  # -> node rank, when it is given up
        self._buffer = bytearray(_BLOCK)
        self._came, self._first = 0, 0.0

    def __enter__(self) -> _Sockets:
        return self

    def __exit__(self, *error: object) -> None:
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self.listener:
                self._drop(key.fileobj)  # type: ignore[arg-type]
        self._selector.close()

    @property
    def rate(self) -> float | None:
        """Bytes/s that came, also over a way so slow that the stream never ended."""
        if self.received is None and self._came:
            return self._came / max(time.monotonic() - self._first, 1e-3)
        return self.received

    def reach(self, to: Sequence[Partner], until: float, pause: Callable[[float], None]) -> None:
        """Try all, at most so many at once."""
        waiting = deque(to)
        while (waiting or self._flying) and time.monotonic() < until:
            while waiting and len(self._flying) < _AT_ONCE and len(self.failed) < _ENOUGH:
                self._start(waiting.popleft())
            if len(self.failed) >= _ENOUGH:
                waiting.clear()
            pause(0)
            self.turn()
            for connection, (rank, limit) in list(self._flying.items()):
                if time.monotonic() > limit:
                    self._landed(connection, rank, "no answer")
        self.idle_since = time.monotonic()

    def open_stream(self, target: Partner) -> None:
        """Connect for streaming; the bytes follow as the other end takes them."""
        connection = socket.socket(socket.AF_INET6 if ":" in target[1] else socket.AF_INET)
        connection.setblocking(False)
        self.sending = connection
        connection.connect_ex((target[1], target[2]))
        self._selector.register(connection, selectors.EVENT_WRITE, self._stream)

    def turn(self) -> None:
        """Serve what is ready."""
        for key, _ in self._selector.select(0.05):
            key.data(key.fileobj)

    def _start(self, partner: Partner) -> None:
        rank, address, port = partner
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        connection.setblocking(False)
        self._flying[connection] = rank, time.monotonic() + CONNECT_SECONDS
        self._selector.register(connection, selectors.EVENT_WRITE, self._connected)
        code = connection.connect_ex((address, port))
        if code not in (0, errno.EINPROGRESS):
            self._landed(connection, rank, os.strerror(code))

    def _connected(self, connection: socket.socket) -> None:
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        why = "no answer" if code == errno.ETIMEDOUT else "refused" if code == errno.ECONNREFUSED else os.strerror(code)
        self._landed(connection, self._flying[connection][0], why if code else None)

    def _landed(self, connection: socket.socket, rank: int, why: str | None) -> None:
        del self._flying[connection]
        self._drop(connection)
        if why:
            self.failed.append((rank, why))

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, self._take)

    def _take(self, connection: socket.socket) -> None:
        """Whoever only tried the port closes without a byte; the one who streams is cut off when its time is up."""
        try:
            count = connection.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        now = time.monotonic()
        if count:
            self._first = self._first or now
            self._came += count
            if now - self._first < self.seconds:
                return
        self._drop(connection)
        if self._came:
            self.received = self._came / max(now - self._first, 1e-3)

    def _stream(self, connection: socket.socket) -> None:
        try:
            connection.send(self._buffer)
        except BlockingIOError:
            return
        except OSError:  # its time is up, or it is not to be reached after all: the other end tells
            self._drop(connection)
            self.sending = None

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
