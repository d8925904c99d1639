"""This machine's side of the network: which interface leads to the other nodes, and who holds a port."""

from __future__ import annotations

import fcntl
import os
import pwd
import socket
import struct
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
_LISTEN = "0A"  # state of a socket in /proc/net/tcp
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_COMMAND = 60  # characters of a command that a line shows


def interfaces() -> dict[str, str]:
    """This machine's interfaces that have an IPv4 address: name -> address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def problem(environ: Mapping[str, str], wanted: str, machines: int) -> tuple[str, str] | None:
    """What is wrong with the interface that gloo would use: the fault's code and cause.

    Args:
        wanted: `auto`, `off` or the name of one (rollcall.interface).
        machines: how many hosts the nodes of the job run on.
    """
    given = environ.get(_GLOO, "" if wanted in ("auto", "off") else wanted)
    there = interfaces()
    names = ", ".join(name for _, name in socket.if_nameindex())
    if any(sign in given for sign in "^="):
        return "A8", f"{_GLOO}={given} is a pattern of NCCL's; gloo takes the name of an interface (here are {names})"
    for name in filter(None, given.split(",")):
        if name not in names.split(", "):
            return "A8", f"{_GLOO}={given}: there is no interface {name} (here are {names})"
        if machines > 1 and there.get(name, "").startswith("127."):
            return "A5", f"{_GLOO}={given} is loopback ({there[name]}), which the other nodes cannot reach"
    if machines > 1 and wanted == "off" and not given:
        return _own_name()
    return None


def _own_name() -> tuple[str, str] | None:
    """Without an interface gloo takes the address of the host's own name."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return "A6", f"the host's own name {host} does not resolve, and gloo asks for its address where no interface is named"
    if not address.startswith("127."):
        return None
    return (
        "A5",
        f"the host's own name {host} resolves to {address}, which gloo would tell the other nodes, and they cannot reach it",
    )


def named_address(environ: Mapping[str, str]) -> str:
    """The address of the interface that the user has named for gloo, or empty."""
    return interfaces().get(environ.get(_GLOO, "").split(",")[0], "")


def choose(environ: MutableMapping[str, str], address: str) -> str | None:
    """Tell gloo and NCCL the interface of an address, where the user has not.

    By themselves they take that of the host's own name, which may be loopback (127.0.1.1 on Debian), or the first one, which may
    be a bridge of Docker's.

    Returns:
        Its name, or None if there is none or the user has named all.
    """
    name = next((name for name, own in interfaces().items() if own == address), None)
    if name is None or (_GLOO in environ and _NCCL in environ):
        return None
    environ.setdefault(_GLOO, name)
    environ.setdefault(_NCCL, name)
    return name


def holder(port: int) -> str | None:
    """Who listens on a port of this machine, as `pid 4242 (python train.py, user u, 3 h old)`; None if that cannot be read."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(str(link.readlink()) in inodes for link in (process / "fd").iterdir()):
                return _described(process)
    return None


def _described(process: Path) -> str:
    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    owner = process.stat().st_uid
    with suppress(KeyError):
        owner_name = pwd.getpwuid(owner).pw_name
        return f"pid {process.name} ({command[:_COMMAND]}, user {owner_name}, {_age(process)} old)"
    return f"pid {process.name} ({command[:_COMMAND]}, uid {owner}, {_age(process)} old)"


def _age(process: Path) -> str:
    ticks = int((process / "stat").read_text().rpartition(")")[2].split()[19])
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
