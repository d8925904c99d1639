"""The roll call between machines with networks, names, hosts files and firewalls of their own."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DIGITS, ROOT, wait_until
from tests.jobs import metrics, overrides
from tests.lab.slurm import Cluster
from trainer.node import network

netns = pytest.mark.netns
PORT = "23456"


def test_the_holder_of_a_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        told = network.holder(other.getsockname()[1])
    assert (
        told
        and told.startswith(f"pid {os.getpid()} (")
        and f"user {os.environ.get('USER', 'root')}, " in told
        and told.endswith(" old)")
    )
    assert network.holder(1) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("^docker0", "is a pattern of NCCL's"),
        ("=eth0", "is a pattern"),
        ("eth77", "there is no interface eth77 (here are lo"),
        ("lo", None),
        ("", None),
    ],
)
def test_interfaces_named_for_gloo(given: str, words: str | None) -> None:
    found = network.problem({"GLOO_SOCKET_IFNAME": given})
    assert (words in (found or "")) if words else found is None


def test_what_the_user_has_named_stays() -> None:
    environ: dict[str, str] = {}
    assert network.choose(environ, "127.0.0.1") == "lo" and environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    environ = {"NCCL_SOCKET_IFNAME": "ib0"}
    assert network.choose(environ, "127.0.0.1") == "lo" and environ["NCCL_SOCKET_IFNAME"] == "ib0"
    assert network.choose({}, "192.0.2.1") is None


@pytest.fixture
def place(cluster: Cluster) -> Iterator[Path]:
    """A folder that both machines see; their networks are whole again afterwards."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)
    for node in cluster.nodes:
        cluster.heal(node)


class Nodes:
    """`trainer node` on two machines of the lab, started by hand."""

    def __init__(self, cluster: Cluster, place: Path) -> None:
        self.cluster, self.run = cluster, place / "run"
        self.started: dict[int, subprocess.Popen[str]] = {}

    def start(self, rank: int, *settings: str, prepare: str = "true", address: str = "node1", **environ: str) -> None:
        """Start node `rank` on machine `rank` + 1 in a mount namespace of its own, after a shell command `prepare`."""
        place = {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": address, "PET_MASTER_PORT": PORT, **environ}
        variables = [f"{name}={value}" for name, value in {**place, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}.items()]
        shape = ["backend=slurm", "resources.nodes=2", "resources.ranks_per_node=1", "training.max_steps=3", overrides(self.run)]
        node = [sys.executable, "-m", "trainer", "node", str(DIGITS), *shape, "training.log_every_steps=1", *settings]
        inside = f"{prepare} && exec env {shlex.join(variables)} {shlex.join(node)}"
        argv = [
            *self.cluster.enter(f"node{rank + 1}"),
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--mount",
            "sh",
            "-c",
            inside,
        ]
        self.started[rank] = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/")

    def end(self, seconds: float = 60) -> list[tuple[int, str]]:
        """Exit code and output of each, by node rank."""
        ended = [(process.communicate(timeout=seconds)[0], process.returncode) for process in self.started.values()]
        return [(code, output) for output, code in ended]

    def kill(self, rank: int) -> None:
        """End one, and with it all that it has started."""
        process = self.started.pop(rank)
        process.kill()
        process.communicate()


@pytest.fixture
def nodes(cluster: Cluster, place: Path) -> Iterator[Nodes]:
    made = Nodes(cluster, place)
    yield made
    for rank in list(made.started):
        made.kill(rank)


def fault(output: str) -> str:
    return next((line for line in output.splitlines() if line.startswith("FAULT ")), output)


@netns
def test_a_host_name_on_127_0_1_1_is_no_obstacle(nodes: Nodes, place: Path) -> None:
    """Debian's hosts file: each machine's own name is loopback there."""
    for rank in (0, 1):
        own, other = f"node{rank + 1}", f"node{2 - rank}"
        (place / own).write_text(f"127.0.0.1 localhost\n127.0.1.1 {own}\n{nodes.cluster.address(other)} {other}\n")
        nodes.start(rank, prepare=f"mount --bind {place / own} /etc/hosts")
    for (code, output), own in zip(nodes.end(), ("node1", "node2"), strict=True):
        assert code == 0, output
        assert f"[{own}] the ranks talk over eth0 ({nodes.cluster.address(own)})" in output
    assert [record["step"] for record in metrics(nodes.run)] == [1, 2, 3]


@netns
def test_a_name_that_does_not_resolve_a_port_that_is_filtered_and_one_that_nobody_has(nodes: Nodes, cluster: Cluster) -> None:
    drop = ["iptables", "-w", "-A", "INPUT", "!", "-i", "lo", "-p", "tcp", "--dport", PORT, "-j", "DROP"]
    for code, words, address in (
        ("A2", "'trainhead'", "trainhead"),
        ("A1", "nothing listens on node1:23456, connection refused", "node1"),
    ):
        nodes.start(1, "watch.join_seconds=3", address=address)
        ((exit_code, output),) = nodes.end()
        assert (
            exit_code == 161 and fault(output).startswith(f"FAULT {code} host=node2 node_rank=1: ") and words in fault(output)
        ), output
    cluster.on("node1", *drop)
    nodes.start(0, "watch.join_seconds=6")
    nodes.start(1, "watch.join_seconds=6")
    (_, first), (_, second) = sorted(nodes.end(), key=lambda ended: "missing" not in ended[1])
    assert "FAULT A12 host=node1 node_rank=1: 1 of 2 nodes joined in 6 s; missing: node rank 1" in fault(first), first
    assert "FAULT A10 host=node2 node_rank=1: no answer from node1:23456 (filtered?)" in fault(second), second


@netns
def test_a_port_that_another_program_holds(nodes: Nodes, cluster: Cluster) -> None:
    server = f"import socket, time; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('', {PORT})); s.listen(); time.sleep(60)"
    other = subprocess.Popen([*cluster.enter("node1"), "setpriv", "--pdeathsig", "KILL", sys.executable, "-c", server])
    try:
        assert wait_until(lambda: f":{PORT} " in cluster.on("node1", "ss", "-ltn").stdout, 20)
        nodes.start(0, "watch.join_seconds=15")
        nodes.start(1, "watch.join_seconds=5")
        (first, told), (second, other_told) = nodes.end()
        assert (
            first == 4 and f"port {PORT} is already in use on node1 by pid " in fault(told) and "import socket" in fault(told)
        ), told
        assert second == 161 and fault(other_told).startswith("FAULT A4 host=node2 node_rank=1: what listens at node1:23456"), (
            other_told
        )
    finally:
        other.kill()
        other.wait()


@netns
def test_a_bridge_that_each_host_has_for_itself(nodes: Nodes, cluster: Cluster) -> None:
    for node in cluster.nodes:
        cluster.on(
            node, "sh", "-c", "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up"
        )
    try:
        nodes.start(0, GLOO_SOCKET_IFNAME="^docker0")
        nodes.start(1)
        output, code = nodes.started[0].communicate(timeout=30)[0], nodes.started.pop(0).returncode
        assert code == 4 and "FAULT A8 host=node1 node_rank=0: GLOO_SOCKET_IFNAME=^docker0 is a pattern of NCCL's" in fault(
            output
        ), output
        nodes.kill(1)
        nodes.start(0)
        nodes.start(1)
        assert [code for code, _ in nodes.end()] == [0, 0], "the bridge is not chosen"
    finally:
        for node in cluster.nodes:
            cluster.on(node, "ip", "link", "del", "docker0")


@netns
@pytest.mark.parametrize("culprits", [(0,), (1,), (0, 1)])
def test_what_is_wrong_with_one_node_is_the_same_line_on_all(culprits: tuple[int, ...], nodes: Nodes) -> None:
    for rank in (0, 1):
        nodes.start(rank, *(["container.cuda_version='1.0'", "watch.parity=warn"] if rank in culprits else []))
    ended = nodes.end()
    lines = {line for _, output in ended for line in output.splitlines() if line.startswith("FAULT ")}
    assert [code for code, _ in ended] == [4, 4] and len(lines) == 1, ended
    assert lines.pop().startswith(tuple(f"FAULT B3 host=node{rank + 1} node_rank={rank}: torch " for rank in culprits)), ended
    assert not metrics(nodes.run)


@netns
def test_a_refusal_reaches_a_node_that_looks_late(nodes: Nodes) -> None:
    """Node 0 gives the verdict and keeps its store until all have read it."""
    nodes.start(0, "training.seed=1")
    nodes.start(1, "training.seed=2")
    ended = nodes.end()
    assert [code for code, _ in ended] == [4, 4] and all(
        "FAULT B4 host=node2 node_rank=1: config: " in output for _, output in ended
    ), ended


@netns
def test_the_missing_node_is_told_by_its_name(nodes: Nodes) -> None:
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "1"}
    nodes.start(0, "watch.join_seconds=3", **slurm)
    ((code, output),) = nodes.end()
    assert code == 161 and "missing: node rank 1 (node2)" in fault(output), output


@netns
def test_a_node_that_comes_while_an_earlier_start_still_ends_waits_for_the_next(nodes: Nodes, place: Path) -> None:
    """A scheduler may start it again before node 0 has ended: it must not be taken for a second claimant of its rank."""
    nodes.start(0, "training.max_steps=100000", "training.epochs=4000", "watch.stall_seconds=15")
    nodes.start(1, "training.max_steps=100000", "training.epochs=4000", "watch.stall_seconds=15")
    assert wait_until(lambda: metrics(nodes.run), 60)
    nodes.kill(1)
    nodes.start(1)
    code = nodes.started[0].wait(60)
    assert code in (162, 164), "the first node 0 has lost its peer"
    nodes.started.pop(0).communicate()
    nodes.start(0)
    assert [code for code, _ in nodes.end(90)] == [0, 0]
    assert json.loads((nodes.run / "events.jsonl").read_text().splitlines()[-1])["exit_code"] == 0
