"""A line between two nodes before there is a store: JSON objects, one to a text line, over TCP."""

from __future__ import annotations

import json
import select
import socket
from collections import deque
from collections.abc import Mapping
from typing import Any

_BLOCK = 1 << 16
_LONGEST = 1 << 22  # bytes of one message: nobody of ours sends more, so whoever does is somebody else
# A peer that is gone without a word (power, cable) is noticed after about 11 s, tcp(7).
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}

Message = Mapping[str, Any]


class Line:
    """One end. Nothing here blocks; `ConnectionError` is the other end's end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unsent = b""
        self._waiting = bytearray()
        self._messages: deque[Message] = deque()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Message) -> None:
        """Send one message, or as much of it as the kernel takes now; `flush` sends the rest."""
        self.unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what is still waiting."""
        while self.unsent:
            try:
                self.unsent = self.unsent[self.connection.send(self.unsent) :]
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionError(error.strerror or str(error)) from None

    def receive(self) -> Message | None:
        """The next message, or None if none has come.

        Raises:
            ConnectionError: the other end has closed, is gone, or sends something else than messages.
        """
        if not self._messages:
            self._read()
        return self._messages.popleft() if self._messages else None

    def wait(self, seconds: float) -> bool:
        """Wait until something has come, or the other end has closed."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN | (select.POLLOUT if self.unsent else 0))
        ready = bool(poll.poll(seconds * 1000))
        self.flush()
        return ready

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    def _read(self) -> None:
        try:
            block = self.connection.recv(_BLOCK)
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionError(error.strerror or str(error)) from None
        if not block:
            raise ConnectionError("closed")
        self._waiting += block
        *whole, rest = self._waiting.split(b"\n")
        self._waiting = bytearray(rest)
        if len(rest) > _LONGEST:
            raise ConnectionError("no message ends")
        for text in whole:
            self._messages.append(_parsed(text))


def _parsed(text: bytes | bytearray) -> Message:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ConnectionError(f"it said {text[:40].decode('utf-8', 'replace').strip()!r}")
    return message
