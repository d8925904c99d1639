"""What went wrong with a rank, told as one fault: by how it ended, and by the reason that it left behind."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.errors import ExitCode, Fault, own_frame
from trainer.node.logs import last_lines
from trainer.node.ranks import Rank
from trainer.node.stacks import threads
from trainer.node.vitals import Vitals
from trainer.process import signal_name
from trainer.pulse import Phase

# What a survivor says of a peer that is gone: never a root cause.
_PEER_LOSS = re.compile(
    r"Connection (closed|reset) by|Broken pipe|Socket (closed|Timeout)|Connection refused|remote process exited|Timed out waiting"
    r"|ncclRemoteError|ncclSystemError|failed to connect|Failed to recv|recvValue failed|sendBytes failed|Connect timeout",
    re.IGNORECASE,
)


_MORE_MEMORY = "ask for more memory (resources.memory_gb_per_node), or use fewer loader workers or smaller batches"
_SHARED_MEMORY = "give the container more /dev/shm (compose: shm_size, Kubernetes: a Memory emptyDir, docker: --shm-size)"
_LEAVING_SECONDS = 3.0  # for a rank that has failed to end
SAME_COLLECTIVES = "let every rank call the same collectives in the same order; look for `if rank == 0`"
_NATIVE = "the dataset crashed in native code: see the log; data.num_workers=0 tells where"
LEFT = "something in the dataset ends its process: see the log; data.num_workers=0 tells where"
_UNUSED = "freeze what gets no gradient, use it, or set model.find_unused_parameters=true (find_unused_parameters=True in DDP)"
# What torch says: pattern, code, exit code, fix.
_KNOWN = (
    (r"Expected to have finished reduction in the prior iteration", "C7", ExitCode.RANK_FAILED, _UNUSED),
    (r"Too many open files|received 0 items of ancdata", "E2", ExitCode.RANK_FAILED, "raise the limit of open files (ulimit -n)"),
    (r"Bus error|unable to .*(shared memory|</torch_)", "E1", ExitCode.RANK_KILLED, _SHARED_MEMORY),
    (r"DataLoader worker \(pid.*killed by signal: (?!Killed)", "C1", ExitCode.RANK_KILLED, _NATIVE),
    (r"DataLoader worker \(pid.*exited unexpectedly with exit code", "C1", ExitCode.RANK_FAILED, LEFT),
    (r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)", "E3", ExitCode.RANK_KILLED, _MORE_MEMORY),
    (r"DataLoader timed out after", "E4", ExitCode.STALLED, "see what the dataset does there, or raise watch.stall_seconds"),
    (r"Pin memory thread exited", "E7", ExitCode.RANK_KILLED, "see the worker's error in the log; or data.pin_memory=false"),
)


@dataclass
class Running:
    """One rank of this node."""

    rank: Rank
    pid: int
    vitals: Vitals
    status: int | None = None  # exit code, or minus the signal that killed it
    ended: float = 0.0
    reason: dict[str, object] = field(default_factory=dict)  # what it left in its error file
    leaving: float | None = None  # since when it has failed, by its own word, and not ended yet (time.monotonic())

    @property
    def failed(self) -> bool:
        """It ended, and neither well nor on request."""
        return self.left or self.status not in (None, ExitCode.DONE, ExitCode.STOPPED)

    @property
    def left(self) -> bool:
        """It ended with 0 before all was done, which the kit's own ranks say."""
        own = not self.rank.entrypoint.endswith(".py")
        return own and self.status == ExitCode.DONE and self.vitals.beat.phase != Phase.DONE

    @property
    def lost_a_peer(self) -> bool:
        """It failed, but only because another rank was gone: torch said so, not some network code of the user's.

        Its first exception counts: whatever the user's code made of that, and whatever it met on its way out of one of its own.
        """
        if self.status == -signal.SIGABRT:  # NCCL's watchdog ends a process so
            return bool(_PEER_LOSS.search(thrown(Path(self.rank.log))))
        return _tells_of_a_peer(self._first or self.reason)

    @property
    def stuck(self) -> bool:
        """It has failed, and what it does on its way out, such as to wait for its own threads, takes long."""
        return self.status is None and self.leaving is not None and time.monotonic() - self.leaving > _LEAVING_SECONDS

    @property
    def code(self) -> int:
        """Its exit code, or minus the signal that killed it; what it is going to be, if it is on its way out."""
        if self.status is None and self.leaving is not None:
            told = str(self.reason.get("message", "")) if self.reason.get("type") == "SystemExit" else ""
            return int(told) if told.isdecimal() else 1
        return self.status or 0

    @property
    def why(self) -> Mapping[str, object]:
        """Type, message and place of what ended it: of its last exception, unless that only tells of a peer that is gone."""
        return self._first if self._first and _tells_of_a_peer(self.reason) else self.reason

    @property
    def _first(self) -> dict[str, object] | None:
        first = self.reason.get("first")
        return first if isinstance(first, dict) else None


def _tells_of_a_peer(reason: Mapping[str, object]) -> bool:
    kind = str(reason.get("type", "RuntimeError"))
    said = (kind == "RuntimeError" or kind.startswith("Dist")) and not reason.get("own")
    return said and bool(_PEER_LOSS.search(str(reason.get("message", ""))))


def describe(culprit: Running, host: str, node_rank: int, memory: str | None = None) -> Fault:
    """The fault of a rank that failed.

    Args:
        memory: what the kernel has killed for memory on this node, in words.
    """
    rank, status, reason = culprit.rank.rank, culprit.code, culprit.reason
    if culprit.left:
        return left_early(host, rank, node_rank)
    if culprit.lost_a_peer:
        told = culprit.why.get("message") or thrown(Path(culprit.rank.log))
        cause = f"lost another rank, which told nobody why ({told})"
        return Fault("C1", host, cause, "look at the other nodes' logs", ExitCode.NODE_LOST, rank, node_rank)
    if status < 0:
        return _killed(culprit, host, node_rank, memory)
    if "fault" in reason:
        return replace(Fault.from_json(str(reason["fault"])), node_rank=node_rank)
    why = culprit.why
    message, where = str(why.get("message", "")), str(why.get("where", ""))
    if "exit_code" in reason:
        problem, _, remedy = message.rpartition("; ")
        code = ExitCode(int(str(reason["exit_code"])))
        return Fault("CONFIG", host, problem or message, remedy, code, rank, node_rank)
    cause = _cause(status, str(why.get("type", "")), message) + (f" ({where})" if where else "")
    for pattern, number, exit_code, fix in _KNOWN:
        if re.search(pattern, message):
            cause = f"{memory}: {cause}" if memory and number == "E3" else cause
            return Fault(number, host, cause, fix, exit_code, rank, node_rank)
    return Fault("C1", host, cause, f"see the traceback in {culprit.rank.log}", ExitCode.RANK_FAILED, rank, node_rank)


def _killed(culprit: Running, host: str, node_rank: int, memory: str | None) -> Fault:
    """The fault of a rank that ended by a signal."""
    number = -(culprit.status or 0)
    code, cause = "C1", f"killed by signal {number} ({signal_name(number)})"
    fix = "find who sent it (the kernel's memory killer, the scheduler, a person), then start again"
    if number == signal.SIGKILL and memory:
        code, cause, fix = "E3", f"killed by the kernel: {memory}", _MORE_MEMORY
    if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
        cause += last_words(Path(culprit.rank.log))
        if "collective mismatch" in cause:  # gloo's words
            return Fault("C5", host, cause, SAME_COLLECTIVES, ExitCode.RANK_FAILED, culprit.rank.rank, node_rank)
        fix = f"see the end of {culprit.rank.log}"
    return Fault(code, host, cause, fix, ExitCode.RANK_KILLED, culprit.rank.rank, node_rank)


def last_words(log: Path) -> str:
    """What a process that crashed in native code wrote last: a C++ exception, and where Python was."""
    text, said = last_lines(log, 400), thrown(log)
    frames = [frame for thread in threads(text.rpartition("Fatal Python error")[2]) for frame in thread]
    name, line, function = own_frame(frames) if frames else ("", 0, "")
    return (f": {said}" if said else "") + (f" in {Path(name).name}:{line} in {function}" if name else "")


def thrown(log: Path) -> str:
    """What the C++ exception said by which a process ended, or ""."""
    found = re.findall(r"what\(\): *(.+)", last_lines(log, 400))
    return " ".join(found[-1].split()) if found else ""


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
