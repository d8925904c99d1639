"""A rank's sign of life: where it is, in memory that its node process reads. Nothing is sent and neither waits for the other.

The kit's own ranks say each phase of a step. Of any other script its collectives are seen: every process group numbers them, and
a thread looks at the numbers.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from trainer.errors import in_words

PULSE = "TRAINER_PULSE_FD"  # a descriptor of shared memory; set by the node process
SIZE = 16 * mmap.PAGESIZE
_PLACE, _SEQUENCE, _LENGTH = struct.Struct("<QQIIQ"), struct.Struct("<Q"), struct.Struct("<I")
_ASKED, _TEXT = 1024, 1028  # where the node process asks what a rank knows, and where it is told behind its length
_LEAVING = 1020  # set by a rank that has left its reason, and only has to end
_LAST = 10  # collectives that are told
FOLLOWER = "collectives"  # the name of the thread that looks at them
_LOOK_SECONDS = 0.5


class Phase(IntEnum):
    """What a rank is at."""

    START = 0  # its imports; all that a script of the user's does which says nothing
    SETUP = 1  # process group, data, model, checkpoint
    DATA = 2  # waiting for the next batch
    FORWARD = 3
    BACKWARD = 4  # with the exchange of gradients
    OPTIMIZER = 5
    BETWEEN = 6  # steps: metrics, the agreement on a stop
    EVALUATION = 7
    SAVE = 8
    TEARDOWN = 9
    DONE = 10  # all was done: its goodbye
    SCRIPT = 11  # steps of a script of the user's, which says no more of them

    @property
    def words(self) -> str:
        """For a sentence with "in"."""
        names = {
            Phase.START: "its start",
            Phase.DATA: "data loading",
            Phase.OPTIMIZER: "the optimizer",
            Phase.SAVE: "a save",
            Phase.SCRIPT: "its script",
        }
        return names.get(self, self.name.lower())


ASKING = (Phase.SETUP, Phase.SAVE)  # ranks ask each other all the time whether all are ready: that is no progress


@dataclass(frozen=True)
class Beat:
    """What was read of a rank."""

    step: int = 0  # optimizer steps done
    done: int = 0  # of them in this process
    place: int = 0  # phases entered since the last step ended
    phase: Phase = Phase.START
    progress: int = 0  # grows with everything that is done
    sequence: int = 0  # collectives begun


class Pulse:
    """A rank's end of it. Where no node process listens, it writes into memory of its own, and costs the same."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._memory = bytearray(SIZE) if memory is None else memory
        self.step = self.done = self._place = self._progress = 0

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> Pulse:
        """The one that the node process has given this rank."""
        return cls(mmap.mmap(int(environ[PULSE]), SIZE)) if PULSE in environ else cls()

    def enter(self, phase: Phase) -> None:
        """Go on to the next phase."""
        self._place += 1
        self._progress += 1
        _PLACE.pack_into(self._memory, 0, self.step, self.done, self._place, phase, self._progress)

    def stay(self, phase: Phase) -> None:
        """Say that something was done within a phase, such as a batch of an evaluation."""
        self._progress += 1
        _PLACE.pack_into(self._memory, 0, self.step, self.done, self._place, phase, self._progress)

    def stepped(self, step: int, phase: Phase = Phase.BETWEEN) -> None:
        """An optimizer step has ended: `step` are done."""
        self.step, self._place = step, 0
        self.done += 1
        self.enter(phase)

    def leave(self) -> None:
        """Say that this rank has failed, and has left its reason: what comes now is its way out, which may take its time."""
        self._memory[_LEAVING] = 1

    def follow_collectives(self) -> None:
        """Look at the numbers of the process groups' collectives now and then, from a thread: its rank may be stuck in one."""
        threading.Thread(target=self._follow, daemon=True, name=FOLLOWER).start()

    def _follow(self) -> None:
        while True:
            _SEQUENCE.pack_into(self._memory, _PLACE.size, _collectives())
            if self._memory[_ASKED]:
                self._memory[_ASKED] = 0
                told = {"collectives": _flight_record(), "error": _error_in_hand()}
                text = json.dumps(told).encode()[: SIZE - _TEXT - _LENGTH.size]
                self._memory[_TEXT + _LENGTH.size : _TEXT + _LENGTH.size + len(text)] = text
                _LENGTH.pack_into(self._memory, _TEXT, len(text))
            threading.Event().wait(_LOOK_SECONDS)


def read(memory: mmap.mmap) -> Beat:
    """What a rank has last written."""
    step, done, place, phase, progress = _PLACE.unpack_from(memory, 0)
    return Beat(step, done, place, Phase(phase), progress, *_SEQUENCE.unpack_from(memory, _PLACE.size))


def leaving(memory: mmap.mmap) -> bool:
    """Whether a rank has failed, and is on its way out."""
    return bool(memory[_LEAVING])


def ask(memory: mmap.mmap) -> None:
    """Have a rank tell its last collectives, and the error that its main thread has in hand."""
    _LENGTH.pack_into(memory, _TEXT, 0)
    memory[_ASKED] = 1


def answer(memory: mmap.mmap) -> dict[str, Any] | None:
    """What it told; None if it has not (yet). `collectives`: oldest first, each with `name`, `sizes` of what is sent, `number`,
    `done`. `error`: in words, or ""."""
    (length,) = _LENGTH.unpack_from(memory, _TEXT)
    try:
        told: dict[str, Any] = json.loads(memory[_TEXT + _LENGTH.size : _TEXT + _LENGTH.size + length])
    except ValueError:
        return None
    return told


def _flight_record() -> list[dict[str, Any]]:
    """The last of torch's own record of collectives (TORCH_FR_BUFFER_SIZE switches it on)."""
    torch: Any = sys.modules.get("torch._C._distributed_c10d")
    try:
        entries = json.loads(torch._dump_fr_trace_json())["entries"] or json.loads(torch._dump_nccl_trace_json())["entries"]
        facts = {"name": "profiling_name", "sizes": "input_sizes", "number": "collective_seq_id", "done": "retired"}
        return [{name: entry[key] for name, key in facts.items()} for entry in entries[-_LAST:]]
    except (AttributeError, KeyError, ValueError, RuntimeError):  # this torch has none
        return []


def _error_in_hand() -> str:
    """The exception that the main thread handles, or lets through a `finally` block, with the line that raised it."""
    error: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = error[1] if isinstance(error, tuple) else error  # before Python 3.12
    return in_words(error) if error is not None else ""


def _collectives() -> int:
    """Collectives begun in all process groups, as torch numbers them; 0 where there are none."""
    torch: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return sum(group._get_sequence_number_for_group() for group in list(torch._world.pg_map)) if torch else 0
    except (RuntimeError, AttributeError):  # a backend that does not number them; torch is still being loaded
        return 0
