"""What went wrong with a rank, told as one fault: by how it ended, and by the reason that it left behind."""

from __future__ import annotations

import json
import re
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.errors import ExitCode, Fault
from trainer.node.ranks import Rank
from trainer.process import signal_name

# What a survivor says of a peer that is gone: never a root cause.
_PEER_LOSS = re.compile(
    r"Connection (closed|reset) by|Broken pipe|Socket (closed|Timeout)|Connection refused|remote process exited|Timed out waiting"
    r"|ncclRemoteError|ncclSystemError|failed to connect|Failed to recv|recvValue failed|sendBytes failed|Connect timeout",
    re.IGNORECASE,
)


@dataclass
class Running:
    """One rank of this node."""

    rank: Rank
    pid: int
    status: int | None = None  # exit code, or minus the signal that killed it
    ended: float = 0.0
    stopped_since: float | None = None  # time.monotonic() at which it was first seen stopped
    reason: dict[str, object] = field(default_factory=dict)  # what it left in its error file

    @property
    def failed(self) -> bool:
        """It ended, and neither well nor on request."""
        return self.status not in (None, ExitCode.DONE, ExitCode.STOPPED)

    @property
    def lost_a_peer(self) -> bool:
        """It failed, but only because another rank was gone: torch said so, not some network code of the user's."""
        kind = str(self.reason.get("type", "RuntimeError"))
        said = kind == "RuntimeError" or kind.startswith("Dist")
        return said and bool(_PEER_LOSS.search(str(self.reason.get("message", ""))))


def describe(culprit: Running, host: str, node_rank: int) -> Fault:
    """The fault of a rank that failed."""
    rank, status, reason = culprit.rank.rank, culprit.status or 0, culprit.reason
    if status < 0:
        number = -status
        cause = f"killed by signal {number} ({signal_name(number)})"
        fix = "find who sent it (the kernel's memory killer, the scheduler, a person), then start again"
        if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
            fix = f"see the end of {culprit.rank.log}"
        return Fault("C1", host, cause, fix, ExitCode.RANK_KILLED, rank, node_rank)
    if "fault" in reason:
        return replace(Fault.from_json(str(reason["fault"])), node_rank=node_rank)
    message, where = str(reason.get("message", "")), str(reason.get("where", ""))
    if "exit_code" in reason:
        problem, _, remedy = message.rpartition("; ")
        code = ExitCode(int(str(reason["exit_code"])))
        return Fault("CONFIG", host, problem or message, remedy, code, rank, node_rank)
    cause = _cause(status, str(reason.get("type", "")), message) + (f" ({where})" if where else "")
    fix = f"see the traceback in {culprit.rank.log}"
    if culprit.lost_a_peer:
        cause = f"lost another rank, which told nobody why ({message})"
        fix = "look at the other nodes' logs"
        return Fault("C1", host, cause, fix, ExitCode.NODE_LOST, rank, node_rank)
    killed = "DataLoader worker" in message and "killed by signal" in message
    code = ExitCode.RANK_KILLED if killed else ExitCode.RANK_FAILED
    return Fault("C1", host, cause, fix, code, rank, node_rank)


def _cause(status: int, kind: str, message: str) -> str:
    """What ended a rank that was not killed, in words."""
    if not kind and not message:
        return f"vanished with exit code {status}, no message"
    if kind == "SystemExit":
        return f"exited with {status}" + (f": {message}" if not message.lstrip("-").isdecimal() else "")
    return message if not kind or message.startswith(kind) else f"{kind}: {message}" if message else kind


def left_early(host: str, rank: int, node_rank: int) -> Fault:
    """The fault of a rank that ended with 0 while others were still at work."""
    cause = "left early with exit code 0 while others were still training"
    fix = "let all ranks do the same number of steps; look for an early return or sys.exit on that rank"
    return Fault("D5", host, cause, fix, ExitCode.RANK_FAILED, rank, node_rank)


def read_reason(path: Path) -> dict[str, object]:
    """A rank's error file: this kit's, or what torch's `@record` wrote."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    inner = record.get("message")
    if isinstance(inner, dict):  # torch: {"message": {"message": "ValueError: bad", "extraInfo": {"timestamp": "1700000000"}}}
        extra = inner.get("extraInfo", {})
        return {"message": str(inner.get("message", "")), "time": float(extra.get("timestamp", time.time()))}
    return dict(record)
