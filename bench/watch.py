"""What watching costs: a rank's heartbeats in a step, a node's looks at its ranks, and node 0's load in a large job.

Heartbeats are measured as `bench.loop` measures, the same loop with them and without, interleaved; the null test is the loop
without them against itself; and by themselves, as they may be too small to be seen so. Node 0 is real (store and inquest); the
other nodes are connections that say what real ones say as often.

    python -m bench.watch [--rounds 100] [--nodes 1024] [--ranks 8]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import socket
import tempfile
import time
from pathlib import Path

import torch

from bench.interleave import one_rank, ratios
from bench.loop import Kit
from trainer.node import roll, store
from trainer.node.identity import Identity
from trainer.node.inquest import Inquest
from trainer.node.logs import RunFolder
from trainer.node.ranks import Rank
from trainer.node.verdict import Running
from trainer.node.vitals import Limits, Vitals
from trainer.pulse import Phase, Pulse

SECONDS, CLIENTS = 20.0, 8  # how long node 0 is looked at; processes that play the other nodes
STEPS = 150


class Silent(Pulse):
    """No heartbeats."""

    def enter(self, phase: Phase) -> None:
        pass

    def stepped(self, step: int, phase: Phase = Phase.BETWEEN) -> None:
        pass


def heartbeats(rounds: int) -> str:
    """A step with them, in the loop that has next to nothing but overhead."""
    with one_rank() as world, tempfile.TemporaryDirectory() as folder:
        beating, silent, null = (Kit(world, STEPS, Path(folder) / name) for name in ("beating", "silent", "null"))
        beating.loop.pulse.follow_collectives()
        silent.loop.pulse = null.loop.pulse = Silent()
        for each in (beating, silent, null):
            each()
        found, seconds = ratios(silent, {"beating": beating, "null": null}, rounds)
    step, alone = seconds / STEPS * 1e6, _alone()
    ratio = f"with heartbeats / without {found['beating']}; null test {found['null']}; {rounds} rounds"
    return f"a step of {step:.0f} us CPU: {ratio}; heartbeats by themselves {alone:.1f} us, {alone / step:.2%}"


def _alone() -> float:
    """Microseconds of a step's heartbeats."""
    pulse, times, phases = Pulse(), 20_000, (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    before = time.process_time()
    for step in range(times):
        for phase in phases:
            pulse.enter(phase)
        pulse.stepped(step)
    return (time.process_time() - before) / times * 1e6


def looks(ranks: int) -> str:
    """What a node process does five times a second for its ranks."""
    node = Identity(1, 0, ranks, "127.0.0.1", 1, "simulated")
    with tempfile.TemporaryDirectory() as folder:
        inquest = Inquest(roll.Roll(node, None), ["here"], _ranks(ranks), RunFolder(Path(folder)), 2.0)  # type: ignore[arg-type]
        before, times = time.process_time(), 500
        for _ in range(times):
            inquest.tick()
    used = (time.process_time() - before) / times
    return f"a node process looks at {ranks} ranks: {used * 1e6:.0f} us CPU a look, five looks a second: {used * 5:.2%} of a core"


def _ranks(count: int) -> list[Running]:
    """This process stands for all."""
    return [Running(Rank(i, i, "x.py", [], {}, "", ""), os.getpid(), Vitals(Limits(), 2, time.monotonic())) for i in range(count)]


def node_0(nodes: int, ranks: int) -> str:
    """CPU of node 0's two processes while so many nodes tell it of so many ranks each."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    serving = store.serve(listener, lambda: None)
    clients = [_client(port, range(1 + number, nodes, CLIENTS), nodes, ranks) for number in range(CLIENTS)]
    with tempfile.TemporaryDirectory() as folder:
        own = roll.Roll(Identity(nodes, 0, ranks, "127.0.0.1", port, "simulated"), *store.connect("127.0.0.1", port))
        inquest = Inquest(own, ["host"] * nodes, _ranks(ranks), RunFolder(Path(folder)), 2.0)
        own.beat("")
        while not own.store.check(own._keys("beat")):
            time.sleep(0.1)
        before = time.process_time(), _cpu_seconds(serving)
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            assert inquest.tick() is None
            time.sleep(0.2)
        used, served = time.process_time() - before[0], _cpu_seconds(serving) - before[1]
    for pid in (*clients, serving):
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return f"{nodes} nodes x {ranks} ranks: node 0's watch {used / SECONDS:.1%} of a core, its store {served / SECONDS:.1%}"


def _client(port: int, node_ranks: range, nodes: int, ranks: int) -> int:
    """A process that says what some nodes say: a beat every two seconds, and twice a second whether there is a fault."""
    if pid := os.fork():
        return pid
    try:
        rolls = []
        for node_rank in node_ranks:
            node = Identity(nodes, node_rank, ranks, "127.0.0.1", port, "simulated")
            rolls.append(roll.Roll(node, *store.connect("127.0.0.1", port)))
        inquest = Inquest(rolls[0], [], _ranks(ranks), RunFolder(Path("/nowhere")), None)
        for number in range(10**6):
            started = time.monotonic()
            text = json.dumps({**json.loads(inquest._told_of(inquest.look(started))), "beat": number})
            for each in rolls:
                each.fault()
                if number % 4 == 0:
                    each.beat(text)
            time.sleep(max(0.0, 0.5 - (time.monotonic() - started)))
    finally:
        os._exit(1)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=8)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(node_0(arguments.nodes, arguments.ranks))
    print(looks(arguments.ranks))
    print(heartbeats(arguments.rounds))


if __name__ == "__main__":
    main()
