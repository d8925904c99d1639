"""Two local nodes whose ranks are hurt in all ways, and what must be true of any end that is a fault."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.conftest import DIGITS, wait_until
from tests.jobs import TRAINER, command, events, finish, logs, metrics, overrides, processes_of, start
from trainer.errors import ExitCode
from trainer.process import descendants, process_state
from trainer.train.parts import read

HOST = os.uname().nodename
STALL = 5
# Short steps for ever, and no evaluation, which has a deadline of its own.
ENDLESS = (
    "training.max_steps=1000000",
    "training.epochs=40000",
    "training.evaluate_every_epochs=40000",
    "training.batch_size=16",
    "training.log_every_steps=1",
    "checkpoint.every_steps=10",
    f"watch.stall_seconds={STALL}",
)


def faulty(where: str, rank: int, number: int, what: str) -> list[str]:
    """Settings by which a rank runs into a statement: in its model or its dataset, at call or sample number N."""
    fault = json.dumps({"rank": rank, "number": number, "what": what})
    settings = (
        {"model.args": "{}", "data.args": "{}", f"{where}.args": fault} if where else {"model.args": "{}", "data.args": "{}"}
    )
    targets = ["model.target=tests.targets:faulty_model", "data.target=tests.targets:faulty_data"]
    return [*targets, *(f"{name}={value}" for name, value in settings.items())]


class Job:
    """A run in the foreground, of nodes that are processes of this machine."""

    def __init__(
        self, run: Path, config: str | Path = DIGITS, *settings: str, nodes: int = 2, ranks: int = 2, within: Sequence[str] = ()
    ) -> None:
        """
        Args:
            ranks: on each node.
            within: a command that runs the command that follows it, such as `setpriv ...`.
        """
        # of its own, to see what is left there; with a short name, as sockets are made in it
        self.temporary = Path(tempfile.mkdtemp(prefix="job-"))
        self.run, self.nodes, self.ranks = run, nodes, ranks
        shape = [f"resources.nodes={nodes}", f"resources.ranks_per_node={ranks}"]
        command = [*within, *TRAINER, "run", str(config), *shape, overrides(run), *settings]
        self.front = start(*command, TMPDIR=str(self.temporary))

    def at_step(self, step: int, seconds: float = 60) -> None:
        """Wait for the end of an optimizer step."""
        reached = wait_until(lambda: self.over or (metrics(self.run) and metrics(self.run)[-1]["step"] >= step), seconds)
        assert reached and not self.over, self.told()

    def said(self, text: str, seconds: float = 60) -> None:
        """Wait for a text in any log."""
        assert wait_until(lambda: self.over or text in logs(self.run), seconds) and text in logs(self.run), self.told()

    @property
    def over(self) -> bool:
        """The run has ended."""
        return self.front.poll() is not None

    @property
    def node_pids(self) -> list[int]:
        """Of the node processes."""
        return [node["pid"] for node in json.loads((self.run / "job.json").read_text())["processes"]]

    def pid(self, rank: int) -> int:
        """Of a rank: the child of its node that writes its log."""
        for pid in _children(self.node_pids[rank // self.ranks]):
            if _writes(pid).startswith(f"rank-{rank:04d}."):
                return pid
        raise AssertionError(f"rank {rank} has no process\n{self.told()}")

    def started(self, rank: int) -> bool:
        """It has a process and a log."""
        log = self.run / "logs" / "attempt-000" / f"rank-{rank:04d}.{HOST}.log"
        return log.exists() and any(_writes(pid) == log.name for pid in _children(self.node_pids[rank // self.ranks]))

    def workers(self, rank: int) -> list[int]:
        """Pids of its loader workers: what it has forked."""
        own = self.pid(rank)
        words = Path(f"/proc/{own}/cmdline").read_bytes()
        return [pid for pid in _children(own) if Path(f"/proc/{pid}/cmdline").read_bytes() == words]

    def writer(self, rank: int) -> int:
        """Pid of the process that writes its checkpoints."""
        return next(
            pid for pid in _children(self.pid(rank)) if b"trainer.train.writer" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )

    def told(self) -> str:
        """All logs."""
        return f"{logs(self.run)}\n--- front\n{self.front.communicate()[0] if self.over else '(runs)'}"

    def still_runs(self, seconds: float) -> None:
        """Nothing ends it for so long, and it takes steps after that."""
        assert not wait_until(lambda: self.over, seconds), self.told()
        self.at_step(metrics(self.run)[-1]["step"] + 2)

    def stop(self) -> None:
        """Ask it to save and stop, in good order."""
        self.front.send_signal(signal.SIGTERM)
        code, output = finish(self.front, 60)
        assert code == ExitCode.STOPPED and "FAULT" not in output, output + logs(self.run)
        assert not processes_of(self.run)

    def fault(self, code: str, rank: int, words: str, exit_code: ExitCode | None, seconds: float = 60, host: str = HOST) -> str:
        """Wait for the end; returns the one line that all nodes have told.

        Args:
            code: of the fault; several with | between them.
            words: what the cause has to contain, in any place.
            exit_code: None where it may be any but 0.
        """
        found, output = finish(self.front, seconds)
        told = output + logs(self.run)
        lines = [_fault_of(output), *(_fault_of(self._log(node)) for node in range(1, self.nodes))]
        assert len(set(lines)) == 1, f"the nodes do not agree: {lines}\n{told}"
        line = lines[0]
        assert is_told(line, code, rank, words, host), f"wanted {code} rank {rank}, {words!r}: {line}\n{told}"
        assert found == exit_code or (exit_code is None and found), f"exit code {found}, not {exit_code}: {line}\n{told}"
        self.nothing_is_left()
        return line

    def restarts(self) -> list[list[dict[str, Any]]]:
        """What the nodes told of each attempt that was followed by another one."""
        told: dict[int, list[dict[str, Any]]] = {}
        for event in events(self.run, "restart"):
            told.setdefault(event["attempt"], []).append(event)
        return [told[attempt] for attempt in sorted(told)]

    def explained(self, kind: str) -> str:
        """What `trainer explain` says: the verdict, a table of all ranks, and the stacks of a hang.

        Args:
            kind: hang or crash, where the evidence lies.
        """
        assert any((self.run / kind / "attempt-000").iterdir()), list(self.run.rglob("*"))
        code, text = command(*TRAINER, "explain", str(self.run))
        assert code == 0 and text.startswith("FAULT "), text
        table = [row.split() for row in text.splitlines() if row.split()[:1] and row.split()[0].isdecimal() and HOST in row]
        assert {int(row[0]) for row in table if row[1] == HOST} >= set(range(self.nodes * self.ranks)), text
        assert kind != "hang" or "  File " in text, text
        return text

    def nothing_is_left(self) -> None:
        """No process and no temporary file, and the newest whole checkpoint loads. Half a one may be there, of a save that was under
        way or of an old one that was being dropped: the next start removes it."""
        assert wait_until(lambda: not processes_of(self.run), 10), [
            (pid, process_state(pid), Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in processes_of(self.run)
        ]
        assert wait_until(lambda: not self._temporary_files(), 10), self._temporary_files()
        folder = self.run / "checkpoints"
        if folder.is_dir() and (names := sorted(path.name for path in folder.iterdir())):
            half = [int(name[5:13]) for name in names if re.fullmatch(r"step-\d+\.(?!old).+\.tmp", name)]
            whole = [int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal()]
            assert len(half) <= 1 and all(step > max(whole, default=0) for step in half), names
            assert not whole or read(folder / f"step-{max(whole):08d}")["step"] == max(whole)

    def _temporary_files(self) -> list[Path]:
        """All but torch's cache of what it has compiled, which is to be found again, and the empty files by which its loader tries
        out whether more can be opened, which it may be killed at."""
        found = [path for path in self.temporary.rglob("*") if "torchinductor_" not in str(path)]
        return [path for path in found if not (path.name.startswith("tmp") and path.is_file() and not path.stat().st_size)]

    def _log(self, node: int) -> str:
        path = self.run / "logs" / f"node-{node:04d}.log"
        return path.read_text() if path.exists() else ""

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        if not self.over:
            for pid in (self.front.pid, *descendants(self.front.pid)):
                _kill(pid)
            self.front.communicate()
        for pid in processes_of(self.run):
            _kill(pid)
        shutil.rmtree(self.temporary, ignore_errors=True)


def is_told(line: str, code: str, rank: int, words: str, host: str = HOST) -> bool:
    """Whether a line tells a fault: its code (several with | between them), rank and host, words of its cause, and what to do."""
    found = re.match(rf"FAULT ({code}) host={re.escape(host)} rank={rank}: (.*); fix: .", line)
    return bool(found and words in found[2])


def _fault_of(output: str) -> str:
    """The one fault line, or all output."""
    lines = [line for line in output.splitlines() if line.startswith("FAULT ")]
    return lines[0] if len(lines) == 1 else output


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _writes(pid: int) -> str:
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/1")).name
    except OSError:
        return ""
