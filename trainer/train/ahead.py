"""Batches made ahead of the step by a thread, on a stream of its own: a GPU waits neither for them nor for their copies."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch

_AHEAD = 2  # batches
_LOOK_SECONDS = 0.1


def ahead(batches: Iterator[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> Iterator[Any]:
    """The batches in their order; what one of them raises is raised here in its place."""
    ready: queue.Queue[Any] = queue.Queue(_AHEAD)
    closed = threading.Event()

    def put(item: Any) -> None:
        while not closed.is_set():
            try:
                return ready.put(item, timeout=_LOOK_SECONDS)
            except queue.Full:
                continue

    def work() -> None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                for batch in batches:
                    put((batch, stream.record_event()))
                    if closed.is_set():
                        return
            put((None, None))
        except BaseException as error:
            put((error, None))

    threading.Thread(target=work, name="batches ahead", daemon=True).start()
    try:
        while (item := ready.get())[0] is not None:
            batch, made = item
            if made is None:
                raise batch
            current = torch.cuda.current_stream(device)
            current.wait_event(made)
            for tensor in batch:
                tensor.record_stream(current)  # its memory is not used again before this stream is through with it
            yield batch
    finally:
        closed.set()
