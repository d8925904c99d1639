"""The roll call with simulated nodes: time, requests and node 0's CPU against the number of nodes, and what it adds to a start.

Each simulated node is a thread that runs the kit's own `join`; node 0 is a process of its own. Only the tries of other ports are
left out (all pairs on one machine would be the machine's limit, not the kit's): one prober is measured against 1,024 ports.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from trainer.node import judge, rollcall
from trainer.node.identity import Identity
from trainer.node.line import Line, Message
from trainer.node.probe import Probe, Result, Task, entry
from trainer.node.rollcall import Terms

FACTS = {f"fact {number}": "x" * 100 for number in range(20)}  # about 2 KB, as a node tells
CLIENTS = 4  # processes in which the other nodes live


def measured_in_child(block: Callable[[], Any]) -> Callable[[], Any]:
    """Run a block in a forked process; the answer waits for it and returns what the block did."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, json.dumps(block()).encode())
        finally:
            os._exit(0)
    os.close(writer)

    def answer() -> Any:
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)
        return json.loads(text)

    return answer


def node_0(nodes: int, listener: socket.socket) -> dict[str, float]:
    """Hold the roll call; returns its wall and CPU seconds."""
    host = Identity(nodes, 0, 1, "127.0.0.1", listener.getsockname()[1], "simulated")
    wall, cpu = time.perf_counter(), time.process_time()
    place = judge.preside(host, Terms(0, FACTS), listener, time.monotonic() + 120, print)
    assert place.attempt == 0
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def other_nodes(ranks: list[int], nodes: int, port: int) -> dict[str, int]:
    """Let these nodes join, a thread each; returns how many messages they sent."""
    sent, lock, verdicts = 0, threading.Lock(), []
    send = Line.send

    def counted(line: Line, message: Message) -> None:
        nonlocal sent
        with lock:
            sent += 1
        send(line, message)

    def attend(rank: int) -> None:
        node = Identity(nodes, rank, 1, "127.0.0.1", port, "simulated")
        verdicts.append(rollcall.join(node, Terms(0, FACTS), time.monotonic() + 120).attempt)

    Line.send = counted  # type: ignore[method-assign]
    rollcall._TICK_SECONDS = 10.0  # else thousands of threads of one process look for stop signals ten times a second
    threading.stack_size(1 << 18)
    threads = [threading.Thread(target=attend, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(verdicts) == len(ranks)
    return {"sent": sent}


def simulate(nodes: int) -> dict[str, float]:
    """One roll call; seconds, CPU microseconds of node 0 for each node, and the most requests of one node on average."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    answer = measured_in_child(lambda: node_0(nodes, listener))
    listener.close()
    shares = [list(range(first, nodes, CLIENTS)) for first in range(1, CLIENTS + 1)]
    others = [measured_in_child(lambda share=share: other_nodes(share, nodes, port)) for share in shares if share]  # type: ignore[misc]
    sent = sum(each()["sent"] for each in others)
    told = answer()
    return {"seconds": told["wall"], "cpu_us": told["cpu"] / nodes * 1e6, "requests": sent / (nodes - 1)}


def probe_many(partners: int) -> float:
    """Seconds in which one node tries so many ports."""
    ports = [socket.create_server(("127.0.0.1", 0), backlog=8) for _ in range(partners)]
    prober = Probe("127.0.0.1")
    table = "".join(entry(*port.getsockname()) for port in ports)
    started = time.perf_counter()
    found = run_probe(prober, Task(table, 0, partners), time.sleep)
    seconds = time.perf_counter() - started
    assert not found.failed
    for port in [*ports, prober]:
        port.close()
    return seconds


run_probe = Probe.run


BLACK_HOLE = """
ip link set lo up && ip link add br0 type bridge && ip addr add 198.18.9.1/24 dev br0 && ip link set br0 up
ip neigh add 198.18.9.9 lladdr 02:00:00:00:00:01 dev br0 nud permanent
mount -t tmpfs tmpfs /mnt && echo nameserver 198.18.9.9 >/mnt/resolv.conf && mount --bind /mnt/resolv.conf /etc/resolv.conf
exec "$@"
"""  # a network of its own whose name server takes every question and answers none


def without_name_server(nodes: int) -> str:
    """The start of so many nodes, torch's store included, where the name server is a black hole (Linux, root)."""
    inside = [sys.executable, "-m", "bench.rollcall", "--inside", str(nodes)]
    done = subprocess.run(["unshare", "-n", "-m", "sh", "-c", BLACK_HOLE, "sh", *inside], stdout=subprocess.PIPE, text=True)
    return done.stdout.strip() or "not measured: it takes root and Linux namespaces"


def join_and_connect(nodes: int) -> str:
    """From the first to the last node that has torch's store; all are forked from this process."""
    store = importlib.import_module("trainer.node.store")
    listener = socket.create_server(("198.18.9.1", 0), backlog=4096)
    port, started = listener.getsockname()[1], time.perf_counter()

    def attend(rank: int) -> float:
        node = Identity(nodes, rank, 1, "198.18.9.1", port, "simulated")
        if rank:
            listener.close()
            place = rollcall.join(node, Terms(), time.monotonic() + 300)
        else:
            place = judge.preside(node, Terms(), listener, time.monotonic() + 300, print)
            store.serve(listener, lambda: None)
        roll = importlib.import_module("trainer.node.roll").Roll(node, *store.connect(place.master, port))
        roll.say_goodbye(rank)
        while not roll.all_said_goodbye():
            time.sleep(0.05)
        seconds = time.perf_counter() - started
        roll.leave()
        return seconds

    answers = [measured_in_child(lambda rank=rank: attend(rank)) for rank in range(nodes)]  # type: ignore[misc]
    return f"{nodes} nodes with a name server that never answers: {max(answer() for answer in answers):.2f} s"


OFF = """
from trainer.node import judge, rollcall
judge.preside = rollcall.join = lambda *arguments: rollcall.Place(0, "127.0.0.1", "127.0.0.1")
"""  # what is left: node 0's store, to which the other connects


def start_of_a_job(before: str) -> float:
    """Seconds of a whole two-node job of two steps on this machine, with some statements run first on each node."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        config = ["configs/digits.yaml", "resources.nodes=2", "resources.ranks_per_node=1", "training.max_steps=2"]
        script = f"{before}\nfrom trainer.cli import main\nraise SystemExit(main({['node', *config, f'run_dir={folder}/run']}))"
        started, nodes = time.perf_counter(), []
        for rank in range(2):
            place = {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
            environ = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
            nodes.append(
                subprocess.Popen(
                    [sys.executable, "-c", script], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
        assert [node.wait() for node in nodes] == [0, 0]
        return time.perf_counter() - started


def added_to_a_start(rounds: int) -> str:
    """Interleaved with the same job without it; the difference of medians, beside that of the same job with itself."""
    jobs = {"with": "", "without": OFF, "without, again": OFF}
    seconds = {name: [] for name in jobs}  # type: dict[str, list[float]]
    for _ in range(rounds):
        for name, before in jobs.items():
            seconds[name].append(start_of_a_job(before))
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    added, null = middle["with"] - middle["without"], middle["without, again"] - middle["without"]
    return f"a two-node job of {middle['without']:.2f} s takes {added:+.2f} s with the roll call ({null:+.2f} s: null test)"


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == ["--inside"]:
        print(join_and_connect(int(sys.argv[2])))
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    Probe.run = lambda self, *arguments: Result()  # type: ignore[method-assign,assignment]
    print("nodes  seconds  requests/node  node 0's CPU us/node   (median of 3, interleaved)")
    sizes = [64, 256, 1024, 4096]
    rounds = [{nodes: simulate(nodes) for nodes in sizes} for _ in range(3)]
    for nodes in sizes:
        middle = {key: sorted(each[nodes][key] for each in rounds)[1] for key in ("seconds", "requests", "cpu_us")}
        print(f"{nodes:5d}  {middle['seconds']:7.3f}  {middle['requests']:13.1f}  {middle['cpu_us']:20.0f}")
    print(f"one node tries {judge.PARTNERS} ports in {probe_many(judge.PARTNERS):.3f} s")
    Probe.run = run_probe  # type: ignore[method-assign]
    print(without_name_server(64))
    print(added_to_a_start(rounds=5))


if __name__ == "__main__":
    sys.exit(main())
