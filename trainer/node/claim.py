"""What node 0 takes for a node's word: anybody can send anything to its port."""

from __future__ import annotations

import ipaddress
from typing import Any

from trainer.errors import Fault
from trainer.node.line import Message

_CLAIM = {
    **dict.fromkeys(("node_rank", "nnodes", "pid", "port"), int),
    **dict.fromkeys(("host", "job", "address", "route"), str),
    **dict.fromkeys(("facts", "traits"), dict),
    "warnings": list,
}


def is_claim(message: Message) -> bool:
    """Whether it is a whole claim."""
    if any(type(message.get(key)) is not kind for key, kind in _CLAIM.items()):
        return False
    told = [*message["facts"].values(), *message["traits"].values(), *message["warnings"]]
    if message.get("trouble") is not None and not is_fault(message["trouble"]):
        return False
    try:
        ipaddress.ip_address(message["address"])
    except ValueError:
        return False
    ranks = range(message["nnodes"])
    return all(isinstance(text, str) for text in told) and message["node_rank"] in ranks and message["port"] in range(1, 1 << 16)


def is_fault(text: Any) -> bool:
    """Whether it is a fault as `Fault.to_json` writes it."""
    try:
        Fault.from_json(text)
    except (ValueError, TypeError, KeyError):
        return False
    return True


def is_answer(probed: Any) -> bool:
    """Whether it is what a node tells after a probe."""
    return isinstance(probed, dict) and {"failed", "received", "clock", "mark"} <= probed.keys()
