"""What a rank has for its saves: memory that it shares with a writer process, and that process (which runs `writer`)."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

import trainer
from trainer.process import STOP_SIGNALS, memory_file, signal_name
from trainer.train.writer import Lines

# This kit's own `trainer`, also where the user has a trainer.py in the folder of the run.
_START = """
import sys
sys.path[:] = [{root!r}, *(place for place in sys.path if place)]
from trainer.train.writer import main
main({parent}, {arena})
"""
_STEP = 1 << 20  # sizes are rounded up, so that what grows a little finds room


class Arena:
    """A buffer that is kept from save to save; on a rank with a GPU its pages are locked, so that copies are fast."""

    def __init__(self, pinned: bool = False) -> None:
        self.fd = memory_file("checkpoint")
        self.pinned = pinned
        self.memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> None:
        """Have room for so many bytes. What was there may be gone."""
        if size <= len(self.memory):
            return
        size = -(-size // _STEP) * _STEP
        self._unpin()
        os.ftruncate(self.fd, size)
        self.memory = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)
        if self.pinned:
            torch.cuda.check_error(_cuda().cudaHostRegister(self.memory.data_ptr(), size, 0))

    def put(self, offset: int, data: bytes) -> None:
        """Copy bytes in."""
        if data:
            self.memory[offset : offset + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def copy(self, offset: int, tensor: torch.Tensor) -> None:
        """Copy a tensor in; from a GPU it is under way when this returns."""
        place = self.memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor, non_blocking=True)

    def close(self) -> None:
        """Give the memory back."""
        self._unpin()
        self.memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.fd)

    def _unpin(self) -> None:
        if self.pinned and len(self.memory):
            torch.cuda.check_error(_cuda().cudaHostUnregister(self.memory.data_ptr()))


class Writer:
    """The writer process, seen from its rank."""

    def __init__(self, arena: Arena) -> None:
        root = str(Path(trainer.__file__).parents[1])
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited: meant for the rank, which saves then
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START.format(root=root, parent=os.getpid(), arena=arena.fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[arena.fd],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._answers = Lines(self._pipe(self._process.stdout).fileno())

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a request."""
        pipe = self._pipe(self._process.stdin)
        with suppress(BrokenPipeError):  # its end is noticed when it does not answer
            pipe.write(json.dumps(request).encode() + b"\n")
            pipe.flush()

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """The next of its answers, each with the `step` it is about; None if none comes within so many seconds."""
        try:
            return self._answers.get(seconds)
        except EOFError:
            code = self._process.wait()
            how = f"the writer process ended with {code}" if code >= 0 else f"the writer got {signal_name(-code)}"
            return {"error": how, "dead": True}

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                self._pipe(pipe).close()
        self._process.wait()

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
