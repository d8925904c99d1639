"""Node 0's port: bound before anything else happens there, and reached from the other nodes with a reason where it is not."""

from __future__ import annotations

import errno
import os
import socket

from trainer.errors import ExitCode, FaultError
from trainer.node.identity import Identity
from trainer.node.network import holder

LISTENER = "TRAINER_MASTER_FD"  # a listening socket from the local launcher, so that no other job can take the port
_CONNECT_SECONDS = 3.0


def listen(node: Identity) -> socket.socket:
    """Bind node 0's port.

    Raises:
        FaultError: the port is taken, or the address is not this machine's.
    """
    if given := os.environ.pop(LISTENER, None):
        return socket.socket(fileno=int(given))
    ipv6 = ":" in node.master_addr
    listener = socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    host = node.master_addr if node.nnodes == 1 else "::" if ipv6 else "0.0.0.0"  # noqa: S104 (peers come over any interface)
    try:
        listener.bind((host, node.master_port))
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            cause = f"cannot listen on {host}:{node.master_port}: {error.strerror or error}"
            raise node.fault("A1", cause, "PET_MASTER_ADDR must be an address of node 0 itself") from None
        who = holder(node.master_port)
        cause = f"port {node.master_port} is already in use on {node.host}" + (f" by {who}" if who else "")
        fix = "stop it or choose another port" if who else f"find its holder with: ss -ltnp sport = :{node.master_port}"
        raise node.fault("A3", cause, fix) from None
    listener.listen(1024)
    return listener


def reach(node: Identity) -> socket.socket:
    """Connect to node 0's port: one try.

    Raises:
        FaultError: it cannot be reached; the reason is what the try has met.
    """
    where = f"{node.master_addr}:{node.master_port}"
    try:
        found = socket.getaddrinfo(node.master_addr, node.master_port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        cause = f"the master address {node.master_addr!r} (port {node.master_port}) does not resolve on {node.host}"
        raise node.fault("A2", cause, "use node 0's IP address, or add the name to DNS or /etc/hosts", ExitCode.JOIN) from None
    met: OSError = TimeoutError()
    for family, kind, protocol, _, address in sorted(found, key=lambda each: each[0] != socket.AF_INET):  # node 0 listens there
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            met = error
    raise _unreachable(node, where, met)


def _unreachable(node: Identity, where: str, error: OSError) -> FaultError:
    if isinstance(error, ConnectionRefusedError):
        cause = f"nothing listens on {where}, connection refused"
        fix = "check that node 0 runs there and that address and port agree on all nodes"
        return node.fault("A1", cause, fix, ExitCode.JOIN)
    if isinstance(error, TimeoutError):
        cause = f"no answer from {where} (filtered?)"
        return node.fault("A10", cause, "check the address, and that a firewall lets this port through", ExitCode.JOIN)
    cause = f"no way to {where}: {error.strerror or error}"
    return node.fault("A1", cause, "check the address and this node's network", ExitCode.JOIN)
