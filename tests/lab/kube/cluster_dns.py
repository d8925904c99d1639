"""The cluster's DNS: A records of headless Services, NXDOMAIN until they are published."""

from __future__ import annotations

import socket
import struct
import threading
import time

DOMAIN = "svc.cluster.local"
_ANSWER, _NO_SUCH_NAME, _TTL_SECONDS, _A = 0x8580, 3, 5, 1


class Dns(threading.Thread):
    """Answers over UDP from a table that the kubelet keeps; reading a dict that another thread changes is safe as it stands."""

    def __init__(self, address: str, namespace: str) -> None:
        super().__init__(daemon=True)
        self.namespace = namespace
        self._records: dict[str, dict[str, float]] = {}  # name -> address -> when it becomes known
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 53))

    def publish(self, name: str, address: str, at: float) -> None:
        """Let a name within the namespace resolve to an address from a moment on (time.monotonic)."""
        self._records.setdefault(self._full(name), {}).setdefault(address, at)

    def withdraw(self, name: str, address: str) -> None:
        self._records.get(self._full(name), {}).pop(address, None)

    def resolve(self, name: str) -> list[str]:
        """The addresses of a short or a full name."""
        full = name if name.endswith(f".{DOMAIN}") else self._full(name)
        now = time.monotonic()
        return [address for address, known_from in list(self._records.get(full, {}).items()) if known_from <= now]

    def run(self) -> None:
        while True:
            query, asker = self._socket.recvfrom(512)
            try:
                self._socket.sendto(self._reply(query), asker)
            except (IndexError, OSError, UnicodeError, struct.error):
                continue  # not a query, or its sender is gone

    def _full(self, name: str) -> str:
        return f"{name}.{self.namespace}.{DOMAIN}"

    def _reply(self, query: bytes) -> bytes:
        """Header, question and answers (RFC 1035, section 4.1)."""
        labels, end = [], 12
        while query[end]:
            labels.append(query[end + 1 : end + 1 + query[end]].decode().lower())
            end += query[end] + 1
        (kind,) = struct.unpack(">H", query[end + 1 : end + 3])
        addresses = self.resolve(".".join(labels))
        flags = _ANSWER | (0 if addresses else _NO_SUCH_NAME)
        answers = [_record(address) for address in addresses] if kind == _A else []
        header = query[:2] + struct.pack(">HHHHH", flags, 1, len(answers), 0, 0)
        return header + query[12 : end + 5] + b"".join(answers)


def _record(address: str) -> bytes:
    """An A record whose name is a pointer to the question's."""
    return b"\xc0\x0c" + struct.pack(">HHIH", _A, 1, _TTL_SECONDS, 4) + socket.inet_aton(address)
