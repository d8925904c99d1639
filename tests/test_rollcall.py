"""The roll call between threads: who is missing, who differs, who claims what, and what node 0 tells of it. Real sockets, no torch."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import ExitCode, Fault, FaultError, KitError
from trainer.node import judge, parity, register, rollcall
from trainer.node.identity import Identity
from trainer.node.logs import Report, RunFolder
from trainer.node.probe import Probe, Result, Task, entry
from trainer.node.record import Attentive, Record
from trainer.node.rollcall import Place, Terms
from trainer.node.speed import slow_ways

SAME = {"torch": "2.14.1", "training.seed": "1"}


@dataclass
class Call:
    """Some nodes in threads, each with a host name of its own."""

    nnodes: int
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    ended: dict[str, Place | Exception] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def pause(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise InterruptedError

    def start(self, rank: int, terms: Terms | None = None, seconds: float = 5, name: str = "", **more: Any) -> None:
        name, terms = name or f"n{rank}", terms or Terms(0, SAME)
        node = Host(self.nnodes, rank, 1, "127.0.0.1", self.listener.getsockname()[1], "test", name=name)
        until = time.monotonic() + seconds

        stopped, other_end = more.pop("stopped", None), more.pop("other_end", lambda: None)

        def wait(seconds: float) -> None:
            self.pause(seconds)
            if stopped:
                stopped()

        pause = Attentive(wait, other_end)

        def run() -> None:
            try:
                if rank == 0:
                    keep, say = self.reports.append, self.said.append
                    place = judge.preside(node, terms, self.listener, until, say, pause, more.pop("probe", "quick"), keep)
                else:
                    place = rollcall.join(node, terms, until, pause, **more)
                self.ended[name] = place
            except Exception as error:
                self.ended[name] = error

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def end(self) -> dict[str, Place | Exception]:
        for thread in self.threads:
            thread.join(30)
        return self.ended

    @property
    def lines(self) -> set[str]:
        """The faults with which the nodes ended."""
        return {str(error) for error in self.end().values()}


class Host(Identity):
    """A node whose host has the name that the test gives it."""

    def __init__(self, *place: Any, name: str) -> None:
        super().__init__(*place)
        object.__setattr__(self, "name", name)

    @property
    def host(self) -> str:
        return str(self.name)  # type: ignore[attr-defined]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(parity, "same_address", lambda claims: None)  # all these hosts have the same one
    made: list[Call] = []

    def new(nnodes: int) -> Call:
        made.append(Call(nnodes))
        return made[-1]

    yield new
    for each in made:
        each.stop.set()
        each.end()
        each.listener.close()


def told(rank: int, **facts: str) -> Terms:
    return Terms(rank, {**SAME, **facts})


def test_all_are_here_and_node_0s_attempt_counts(call: Any) -> None:
    nodes = call(4)
    for rank in (3, 1, 0, 2):
        nodes.start(rank, Terms(7 if rank == 0 else 3, SAME))
    assert {place.attempt for place in nodes.end().values()} == {7}
    assert {place.master for place in nodes.ended.values()} == {"127.0.0.1"}
    (report,) = nodes.reports
    assert [node["host"] for node in report.nodes] == ["n0", "n1", "n2", "n3"] and not report.fault and not nodes.said


def test_a_single_node_waits_for_nobody(call: Any) -> None:
    nodes = call(1)
    nodes.start(0)
    assert nodes.end()["n0"] == Place(0, "", "127.0.0.1", ("n0",))


@pytest.mark.parametrize("culprit", [0, 1, 2, 3])
def test_the_odd_one_out_is_the_same_line_on_all(culprit: int, call: Any) -> None:
    nodes = call(4)
    for rank in range(4):
        nodes.start(rank, told(0, torch="2.13.0") if rank == culprit else None)
    (line,) = nodes.lines
    assert line.startswith(
        f"FAULT B1 host=n{culprit} node_rank={culprit}: torch: node {culprit} (n{culprit}) has 2.13.0, 3 others 2.14.1; fix: "
    )


def test_nodes_may_differ_if_node_0_says_so(call: Any) -> None:
    nodes = call(3)
    for rank in range(3):
        nodes.start(rank, Terms(0, {**SAME, "torch": f"2.{rank // 2}"}, {"driver": f"{580 + rank // 2}"}, may_differ=rank == 0))
    assert all(isinstance(place, Place) for place in nodes.end().values())
    assert nodes.said == [
        "warning: torch: node 2 (n2) has 2.1, 2 others 2.0; going on, as rollcall.parity=warn says",
        "warning: driver: node 2 (n2) has 581, 2 others 580",
    ]
    assert nodes.reports[0].warnings == [text.removeprefix("warning: ") for text in nodes.said]


def test_the_missing_are_counted_and_named_while_there_is_waiting(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "_SAY_SECONDS", 0.5)
    nodes = call(4)
    for rank in (0, 2):
        nodes.start(rank, seconds=1.5)
    (line,) = nodes.lines
    assert line.startswith("FAULT A12 host=n0 node_rank=1: 2 of 4 nodes joined in 2 s; missing: node rank 1, 3; fix: ")
    assert nodes.said[0] == "2 of 4 nodes are here; waiting for node rank 1, 3"


def test_a_node_that_came_first_stays_as_long_as_node_0_waits(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollcall, "_LATE_SECONDS", 0.5)
    nodes = call(3)
    nodes.start(0, seconds=20)
    nodes.start(1, seconds=0.5)
    time.sleep(2.5)
    nodes.start(2, seconds=20)
    assert all(isinstance(end, Place) for end in nodes.end().values()), nodes.ended


def test_two_claimants_of_one_rank_are_both_named_everywhere(call: Any) -> None:
    nodes = call(3)
    for rank, name in ((0, "n0"), (2, "first"), (2, "second")):
        nodes.start(rank, name=name, seconds=20)
        time.sleep(0.3)
    (line,) = nodes.lines
    assert (
        line.startswith("FAULT A11 host=second node_rank=2: node rank 2 is claimed by first (pid ")
        and " and second (pid " in line
    )
    assert len(nodes.ended) == 3


def test_a_node_that_ends_frees_its_rank(call: Any) -> None:
    """A scheduler may start a node anew while the others still wait."""
    nodes, other = call(3), call(3)
    nodes.start(0, seconds=20)
    other.listener.close()
    other.listener = nodes.listener.dup()
    other.start(1, name="before")
    time.sleep(0.5)
    other.stop.set()
    other.end()
    nodes.start(1, name="after")
    nodes.start(2)
    assert {name: type(end) for name, end in nodes.end().items()} == {"n0": Place, "after": Place, "n2": Place}


def test_what_one_node_finds_wrong_with_itself_ends_all(call: Any) -> None:
    trouble = Fault("B3", "n2", "the driver is too old", "install a newer one", ExitCode.REFUSED, node_rank=2)
    nodes = call(4)
    started = time.monotonic()
    for rank in range(3):  # node 3 does not come
        nodes.start(rank, Terms(0, SAME, trouble=trouble) if rank == 2 else None, seconds=30)
    assert nodes.lines == {trouble.line()} and time.monotonic() - started < 10


def test_another_number_of_nodes(call: Any) -> None:
    nodes, others = call(2), call(3)
    nodes.start(0)
    others.listener.close()
    others.listener = nodes.listener.dup()
    others.start(2)
    expected = "FAULT A13 host=n2 node_rank=2: node 2 (n2) says 3 nodes, node 0 (n0) says 2; fix: make the two agree"
    assert nodes.lines | others.lines == {expected}


def test_the_roll_call_of_another_job(call: Any) -> None:
    nodes = call(2)
    nodes.start(0, Terms(0, SAME, job="4711"), seconds=3)
    nodes.start(1, Terms(0, SAME, job="4712"), seconds=1)
    assert "FAULT A4 host=n1 node_rank=1: what listens at " in str(nodes.end()["n1"])
    assert "is not this job's roll call (it is that of job 4711)" in str(nodes.ended["n1"])
    assert "missing: node rank 1" in str(nodes.ended["n0"])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "(it says nothing)"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "(it said 'HTTP/1.1 400 Bad Request')"),
        (None, "(closed)"),
    ],
)
def test_something_else_answers(answer: bytes | None, words: str, call: Any) -> None:
    nodes = call(2)
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = nodes.listener.accept()
            except OSError:
                return
            if answer is None:
                connection.recv(1 << 16)
                connection.close()
            else:
                connection.sendall(answer)
                held.append(connection)

    server = threading.Thread(target=serve)
    server.start()
    nodes.start(1, seconds=1)
    end = str(nodes.end()["n1"])
    nodes.listener.shutdown(socket.SHUT_RDWR)
    server.join()
    for connection in held:
        connection.close()
    assert end.startswith("FAULT A4 host=n1 node_rank=1: what listens at 127.0.0.1:") and words in end


def test_a_store_that_is_there_already_is_an_earlier_start(call: Any) -> None:
    nodes = call(2)
    nodes.listener.listen()
    closer = threading.Timer(0.1, lambda: nodes.listener.accept()[0].close())
    closer.start()
    nodes.start(1, seconds=0.3, is_store=lambda address, port: True)
    assert "FAULT A21 host=n1 node_rank=1: the roll call at 127.0.0.1:" in str(nodes.end()["n1"])


def test_node_0_that_has_ended_tells_why_by_the_run_folder(call: Any, tmp_path: Path) -> None:
    folder, nodes, record = RunFolder(tmp_path), call(2), Record(RunFolder(tmp_path), {})
    nodes.listener.close()
    nodes.listener = socket.create_server(("127.0.0.1", 0))
    free = nodes.listener.dup()
    nodes.listener.shutdown(socket.SHUT_RDWR)
    fault = "FAULT A3 host=n0 node_rank=0: port 29500 is in use; fix: stop it"
    folder.event("node_end", attempt=0, start="", exit_code=161, fault="FAULT A12 after which a scheduler tries again")
    with (tmp_path / "events.jsonl").open("a") as events:
        events.write("5\n[1]\nnull\n{cut off\n")
    assert record.other_end() is None
    record.end(0, "n0", 4, fault)
    nodes.start(1, seconds=30, other_end=record.other_end)
    end = nodes.end()["n1"]
    free.close()
    assert isinstance(end, KitError) and end.exit_code == ExitCode.REFUSED and str(end) == fault


def test_an_earlier_starts_end_is_none_of_this_ones(tmp_path: Path) -> None:
    """Somebody has mended the fault and starts again, this node before node 0."""
    fault = "FAULT B4 host=n1 node_rank=1: training.seed: ...; fix: ..."

    def record(later: float = 0.0, **environ: str) -> Record:
        made = Record(RunFolder(tmp_path), environ)
        made.born += later
        return made

    record().end(0, "n0", 4, fault)
    assert record(5).other_end() is None and record().other_end() is not None
    record(SLURM_JOB_ID="4711").end(0, "n0", 160, fault)
    assert record(SLURM_JOB_ID="4711", SLURM_RESTART_COUNT="1").other_end() is None, "requeued"
    assert str(record(500, SLURM_JOB_ID="4711").other_end()) == fault, "however long this node took to come up"
    RunFolder(tmp_path).logs(0)
    assert record().other_end() is None, "the ranks of that attempt were started, so this is another one"


def test_the_end_of_a_node_that_never_called_ends_all(call: Any, tmp_path: Path) -> None:
    """It did not know its place, so it could not call; node 0 learns of it from the run folder and tells the rest."""
    nodes, fault = call(3), "FAULT A14 host=n2 node_rank=7: node rank 7 of 3 nodes; fix: node ranks count from 0 to nodes - 1"
    record = Record(RunFolder(tmp_path), {})
    nodes.start(0, seconds=60, other_end=record.other_end)
    nodes.start(1, seconds=60)
    record.end(7, "n2", 4, fault)
    started = time.monotonic()
    assert nodes.lines == {fault} and time.monotonic() - started < 15


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("moment", ["waiting", "probing"])
def test_a_stop_of_one_node_during_the_roll_call_ends_all(
    culprit: int, moment: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, at = call(3), threading.Event()
    stop = FaultError(Fault("D8", f"n{culprit}", "SIGTERM before the ranks were started", "start again", ExitCode.STOPPED))
    if moment == "probing":
        own, run = Probe.run, lambda probe, task, pause: (at.set(), time.sleep(0.3), own(probe, task, pause))[-1]
        monkeypatch.setattr(Probe, "run", run)
    else:
        threading.Timer(1, at.set).start()

    def once() -> None:
        if at.is_set() and stops:
            raise stops.pop()

    stops = [stop]
    for rank in range(3 if moment == "probing" else 2):
        nodes.start(rank, seconds=60, stopped=once if rank == culprit else None)
    started = time.monotonic()
    assert nodes.lines == {str(stop)} and time.monotonic() - started < 15


def test_a_run_folder_that_is_not_shared(call: Any, tmp_path: Path) -> None:
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
    for warn in (False, True):
        nodes = call(3)
        for rank in range(3):
            folder = RunFolder(tmp_path / ("own" if rank == 1 else "shared"))
            nodes.start(rank, Terms(0, SAME, folder=folder, may_differ=warn), seconds=20)
        cause = "node 1 (n1) does not see what node 0 (n0) writes in the run folder: it is not shared"
        if warn:
            assert all(isinstance(end, Place) for end in nodes.end().values())
            assert nodes.said == [f"warning: {cause}; going on, as rollcall.parity=warn says"]
        else:
            (line,) = nodes.lines
            assert line.startswith(f"FAULT G8 host=n1 node_rank=1: {cause}; fix: ")
    assert not list((tmp_path / "shared").iterdir()), "the mark is gone"


@pytest.mark.parametrize(
    ("broken", "culprit", "words"),
    [
        ({(1, 2)}, 2, "node 1 (n1) gets no answer from node 2 (n2) at 127.0.0.1:"),
        ({(0, 3), (1, 3), (2, 3)}, 3, "; 2 more such connections fail, all into node 3 (n3)"),
        ({(3, 0), (3, 1), (3, 2)}, 3, "; 2 more such connections fail, all out of node 3 (n3)"),
        ({(0, 2), (2, 0), (1, 2), (2, 1)}, 2, "; 3 more such connections fail, in both directions"),
    ],
)
def test_a_hole_in_a_firewall_is_told_with_its_direction(
    broken: set[tuple[int, int]], culprit: int, words: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the probes tell is recorded here; the real ones are in test_network."""

    def run(self: Probe, task: Task, pause: object) -> Result:
        own = (task.first - 1) % 4
        return Result([(rank, "no answer") for rank, *_ in task.partners if (own, rank) in broken])

    monkeypatch.setattr(Probe, "run", run)
    nodes = call(4)
    for rank in range(4):
        nodes.start(rank, seconds=20)
    (line,) = nodes.lines
    assert line.startswith(f"FAULT A9 host=n{culprit} node_rank={culprit}: ") and words in line
    assert "let TCP ports " in line and nodes.reports[0].fault == line


def test_wrong_clocks_are_told(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded clocks: node 2 lives an hour ahead, node 1 a minute behind."""
    probed = rollcall._Attendance._probed

    def ahead(self: Any, asked: Any) -> dict[str, Any]:
        found = probed(self, asked)
        return {**found, "clock": found["clock"] + {0: 0, 1: -60, 2: 3600}[self.node.node_rank]}

    monkeypatch.setattr(rollcall._Attendance, "_probed", ahead)
    nodes = call(3)
    for rank in range(3):
        nodes.start(rank, seconds=20)
    assert all(isinstance(end, Place) for end in nodes.end().values())
    behind, ahead_of = nodes.said
    assert re.match(r"warning: the clock of node 1 \(n1\) is (59|60) s behind node 0's", behind), behind
    assert ahead_of.startswith("warning: the clock of node 2 (n2) is 3600 s ahead of node 0's")


GOOD, BAD = 1e9, 1e8


@pytest.mark.parametrize(
    ("slow", "culprit", "words"),
    [
        (
            lambda sender, receiver: (sender, receiver) == (2, 3),
            3,
            "the way from n2 to n3 is slow: 100.0 MB/s, others reach 1000 MB/s",
        ),
        (lambda sender, receiver: sender == 2, 2, "n2 sends slowly, to n3 100.0 MB/s, others reach 1000 MB/s; to n0 too"),
        (
            lambda sender, receiver: receiver == 3,
            3,
            "n3 receives slowly, from n2 100.0 MB/s, others reach 1000 MB/s; from n0 too",
        ),
    ],
)
def test_a_slow_way_is_told_from_a_slow_node(slow: Callable[[int, int], bool], culprit: int, words: str) -> None:
    def measure(sender: int, receiver: int) -> float:
        return BAD if slow(sender, receiver) else GOOD

    received = {rank: measure((rank - 1) % 5, rank) for rank in range(5)}
    (found,) = slow_ways(received, measure, lambda rank: f"n{rank}")
    assert found.node_rank == culprit and found.words.startswith(words) and not found.dead


@pytest.mark.parametrize("nodes", [3, 4, 8])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_one_node_that_is_slow_both_ways_is_found_in_a_small_ring(culprit: int, nodes: int) -> None:
    def measure(sender: int, receiver: int) -> float:
        return BAD if culprit in (sender, receiver) else GOOD

    found = list(slow_ways({rank: measure((rank - 1) % nodes, rank) for rank in range(nodes)}, measure, lambda rank: f"n{rank}"))
    assert len(found) == 2 and all(f"n{culprit}" in slow.words for slow in found)


def test_a_way_through_which_nothing_comes_is_dead() -> None:
    def measure(sender: int, receiver: int) -> float:
        return 0.0 if receiver == 1 else GOOD

    assert [slow.node_rank for slow in slow_ways({0: GOOD, 1: 0.0}, measure, str) if slow.dead] == [1]
    assert len([slow for slow in slow_ways({0: 0.0, 1: 0.0}, lambda sender, receiver: 0.0, str) if slow.dead]) == 2


def test_what_was_slow_only_while_all_streamed_is_not_told() -> None:
    measured = {0: GOOD, 1: BAD}
    for held_up in (BAD / 40, BAD):  # what node 1 sends: the answers wait behind what node 0 sends over its slow way
        (found,) = slow_ways({0: held_up, 1: BAD}, lambda sender, receiver: measured[receiver], str)
        assert found.node_rank == 1 and "from 0 to 1" in found.words
    assert not list(slow_ways({0: GOOD, 1: BAD, 2: GOOD}, lambda sender, receiver: GOOD, str))
    assert not list(slow_ways({0: GOOD, 1: 0.6 * GOOD, 2: GOOD}, lambda sender, receiver: BAD, str))
    assert not list(slow_ways({0: GOOD, 1: BAD}, lambda sender, receiver: BAD, str)), "of two alike, nothing says what is usual"


def test_a_node_that_dies_while_it_is_probed(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = call(3)
    run = Probe.run

    def dies(self: Probe, task: Task, pause: Any) -> Result:
        if task.first == 2:
            raise OSError("gone")
        return run(self, task, pause)

    monkeypatch.setattr(Probe, "run", dies)
    for rank in range(3):
        nodes.start(rank, seconds=20)
    ends = nodes.end()
    assert (
        str(ends["n0"])
        == str(ends["n2"])
        == ("FAULT C3 host=n1 node_rank=1: node 1 (n1) ended during the roll call; fix: look at its log")
    )


def test_a_table_of_partners_goes_round_the_ring() -> None:
    table = "".join(entry(f"10.0.{rank}.1", 1000 + rank) for rank in (3, 4, 0))
    assert Task(table, 3, 5).partners == [(3, "10.0.3.1", 1003), (4, "10.0.4.1", 1004), (0, "10.0.0.1", 1000)]
    assert Task(entry("fe80::1", 65535), 1, 2, ipv6=True).partners == [(1, "fe80::1", 65535)]


def test_two_probes_measure_the_way_between_them() -> None:
    first, second = Probe("127.0.0.1"), Probe("127.0.0.1")
    found: list[Result] = []
    forth, back = (Task(entry(to.address, to.port), rank, 2, False, 0.2, True, True) for rank, to in ((1, second), (0, first)))
    other = threading.Thread(target=lambda: found.append(second.run(back, time.sleep)))
    other.start()
    result = first.run(forth, time.sleep)
    other.join()
    for each in (result, *found):
        assert not each.failed and each.received and each.received > 1e7
    second.close()
    assert first.run(forth, time.sleep).failed == [(1, "refused")]
    first.close()


def test_the_report_can_be_written(call: Any) -> None:
    nodes = call(2)
    nodes.start(0)
    nodes.start(1)
    nodes.end()
    assert json.loads(json.dumps(nodes.reports[0].nodes))[1]["facts"] == SAME
    assert not isinstance(nodes.ended["n1"], FaultError)


CLAIM = {
    **{"node_rank": 2, "nnodes": 3, "pid": 1, "port": 1024, "facts": {}, "traits": {}, "warnings": []},
    **{"host": "h", "job": "", "address": "10.0.0.1", "route": "", "trouble": None},
}
WRONG: list[dict[str, Any]] = [
    {"node_rank": 7},
    {"node_rank": -1},
    {"node_rank": True},
    {"port": 70000},
    {"address": "nonsense"},
    {"trouble": "x"},
    {"facts": {"torch": [1]}},
    {"warnings": [5]},
    {"host": None},
]


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n",
        b"\x16\x03\x01\x02\x00" * 50 + b"\n",
        b"[]\n",
        b'{"node_rank": "x"}\n',
        json.dumps(
            {"node_rank": 7, "nnodes": 3, "host": "h", "pid": 1, "job": "", "address": "", "route": "", "port": 1}
        ).encode()
        + b"\n",
        json.dumps(
            {"node_rank": -1, "nnodes": 3, "pid": 1, "port": 1, "facts": {}, "traits": {}, "warnings": []}
            | dict.fromkeys(("host", "job", "address", "route"), "")
        ).encode()
        + b"\n",
        b"",
        b"[" * 200_000 + b"\n",
        *(json.dumps({**CLAIM, **wrong}).encode() + b"\n" for wrong in WRONG),
        json.dumps({**CLAIM, "node_rank": 1}).encode() + b'\n{"x": 1}\n',
        json.dumps({**CLAIM, "node_rank": 1}).encode() + b'\n{"probed": 5}\n',
    ],
)
def test_strangers_do_not_disturb(said: bytes, call: Any) -> None:
    nodes = call(3)
    nodes.start(0, seconds=20)
    with socket.create_connection(nodes.listener.getsockname()) as stranger:
        stranger.sendall(said)
        time.sleep(0.3)
        for rank in (1, 2):
            nodes.start(rank, seconds=20)
        assert all(isinstance(end, Place) for end in nodes.end().values()), nodes.ended


def test_a_verdict_that_does_not_fit_into_the_kernels_buffer(call: Any) -> None:
    """Node 0 sends the rest when there is room, though the node that reads it says nothing meanwhile."""
    nodes = call(2)
    nodes.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    trouble = Fault("B3", "n0", "x" * (3 << 20), "fix", ExitCode.REFUSED)
    nodes.start(0, Terms(0, SAME, trouble=trouble), seconds=20)
    nodes.start(1, seconds=20)
    assert {len(line) for line in nodes.lines} == {len(trouble.line())}
