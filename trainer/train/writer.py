"""The writer: a process beside each rank that puts its part of a checkpoint on disk while the rank trains on. No torch.

It takes requests as JSON lines and answers in JSON lines: `kept` when a part is on the node's own disk, if the run has such a
place, and then what came of the checkpoint. The main thread brings parts to where the checkpoints lie; rank 0's waits there for
all of them and makes them one, so that a kill at any moment leaves the checkpoint before it.

Whoever looks at a save that does not end (`trainer.node.stacks`) takes a main thread in select for idle: it idles nowhere else.
"""

from __future__ import annotations

import json
import os
import queue
import select
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.process import die_with_parent
from trainer.train.files import mapped, mapped_file
from trainer.train.local import Entry, Local
from trainer.train.place import Place, place_of

Request = Mapping[str, Any]  # as `Checkpointer` makes them


class Lines:
    """JSON lines from a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd, self._waiting = fd, b""

    def get(self, seconds: float | None) -> dict[str, Any] | None:
        """The next one; None if none comes in time.

        Raises:
            EOFError: there will be no more.
        """
        while b"\n" not in self._waiting:
            if not select.select([self._fd], [], [], seconds)[0]:
                return None
            if not (block := os.read(self._fd, 1 << 16)):
                raise EOFError
            self._waiting += block
        line, _, self._waiting = self._waiting.partition(b"\n")
        request: dict[str, Any] = json.loads(line)
        return request


def main(parent: int, arena: int) -> None:
    """Serve requests until the rank ends.

    Args:
        parent: pid of the rank.
        arena: descriptor of the memory that both share.
    """
    die_with_parent(parent)
    bringer = Bringer(arena)
    threading.Thread(target=_listen, args=(bringer,), daemon=True).start()
    bringer.run()


def _listen(bringer: Bringer) -> None:
    """Take requests until the rank ends; this process ends with it."""
    requests = Lines(0)
    try:
        while True:
            bringer.take(requests.get(None) or {})
    except EOFError:
        os._exit(0)
    except BaseException:  # without this thread there would be no answers, and no end
        traceback.print_exc()
        os._exit(1)


class Bringer:
    """Takes requests in one thread, and brings what they name to its place in the main one, one after the other."""

    def __init__(self, arena: int) -> None:
        self._arena = arena
        self._work: queue.SimpleQueue[tuple[Request, Entry | None, float]] = queue.SimpleQueue()
        self._wake, self._bell = os.pipe()
        self._given_up: set[str] = set()
        self._places: dict[str, Place] = {}
        self._speaking = threading.Lock()

    def take(self, request: Request) -> None:
        """Serve a request as far as the rank has to wait for it."""
        if "abandon" in request:
            self._given_up.add(request["abandon"])
        elif "step" in request:
            started = time.monotonic()
            self._work.put((request, self._keep(request), started))
            os.write(self._bell, b".")

    def run(self) -> None:
        """Serve what has been taken, for ever."""
        while True:
            select.select([self._wake], [], [])
            os.read(self._wake, 1)
            request, entry, started = self._work.get()
            try:
                answer = self._bring(request, entry, started)
            except Exception as error:
                answer = self._failed(request, error)
            self._say(request["step"], **answer)

    def _keep(self, request: Request) -> Entry | None:
        """Write the part to the node's own disk, if there is a place; where that fails too it is brought from memory."""
        if not request["local"]:
            return None
        step, mark, rank, ranks = (request[name] for name in ("step", "mark", "rank", "ranks"))
        try:
            with mapped(self._arena, request["size"]) as view:
                entry = Local(Path(request["local"])).put(step, mark, rank, ranks, view)
        except Exception as error:
            self._say(step, not_kept=_cause(error))
            return None
        self._say(step, kept=True)
        return entry

    def _bring(self, request: Request, entry: Entry | None, started: float) -> dict[str, Any]:
        place, step, mark, rank = self._place(request), request["step"], request["mark"], request["rank"]
        with self._part(request, entry) as view:
            place.put(step, mark, rank, view, entry["sha256"] if entry else None)
        if rank == 0:
            ranks, keep_last = request["ranks"], request["keep_last"]
            if not place.commit(step, mark, ranks, keep_last, lambda: mark in self._given_up):
                return {"abandoned": True, "error": "a part of it is missing"}
        return {"seconds": time.monotonic() - started}

    @contextmanager
    def _part(self, request: Request, entry: Entry | None) -> Iterator[memoryview]:
        source = mapped_file(Local(Path(request["local"])).file(entry)) if entry else mapped(self._arena, request["size"])
        with source as view:
            yield view

    def _failed(self, request: Request, error: Exception) -> dict[str, Any]:
        step, mark, rank, free, gone = request["step"], request["mark"], request["rank"], None, False
        with suppress(Exception):  # what is to be told is the first error
            place = self._place(request)
            free = place.free()
            gone = place.fail(step, mark, rank) and rank != 0  # rank 0 has given it up already
            if rank == 0:
                place.drop(step, mark)
        number = error.errno if isinstance(error, OSError) else None
        return {"errno": number or 0, "error": _cause(error), "free": free, "abandoned": gone, "size": request["size"]}

    def _place(self, request: Request) -> Place:
        where = request["place"]
        if where not in self._places:
            self._places[where] = place_of(where, Path(request["scratch"]))
        return self._places[where]

    def _say(self, step: int, **answer: Any) -> None:
        with self._speaking:
            print(json.dumps({"step": step, **answer}), flush=True)


def _cause(error: Exception) -> str:
    told = error.strerror if isinstance(error, OSError) else None
    return told or f"{type(error).__name__}: {' '.join(str(error).split())}"
