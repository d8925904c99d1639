"""Errors as values: the exit codes, the one-line faults, and the exceptions that carry them.

One table of exit codes serves every scheduler. Kubernetes takes 1-127 as final and 128-255 as worth another try
(`restartPolicy: ExitCode`), and the Slurm side requeues by the same border.
"""

from __future__ import annotations

import dis
import json
import re
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

SAMPLE = "sample "  # begins the note of an exception by which its data set's sample is known
_MESSAGE = 300  # characters of an exception's message in somebody else's line
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torch's own variable: where a rank leaves its reason; `@record` writes there too


class ExitCode(IntEnum):
    """What the kit's own processes exit with. Each member's comment says who should act."""

    DONE = 0
    ERROR = 1  # an error in the kit itself: please report it
    CONFIG = 2  # a setting or the command line was refused; another try cannot help
    RANK_FAILED = 3  # the user's code raised, or exited with a code of its own
    REFUSED = 4  # the nodes cannot form this job as they are (identity, port, address)

    STOPPED = 160  # asked to stop by a signal and stopped in good order; start again to go on
    JOIN = 161  # a node did not come in time, or could not reach node 0
    RANK_KILLED = 162  # a rank was killed by a signal that nobody in the job sent
    STALLED = 163  # alive, but no progress within the deadline
    NODE_LOST = 164  # a node that had joined is gone

    @property
    def retryable(self) -> bool:
        """Whether starting the same job again may help: the border that Kubernetes draws at 128."""
        return self >= 128


@dataclass(frozen=True)
class Fault:
    """One fault, told in one line: what went wrong where, why, and what to do.

    `code` is the fault's kind by its number in the project's catalogue (A = rendezvous, C = collectives, D = processes,
    E = host resources, ...); `rank` is a global rank, or None before ranks exist, and then `node_rank` is told.
    """

    code: str
    host: str
    cause: str
    fix: str
    exit_code: ExitCode
    rank: int | None = None
    node_rank: int = 0

    def line(self) -> str:
        """The line, the same on every node: `FAULT C1 host=n1 rank=3: <cause>; fix: <what to do>`."""
        who = f"rank={self.rank}" if self.rank is not None else f"node_rank={self.node_rank}"
        return " ".join(f"FAULT {self.code} host={self.host} {who}: {self.cause}; fix: {self.fix}".split())

    def to_json(self) -> str:
        """One line of JSON, for the store and for events.jsonl."""
        return json.dumps({**asdict(self), "exit_code": int(self.exit_code)})

    @classmethod
    def from_json(cls, text: str) -> Fault:
        """The fault that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "exit_code": ExitCode(fields["exit_code"])})

    @classmethod
    def from_line(cls, line: str, exit_code: ExitCode) -> Fault | None:
        """The fault that `line` told, or None if the text is no fault."""
        if not (found := _LINE.fullmatch(line)):
            return None
        code, host, node, number, cause, fix = found.groups()
        rank, node_rank = (None, int(number)) if node else (int(number), 0)
        return cls(code, host, cause, fix, exit_code, rank, node_rank)


_LINE = re.compile(r"FAULT (\S+) host=(\S+) (node_)?rank=(\d+): (.*); fix: (.*)")


class KitError(Exception):
    """An error whose text is meant for the user: one line (or several problems, a line each), no traceback."""

    exit_code = ExitCode.ERROR

    @property
    def lines(self) -> list[str]:
        """The lines to show."""
        return str(self).splitlines()


class ConfigError(KitError):
    """A setting or a command line that is refused: `section.key=value: what is wrong; what to do`."""

    exit_code = ExitCode.CONFIG


class FaultError(KitError):
    """Carries a `Fault` up to the entry of the node process."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.line())
        self.fault = fault
        self.exit_code = fault.exit_code


def error_from(line: str, exit_code: ExitCode) -> KitError:
    """The error that another process has told in one line."""
    if fault := Fault.from_line(line, exit_code):
        return FaultError(fault)
    error = KitError(line.removeprefix("error: "))
    error.exit_code = exit_code
    return error


def write_error_file(path: str, error: BaseException) -> None:
    """Leave the reason of a failure for the node process: type, message, the user's line, the time; also of the first exception,
    if others have followed from it. Keeps what is there already, such as what torch's `@record` wrote."""
    target = Path(path)
    if target.exists():
        return
    chain = list(_chain(error))
    record = {"time": time.time(), **_facts(error), "own": all(map(_raised_by_python, chain))}
    if len(chain) > 1:
        record["first"] = {**_facts(chain[-1]), "own": _raised_by_python(chain[-1])}
    if isinstance(error, KitError):
        record["exit_code"] = int(error.exit_code)
    if isinstance(error, FaultError):
        record["fault"] = error.fault.to_json()
    target.write_text(json.dumps(record), encoding="utf-8")


def in_words(error: BaseException) -> str:
    """`type: message (file:line)`, of the first exception if others have followed from it."""
    *_, first = _chain(error)
    message = _message(first)[:_MESSAGE]
    return type(first).__name__ + (f": {message}" if message else "") + f" ({where(first)})"


def _facts(error: BaseException) -> dict[str, object]:
    return {"type": type(error).__name__, "message": _message(error), "where": where(error)}


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of a user's own type, which cannot say what it is
        return ""


def _message(error: BaseException) -> str:
    text = _text(error)
    if "Original Traceback" not in text:
        notes = [f"({note})" for note in getattr(error, "__notes__", ()) if note.startswith(SAMPLE)]
        return " ".join([*text.split(), *notes])
    *_, before, last = ["", *text.strip().splitlines()]  # a loader worker's exception arrives as the text of its traceback
    return f"{before} ({last})" if last.startswith(SAMPLE) else last


def where(error: BaseException) -> str:
    """The innermost `file:line` outside installed packages and this kit; the innermost of all if there is none."""
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    if "Original Traceback" in (text := _text(error)):
        frames += [(name, int(line), "") for name, line in re.findall(r'File "([^"]+)", line (\d+)', text)]
    if not frames:
        return ""
    name, line, _ = own_frame(frames[::-1])
    return f"{Path(name).name}:{line}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _raised_by_python(error: BaseException) -> bool:
    """Whether a `raise` of somebody's Python code, torch's apart, made it: then it is not torch that speaks of its network."""
    if "Original Traceback" in _text(error):  # in a loader worker
        return True
    if (trace := error.__traceback__) is None:
        return False
    while trace.tb_next:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    raised = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return raised and "torch" not in Path(code.co_filename).parts


def own_frame(frames: Sequence[tuple[str, int, str]]) -> tuple[str, int, str]:
    """Of frames (file, line, function), innermost first, the first that is the user's; the first of all if there is none."""
    libraries = (str(Path(__file__).parent), str(Path(traceback.__file__).parent), "<")
    own = [frame for frame in frames if not frame[0].startswith(libraries) and "site-packages" not in frame[0]]
    return (own or frames)[0]
