"""The roll call between machines with networks, names, hosts files and firewalls of their own."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DIGITS, ROOT, wait_until
from tests.jobs import events, metrics, overrides
from tests.lab.slurm import Cluster
from tests.machines import PORT, Nodes, fault
from trainer.errors import ExitCode
from trainer.node import network

netns = pytest.mark.netns


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
    ("given", "wanted", "code", "words"),
    [
        ("^docker0", "auto", "A8", "is a pattern of NCCL's"),
        ("=eth0", "auto", "A8", "is a pattern"),
        ("eth77", "auto", "A8", "there is no interface eth77 (here are lo"),
        (None, "eth77", "A8", "there is no interface eth77"),
        ("lo", "auto", "A5", "is loopback (127.0.0.1), which the other nodes cannot reach"),
        (None, "lo", "A5", "is loopback"),
        (None, "auto", None, ""),
        ("", "auto", None, ""),
    ],
)
def test_interfaces_named_for_gloo(given: str | None, wanted: str, code: str | None, words: str) -> None:
    environ = {} if given is None else {"GLOO_SOCKET_IFNAME": given}
    found = network.problem(environ, wanted, machines=2)
    assert (found and found[0]) == code and words in (found[1] if found else "")
    if code == "A5":
        assert network.problem(environ, wanted, machines=1) is None, "on one machine loopback is right"


def test_what_the_user_has_named_stays() -> None:
    environ: dict[str, str] = {}
    assert network.choose(environ, "127.0.0.1") == "lo" and environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    environ = {"NCCL_SOCKET_IFNAME": "ib0"}
    assert network.choose(environ, "127.0.0.1") == "lo" and environ["NCCL_SOCKET_IFNAME"] == "ib0"
    assert network.choose({}, "192.0.2.1") is None


LATE = """
import importlib.abc, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "trainer.node.parity":
            {}
Finder.find_spec and sys.meta_path.insert(0, Finder())
"""  # runs a statement as soon as the kit has loaded torch and asks for its facts

IMAGES = """
import torch
from torch.utils.data import Dataset

class Images(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(3, 224, 224), 0

def data():
    return Images(), None

def model():
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 10))
"""


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
@pytest.mark.parametrize(
    ("culprit", "wrong", "line"),
    [
        (0, {"PET_NNODES": "3"}, "FAULT A13 host=node1 node_rank=0: PET_* says 3 nodes, resources.nodes=2; fix: "),
        (1, {"WORLD_SIZE": "5"}, "FAULT A13 host=node2 node_rank=1: WORLD_SIZE=5, but PET_NNODES=2 with 1 ranks on each; fix: "),
        (1, {"PET_NODE_RANK": "2"}, "FAULT A14 host=node2 node_rank=2: node rank 2 of 2 nodes; fix: "),
        (
            0,
            {"PET_MASTER_PORT": "tcp://10.0.0.1:80"},
            "FAULT A15 host=node1 node_rank=0: PET_MASTER_PORT=tcp://10.0.0.1:80 is no n",
        ),
        (1, {"PET_MASTER_ADDR": "localhost"}, "FAULT A16 host=node2 node_rank=1: 2 nodes but the master address localhost is "),
        (0, {"PET_MASTER_PORT": "0"}, "FAULT A19 host=node1 node_rank=0: master port 0; fix: "),
    ],
)
def test_a_node_that_does_not_know_its_place_ends_both(culprit: int, wrong: dict[str, str], line: str, nodes: Nodes) -> None:
    """It cannot call the other, so that learns of it from the run folder."""
    for rank in (0, 1):
        nodes.start(rank, **(wrong if rank == culprit else {}))
    ended = nodes.end()
    assert len({fault(output) for _, output in ended}) == 1 and [code for code, _ in ended] == [ExitCode.REFUSED] * 2, ended
    assert fault(ended[0][1]).startswith(line)


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
        assert wait_until(lambda: f":{PORT} " in cluster.on("node1", "ss", "-ltn").stdout)
        nodes.start(0, "watch.join_seconds=15")
        nodes.start(1, "watch.join_seconds=120")
        (first, told), (second, other_told) = nodes.end()
        assert (
            first == 4 and f"port {PORT} is already in use on node1 by pid " in fault(told) and "import socket" in fault(told)
        ), told
        assert second == 4 and fault(other_told) == fault(told), "node 1 ends with node 0's own word, long before its deadline"
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
        nodes.start(rank, *(["container.cuda_version='1.0'", "rollcall.parity=warn"] if rank in culprits else []))
    ended = nodes.end()
    lines = {line for _, output in ended for line in output.splitlines() if line.startswith("FAULT ")}
    assert [code for code, _ in ended] == [4, 4] and len(lines) == 1, ended
    assert lines.pop().startswith(tuple(f"FAULT B3 host=node{rank + 1} node_rank={rank}: torch " for rank in culprits)), ended
    assert not metrics(nodes.run)


def hole(cluster: Cluster, node: str, target: str) -> None:
    """A firewall on one machine that lets new connections through to the master port only."""
    rule = ["!", "-i", "lo", "-p", "tcp", "--syn", "!", "--dport", PORT, "-j", target]
    cluster.on(node, "iptables", "-w", "-A", "INPUT", *rule)


@netns
@pytest.mark.parametrize("target", ["DROP", "REJECT"])
@pytest.mark.parametrize(("behind", "other"), [(0, 1), (1, 0)])
def test_a_firewall_that_lets_only_the_master_port_through(
    behind: int, other: int, target: str, nodes: Nodes, cluster: Cluster
) -> None:
    hole(cluster, f"node{behind + 1}", target)
    for rank in (0, 1):
        nodes.start(rank)
    ended = nodes.end()
    why = "no answer" if target == "DROP" else "'refused'"
    lines = {fault(output) for _, output in ended}
    assert [code for code, _ in ended] == [4, 4] and len(lines) == 1, ended
    line = lines.pop()
    cause = f"node {other} (node{other + 1}) gets {why} from node {behind} (node{behind + 1}) at {cluster.address(f'node{behind + 1}')}:"
    assert line.startswith(f"FAULT A9 host=node{behind + 1} node_rank={behind}: {cause}"), line
    assert f"while node1:{PORT} answers; fix: let TCP ports " in line and not metrics(nodes.run)


@netns
@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("127.0.1.1 {own}", "A5", "resolves to 127.0.1.1, which gloo would tell"),
        ("", "A6", "does not resolve, and gloo asks for"),
    ],
)
def test_a_host_name_that_leads_nowhere_with_the_automatic_choice_off(
    line: str, code: str, words: str, nodes: Nodes, place: Path
) -> None:
    for rank in (0, 1):
        own, other = f"node{rank + 1}", f"node{2 - rank}"
        (place / own).write_text(f"127.0.0.1 localhost\n{line.format(own=own)}\n{nodes.cluster.address(other)} {other}\n")
        nodes.start(rank, "rollcall.interface=off", prepare=f"mount --bind {place / own} /etc/hosts")
    ended = nodes.end()
    assert [code for code, _ in ended] == [4, 4] and len({fault(output) for _, output in ended}) == 1, ended
    assert f"FAULT {code} host=node" in ended[0][1] and words in fault(ended[0][1]), ended
    assert "rollcall.interface=auto" in fault(ended[0][1])


@netns
def test_a_bridge_that_the_user_has_named(nodes: Nodes, cluster: Cluster) -> None:
    bridge = "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up"
    for node in cluster.nodes:
        cluster.on(node, "sh", "-c", bridge)
    try:
        for rank in (0, 1):
            nodes.start(rank, "rollcall.interface=docker0")
        ended = nodes.end()
        assert [code for code, _ in ended] == [4, 4], ended
        cause = "FAULT A7 host=node2 node_rank=1: nodes 0 (node1) and 1 (node2) both have the address 172.17.0.1; fix: "
        assert all(fault(output).startswith(cause) for _, output in ended), ended
    finally:
        for node in cluster.nodes:
            cluster.on(node, "ip", "link", "del", "docker0")


@netns
def test_a_run_folder_that_each_machine_has_for_itself(nodes: Nodes, place: Path) -> None:
    nodes.start(0)
    nodes.start(1, prepare=f"mount -t tmpfs tmpfs {place}")
    ended = nodes.end()
    assert [code for code, _ in ended] == [4, 4] and len({fault(output) for _, output in ended}) == 1, ended
    assert fault(ended[0][1]).startswith(
        "FAULT G8 host=node2 node_rank=1: node 1 (node2) does not see what node 0 (node1) writes"
    )


@netns
def test_the_libraries_that_are_loaded_count(nodes: Nodes) -> None:
    """A torch that says that it has loaded another NCCL: the string is put into its answer on one machine."""
    other = "import torch.cuda.nccl as n; n.version = lambda: (2, 18, 1)"
    nodes.start(0)
    nodes.start(
        1,
        prepare=f"mkdir -p /tmp/nccl && printf '%s' {shlex.quote(LATE.format(other))} >/tmp/nccl/sitecustomize.py",
        PYTHONPATH=f"/tmp/nccl:{ROOT}",
    )
    ended = nodes.end()
    assert [code for code, _ in ended] == [4, 4], ended
    assert all(
        "FAULT B1 host=node2 node_rank=1: NCCL: node 1 (node2) has 2.18.1, node 0 (node1) " in output for _, output in ended
    )


@netns
def test_a_missing_file_limit_small_shared_memory_and_leftovers(nodes: Nodes) -> None:
    """Node 2 is poor; what is only doubtful does not stop the job."""
    poor = "ulimit -n 512; head -c 3145728 /dev/zero >/dev/shm/torch_99999_1_0; mkdir -p /dev/shm/x"
    only = ["data.num_workers=1", "rollcall.only=true"]
    nodes.start(0, *only)
    nodes.start(1, *only, prepare=poor, TORCH_DISTRIBUTED_DEBUG="DETAIL", OMP_NUM_THREADS="64")
    (first, clean), (second, told) = nodes.end(120)
    assert "[node2] warning: E2: 512 open files allowed" in told and "[node1] warning" not in clean, told
    assert "[node2] warning: E17: 3 MiB in 1 files of dead processes in /dev/shm (torch_99999_1_0)" in told, told
    assert "[node2] warning: B7: TORCH_DISTRIBUTED_DEBUG=DETAIL" in told and "[node2] warning: E12: OMP_NUM_THREADS=64" in told
    report = json.loads((nodes.run / "rollcall.json").read_text())
    assert len(report["nodes"][1]["warnings"]) == 4 and not report["nodes"][0]["warnings"], report
    assert "OMP_NUM_THREADS: node 1 (node2) has 64, node 0 (node1) 1" in clean
    assert (first, second) == (0, 0) and not metrics(nodes.run)


@netns
def test_shared_memory_that_does_not_hold_the_batches(nodes: Nodes, place: Path) -> None:
    (place / "images.py").write_text(IMAGES)
    own = ["data.target=images:data", "data.args={}", "model.target=images:model", "model.args={}", "training.batch_size=8"]
    for size, workers, code in (("4m", 2, 4), ("4m", 0, 0), ("64m", 2, 0)):
        nodes.run = place / f"run-{size}-{workers}"
        prepare = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
        for rank in (0, 1):
            shm = prepare if rank else "true"
            nodes.start(rank, *own, f"data.num_workers={workers}", prepare=shm, PYTHONPATH=f"{place}:{ROOT}")
        ended = nodes.end(120)
        assert [exit_code for exit_code, _ in ended] == [code, code], ended
        nodes.started.clear()
        if code:
            lines = {fault(output) for _, output in ended}
            assert len(lines) == 1 and all(output.count("FAULT ") == 1 for _, output in ended), ended
            need = 1 * 2 * 2 * 4 * (3 * 224 * 224 * 4 + 8) >> 20
            line = lines.pop()
            assert line.startswith("FAULT E1 host=node2 rank=1: /dev/shm has 4 MiB free, and ") and f"need {need} MiB" in line, (
                line
            )
            assert all(words in line for words in ("shm_size: ", "--shm-size=", "emptyDir", "data.num_workers"))
            assert not metrics(nodes.run)


@netns
def test_a_disk_without_room_for_one_checkpoint(nodes: Nodes, place: Path) -> None:
    wide = ["model.target=torch.nn:Linear", "model.args={in_features: 8, out_features: 500000}"]
    images = place / "wide.py"
    images.write_text(
        "import torch\nfrom torch.utils.data import TensorDataset as T\n"
        "def data(): return T(torch.zeros(64, 8), torch.zeros(64, dtype=torch.long)), None\n"
    )
    nodes.cluster.on("node1", "true")
    disk = place / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
    try:
        nodes.run = disk / "run"
        environ = {"PET_NNODES": "1", "PYTHONPATH": f"{place}:{ROOT}", "OMP_NUM_THREADS": "1"}
        settings = [
            *wide,
            "data.target=wide:data",
            "data.args={}",
            "resources.nodes=1",
            "training.max_steps=1",
            overrides(nodes.run),
        ]
        argv = [sys.executable, "-m", "trainer", "node", str(DIGITS), *settings, "resources.ranks_per_node=1"]
        done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **environ}, timeout=60)
        assert done.returncode == 4 and f"no space for a checkpoint in {disk}/run/checkpoints: " in fault(done.stderr), (
            done.stderr
        )
        assert fault(done.stderr).startswith("FAULT G2 host=")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@netns
def test_a_refusal_reaches_a_node_that_looks_late(nodes: Nodes) -> None:
    """Node 0 gives the verdict and keeps its store until all have read it."""
    nodes.start(0, "training.seed=1")
    nodes.start(1, "training.seed=2")
    ended = nodes.end()
    assert [code for code, _ in ended] == [4, 4] and all(
        "FAULT B4 host=node2 node_rank=1: training.seed: node 1 (node2) has 2, node 0 (node1) 1; fix: " in output
        for _, output in ended
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
    assert events(nodes.run, "node_end")[-1]["exit_code"] == 0


@netns
def test_two_node_0s_are_both_named(nodes: Nodes) -> None:
    nodes.start(0)
    assert wait_until(lambda: (nodes.run / ".lock").exists())
    nodes.start(0, machine=2)
    ended = nodes.end()
    assert [code for code, _ in ended] == [4, 4] and len({fault(output) for _, output in ended}) == 1, ended
    assert "FAULT A11 host=node2 node_rank=0: node rank 0 is claimed by node1 (pid " in fault(ended[0][1])


@netns
def test_a_run_folder_that_node_0_cannot_write(nodes: Nodes) -> None:
    nodes.run.mkdir()
    nodes.start(0, prepare=f"mount -t tmpfs -o ro tmpfs {nodes.run}")
    nodes.start(1)
    ended = nodes.end()
    assert [code for code, _ in ended] == [4, 4] and len({fault(output) for _, output in ended}) == 1, ended
    cause = f"FAULT K4 host=node1 node_rank=0: the run folder {nodes.run} cannot be written: Read-only file system; fix: "
    assert fault(ended[0][1]).startswith(cause), ended


@netns
def test_a_node_that_dies_between_the_verdict_and_the_store(nodes: Nodes) -> None:
    nodes.start(0)
    nodes.start(1, patch="node._Node._roll = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)")
    code, output = nodes.end()[0]
    assert code == 164 and "Traceback" not in output, output
    assert fault(output).startswith(
        "FAULT C3 host=node2 node_rank=1: node 1 (node2) ended between the roll call and the start"
    ), output


@netns
def test_a_node_0_that_freezes_after_the_verdict(nodes: Nodes) -> None:
    nodes.start(0, patch="node._Node._roll = lambda *arguments: os.kill(os.getpid(), signal.SIGSTOP)")
    nodes.start(1)
    output, code = nodes.started[1].communicate(timeout=60)[0], nodes.started.pop(1).returncode
    assert code == 164 and "frame #" not in output, output
    assert fault(output).startswith("FAULT C3 host=node2 node_rank=1: lost node 0 after the roll call"), output


TERM = "os.kill(os.getpid(), signal.SIGTERM)"


@netns
@pytest.mark.parametrize(
    ("patch", "words"),
    [
        (
            f"roll = node._Node._roll\nnode._Node._roll = lambda *a: (roll(*a), {TERM})[0]",
            "node_rank=1: SIGTERM before the ranks were started",
        ),
        (
            f"import trainer.node.ranks as ranks\nfork = ranks.fork\nranks.fork = lambda *a: (fork(*a), {TERM})[0]",
            "rank=1: died of SIGTERM, for which it had no handler (yet)",
        ),
    ],
)
def test_a_stop_before_the_ranks_have_their_handlers_stops_all(patch: str, words: str, nodes: Nodes) -> None:
    """Right after the roll call, and right after the fork of a rank."""
    long = ["training.max_steps=100000", "training.epochs=4000"]
    nodes.start(0, *long)
    nodes.start(1, *long, patch=patch)
    ended = nodes.end()
    assert [code for code, _ in ended] == [160, 160] and len({fault(output) for _, output in ended}) == 1, ended
    assert f"FAULT D8 host=node2 {words}" in fault(ended[0][1])


@netns
def test_large_packets_that_are_lost(nodes: Nodes, cluster: Cluster) -> None:
    """Another MTU on the way: connections can be made, and nothing comes through."""
    rule = ["iptables", "-w", "-A", "INPUT", "-i", "eth0", "-p", "tcp", "-m", "length", "--length", "1200:65535", "-j", "DROP"]
    cluster.on("node2", *rule)
    nodes.start(0)
    nodes.start(1)
    ended = nodes.end()
    assert [code for code, _ in ended] == [4, 4] and len({fault(output) for _, output in ended}) == 1, ended
    assert (
        "FAULT A9 host=node2 node_rank=1: the way from node 0 (node1) to node 1 (node2) is slow: nothing comes through"
        in ended[0][1]
    )
    assert "another MTU" in fault(ended[0][1])


@netns
def test_a_way_that_is_slow_in_one_direction(nodes: Nodes, cluster: Cluster) -> None:
    cluster.on(
        "node1", "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "20mbit", "burst", "32kbit", "latency", "400ms"
    )
    try:
        for rank in (0, 1):
            nodes.start(rank)
        ended = nodes.end()
    finally:
        cluster.on("node1", "tc", "qdisc", "del", "dev", "eth0", "root")
    assert [code for code, _ in ended] == [0, 0], ended
    (told,) = [line for line in ended[0][1].splitlines() if line.startswith("warning: ")]
    assert told.startswith("warning: the way from node 0 (node1) to node 1 (node2) is slow: ") and "exclude=node2" in told


@netns
def test_a_dual_stack_name_and_an_ipv6_address(nodes: Nodes, cluster: Cluster, place: Path) -> None:
    addresses = {f"node{number}": f"fd00::{number}" for number in (1, 2)}
    for name, address in addresses.items():
        cluster.on(
            name,
            "sh",
            "-c",
            "mount -o remount,rw /proc/sys 2>/dev/null; for i in lo eth0; do echo 0 >/proc/sys/net/ipv6/conf/$i/disable_ipv6; done",
        )
        cluster.on(name, "ip", "addr", "add", f"{address}/64", "dev", "eth0", "nodad")
    hosts = place / "hosts"
    hosts.write_text("".join(f"{addresses[name]} {name}\n{cluster.address(name)} {name}\n" for name in addresses))
    try:
        for where in ("node1", "fd00::1"):
            nodes.run = place / f"run-{where.partition(':')[0]}"
            for rank in (0, 1):
                nodes.start(rank, address=where, prepare=f"mount --bind {hosts} /etc/hosts")
            ended = nodes.end()
            assert [code for code, _ in ended] == [0, 0], (where, ended)
            nodes.started.clear()
    finally:
        for name, address in addresses.items():
            cluster.on(name, "ip", "addr", "del", f"{address}/64", "dev", "eth0")
