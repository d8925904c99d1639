"""Whether a job stands still, and who holds it up: decided from what all nodes see of their ranks. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from trainer.errors import ExitCode, Fault
from trainer.node.verdict import LEFT, SAME_COLLECTIVES, left_early
from trainer.pulse import ASKING, Phase

_LEAST_BUSY, _WORTH_A_WORD = 0.02, 0.2  # shares of a step
_LET_OUT = "correct what raised it, and have no rank wait in `except` and `finally` blocks for what the others do"
_RETRY = "start again to go on from the last checkpoint"


@dataclass(frozen=True)
class Finding:
    """What the processes of a rank that does not get on are at."""

    place: str = ""  # file:line in function, of the user's code
    waits: str = "is"  # what it does there, in words
    collective: str | None = None  # that its main thread is in
    loads: bool = False  # it waits for its loader workers
    workers: tuple[str, ...] = ()  # what each of these is at
    writer: str = ""  # what the process that writes its checkpoints is at, if that has work
    operation: str = ""  # the last collective that it has begun, as torch recorded it
    error: str = ""  # an exception that its main thread handles, or lets through a `finally` block


@dataclass(frozen=True)
class Sight:
    """What a node sees of one of its ranks."""

    rank: int
    host: str
    node_rank: int
    pid: int
    state: str  # the kernel's letter, or "exit 0"
    step: int
    place: int  # phases entered since the last step ended
    phase: Phase
    sequence: int  # collectives begun
    age: float  # seconds since its last progress
    left: float  # seconds that it may go on like this
    finding: Finding = field(default=Finding())
    busy: float | None = None  # share of its steps that it spends on its own part
    mostly: Phase = Phase.START  # and on what most

    @property
    def position(self) -> tuple[int, int, int]:
        """How far it has come. The collectives by which ranks ask each other whether all are ready do not count."""
        return self.step, self.place, 0 if self.phase in ASKING else self.sequence

    @property
    def alive(self) -> bool:
        """It has not ended."""
        return not self.state.startswith("exit")

    @property
    def left_early(self) -> bool:
        """It ended well as far as its exit code tells, and did not say goodbye."""
        return self.state == "exit 0" and self.phase != Phase.DONE

    @property
    def failed(self) -> bool:
        """It ended otherwise; its node says why."""
        return not self.alive and self.state != "exit 0"


def holding_up(sights: Sequence[Sight]) -> list[Sight]:
    """The ranks that hold the job up, if it stands still; none while the last of all still has time. Among these, one that was
    stopped by a signal has only its own: what the others are at, such as their start, may take longer."""
    alive = [sight for sight in sights if sight.alive]
    if all(sight.left >= 0 for sight in alive):
        return []
    if gone := [sight for sight in sights if sight.left_early]:
        return gone
    last = min(sight.position for sight in alive)
    found = [sight for sight in alive if sight.position == last]
    late = [sight for sight in found if sight.left < 0]
    return found if len(late) == len(found) else [sight for sight in late if sight.state == "T"]


def suspects(sights: Sequence[Sight]) -> list[Sight]:
    """The ranks that others have waited for in vain, of which some have failed, as their collective took too long for torch:
    they may have time left, but are behind, or stopped."""
    alive, failed = [sight for sight in sights if sight.alive], [sight for sight in sights if sight.failed]
    if found := [sight for sight in sights if sight.left_early] or [sight for sight in alive if sight.state == "T"]:
        return found
    last = min((sight.position for sight in alive), default=None)
    behind = last is not None and all(last < sight.position for sight in failed)
    return [sight for sight in alive if sight.position == last] if behind else []


def stragglers(sights: Sequence[Sight], factor: float) -> Iterator[tuple[Sight, float]]:
    """Ranks that the others wait for in each step, and how many times the others' own part theirs takes.

    All steps take equally long, as all wait for the slowest: its own part fills them.
    """
    known = [(sight, sight.busy) for sight in sights if sight.busy is not None and sight.alive]
    for sight, busy in known if len(known) > 1 else ():
        usual = max(median(other for each, other in known if each is not sight), _LEAST_BUSY)
        if busy >= factor * usual and busy - usual > _WORTH_A_WORD:
            yield sight, busy / usual


def verdict(sights: Sequence[Sight], held: Sequence[Sight]) -> Fault:
    """The fault of a job that stands still.

    Args:
        sights: of all ranks, with findings.
        held: those of them that hold it up, at least one.
    """
    if not held[0].alive:
        return left_early(held[0].host, held[0].rank, held[0].node_rank)
    stopped = [sight for sight in sights if sight.state == "T"]
    busy = [sight for sight in held if not sight.finding.collective]
    hiding = _with_an_error(held, sights)
    odd = hiding or _in_another_collective(held)
    writing = [sight for sight in held if sight.phase == Phase.SAVE and sight.finding.writer]
    culprit = (stopped or writing or busy or odd or held)[0]
    others = [sight for sight in sights if sight.alive and sight.rank != culprit.rank]
    network = not (stopped or writing or busy or odd) and len(held) == len(others) + 1 > 1
    code, cause, fix = _words(culprit, others, network)
    if code in ("C2", "C5") and culprit.state not in "TD" and culprit in hiding:
        code, cause, fix = "C1", f"{culprit.finding.error}; handling that, it {cause}", _LET_OUT
    where = f"step {culprit.step + 1}, {culprit.phase.words}"
    if culprit.phase == Phase.START:
        where = f"after {culprit.sequence} collectives" if culprit.sequence else culprit.phase.words
    cause = f"{cause} ({where}, no progress for {culprit.age:.0f} s)"
    return Fault(code, culprit.host, cause, fix, ExitCode.STALLED, culprit.rank, culprit.node_rank)


def _with_an_error(held: Sequence[Sight], sights: Sequence[Sight]) -> list[Sight]:
    """Those that have an error in hand that nobody has been told of. If all have one, their script runs in an `except` block."""
    found = [sight for sight in held if sight.finding.error]
    return found if any(sight.alive and not sight.finding.error for sight in sights) else []


def _in_another_collective(held: Sequence[Sight]) -> list[Sight]:
    """Of ranks that are equally far, those that are in another collective than most; of two, what a step does is no mistake."""
    found = Counter(sight.finding.collective for sight in held)
    most = max(found, key=lambda collective: (found[collective], collective == "backward"))
    return [sight for sight in held if sight.finding.collective != most]


def _words(culprit: Sight, others: Sequence[Sight], network: bool) -> tuple[str, str, str]:
    """Code, cause and fix."""
    found, waiting = culprit.finding, ", the others wait for it" if others else ""
    if culprit.state == "T":
        where = f" in {found.place}" if found.place else ""
        cause = f"stopped by a signal{where} (pid {culprit.pid} is in state T){waiting}"
        return "C2", cause, f"do not stop single ranks; {_RETRY}"
    if culprit.state == "D":
        cause = f"in uninterruptible sleep (pid {culprit.pid} is in state D){waiting}"
        return "C2", cause, "a disk, a network file system or a device does not answer: see the kernel's log on that machine"
    if network and culprit.phase != Phase.SAVE:
        cause = f"all ranks are in the same {found.collective}, and none gets on"
        return "C3", cause, "look at the network between the nodes (links, switches, firewalls), then start again"
    if culprit.phase == Phase.SAVE:
        cause = f"does not get on with a save{f': {found.writer}' if found.writer else ''}{waiting}"
        return "G9", cause, "see whether the storage of run_dir answers; raise watch.phase_seconds if a save may take so long"
    if found.loads or (culprit.phase == Phase.DATA and found.workers):
        cause = f"waits for its loader workers: {'; '.join(found.workers) or 'none is left'}{waiting}"
        return "E4", cause, _data_fix(found.workers)
    if found.collective and found.collective != "backward":
        doing = sorted({_doing(sight) for sight in others})
        cause = f"is in {found.collective} ({found.place}), while the others are in {' and '.join(doing)}"
        return "C5", cause, SAME_COLLECTIVES
    at = f"{found.waits} in {found.place}" if found.place else "does not get on"
    return "C2", f"{at}{waiting}", "see its stack (trainer explain), or raise watch.stall_seconds if that may take so long"


def _doing(sight: Sight) -> str:
    found = sight.finding.collective or sight.phase.words
    return found if sight.finding.collective in (None, "backward") else f"{found} ({sight.finding.place})"


def _data_fix(workers: Sequence[str]) -> str:
    if any("has ended" in words for words in workers):
        return LEFT
    if any("lock" in words for words in workers):
        return "a thread held the lock when the workers were forked: data.multiprocessing_context=forkserver"
    return "see what the dataset does there (trainer explain); raise watch.stall_seconds if that may take so long"
