import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import FaultError
from trainer.node.identity import identify, port_for
from trainer.node.slurmenv import counts, expand_nodelist, gpu_count

PET = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "n0",
    "PET_MASTER_PORT": "23456",
}
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_NODEID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[01-02]"}


def test_pet_variables_come_first() -> None:
    found = identify({**SLURM, **PET}, 2, 4, False)
    assert (found.nnodes, found.node_rank, found.nproc_per_node, found.world_size) == (2, 1, 4, 8)
    assert found.address == "n0:23456" and found.source == "PET_*"


@pytest.mark.parametrize(
    "more",
    [
        {"WORLD_SIZE": "8", "RANK": "1"},  # the training operator's, with a number of processes
        {"WORLD_SIZE": "2", "RANK": "1"},  # and without
        {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1"},  # an outer allocation of one node
    ],
)
def test_what_says_the_same_in_other_words(more: dict[str, str]) -> None:
    assert identify({**PET, **more}, 2, 4, False).node_rank == 1


def test_the_nodes_have_names_where_slurm_tells_them() -> None:
    assert identify(SLURM, 2, 8, False).hosts == ("n01", "n02")
    assert identify({**PET, "SLURM_JOB_NODELIST": "n[1-2]"}, 2, 4, False).hosts == ("n1", "n2")
    assert identify({**PET, "SLURM_JOB_NODELIST": "n[1-3]"}, 2, 4, False).hosts == ()


def test_kubeflow_may_give_the_address_under_its_plain_name() -> None:
    environ = {k: v for k, v in PET.items() if "MASTER" not in k} | {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    assert identify(environ, 2, 4, False).address == "job-master-0:23456"


def test_slurm_names_the_first_node_and_a_port_from_the_job() -> None:
    found = identify(SLURM, 2, 8, False)
    assert (found.node_rank, found.nproc_per_node, found.address) == (1, 8, "n01:24711")


def test_a_single_node_needs_nothing() -> None:
    assert identify({}, 1, 3, False).world_size == 3
    assert identify({"SLURM_JOB_ID": "4711"}, 1, 1, False).source == "a single node", "an allocation without srun"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "resources.nodes=2 but neither PET_* nor Slurm's variables say which node this is"),
        ({**PET, "PET_NNODES": "3"}, "PET_* says 3 nodes, resources.nodes=2"),
        ({**SLURM, "SLURM_JOB_NUM_NODES": "4"}, "Slurm says 4 nodes, resources.nodes=2"),
        ({**PET, "PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8, the config says 4"),
        ({**PET, "PET_NODE_RANK": "2"}, "node rank 2 of 2 nodes"),
        ({**PET, "PET_NODE_RANK": "one"}, "PET_NODE_RANK=one is no number"),
        ({**PET, "PET_NODE_RANK": "-1"}, "PET_NODE_RANK=-1 is no number"),
        ({k: v for k, v in PET.items() if k != "PET_NODE_RANK"}, "PET_NODE_RANK is not set"),
        ({k: v for k, v in PET.items() if k != "PET_MASTER_ADDR"}, "PET_MASTER_ADDR is not set"),
        ({**PET, "PET_MASTER_PORT": "tcp://10.0.0.1:80"}, "PET_MASTER_PORT=tcp://10.0.0.1:80 is no number (a Kubernetes service"),
        ({**PET, "PET_MASTER_PORT": "0"}, "master port 0"),
        ({**PET, "PET_MASTER_PORT": "70000"}, "master port 70000"),
        ({**PET, "PET_MASTER_ADDR": "localhost"}, "2 nodes but the master address localhost is loopback"),
        ({**PET, "PET_MASTER_ADDR": "127.0.1.1"}, "2 nodes but the master address 127.0.1.1 is loopback"),
        ({**PET, "PET_MASTER_ADDR": "::1"}, "2 nodes but the master address ::1 is loopback"),
        (
            {**SLURM, "SLURM_TASKS_PER_NODE": "4(x2)"},
            "SLURM_TASKS_PER_NODE=4(x2) on 2 nodes; fix: start with srun --ntasks-per-node=1",
        ),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "1(x"}, "no list of counts"),
        ({**PET, "SLURM_GPUS_ON_NODE": "4"}, "resources.gpus_per_node=8, but Slurm gave 4 (SLURM_GPUS_ON_NODE=4)"),
        ({**PET, "SLURM_GPUS_PER_NODE": "gpu:h100:2"}, "but Slurm gave 2 (SLURM_GPUS_PER_NODE=gpu:h100:2)"),
        ({**PET, "SLURM_GPUS_PER_NODE": "many"}, "no count of GPUs: 'many'"),
        ({**PET, "WORLD_SIZE": "5"}, "WORLD_SIZE=5, but PET_NNODES=2 with 4 ranks on each"),
        ({**PET, "RANK": "0"}, "RANK=0, but PET_NODE_RANK=1"),
        ({**PET, "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2"}, "SLURM_NODEID=0, but PET_NODE_RANK=1"),
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST='n[1-' is no node list"),
    ],
)
def test_what_cannot_be_right_is_one_line_at_once(environ: dict[str, str], words: str) -> None:
    with pytest.raises(FaultError) as error:
        identify(environ, 2, 4, one_machine=False, gpus_per_node=8)
    line = error.value.fault.line()
    assert words in line and line.startswith("FAULT ") and "; fix: " in line
    assert not error.value.exit_code.retryable


def test_loopback_is_right_when_all_nodes_are_this_machine() -> None:
    assert identify({**PET, "PET_MASTER_ADDR": "127.0.0.1"}, 2, 4, one_machine=True).master_addr == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n0", ["n0"]),
        ("n[0-2]", ["n0", "n1", "n2"]),
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("a1,n[08-10],login-2", ["a1", "n08", "n09", "n10", "login-2"]),
        ("r[1-2]c[3-4]", ["r1c3", "r1c4", "r2c3", "r2c4"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", "n[1-2]]", "[]", "n[3-1],m", "n[0-9999999999]"])
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no node list"):
        expand_nodelist(text)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 4)), min_size=1, max_size=5))
def test_counts_are_read_back(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert counts(text) == [count for count, times in runs for _ in range(times)]


@given(st.text("0123456789(x),:[]- ", max_size=12))
def test_what_is_not_understood_is_refused_and_never_guessed(text: str) -> None:
    for read in (counts, gpu_count, expand_nodelist):
        try:
            found = read(text)
        except ValueError as error:
            assert repr(text)[1:-1][:3] in str(error) or "no node list" in str(error)
        else:
            assert found if isinstance(found, list) else found >= 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8", 8),
        ("a100:4", 4),
        ("gpu:h100:8", 8),
        ("gpu:2", 2),
        ("gres:gpu:4(IDX:0-3)", 4),
        ("gpu:a100:2(IDX:0,3),gpu:v100:1(IDX:1)", 3),
    ],
)
def test_gpu_counts(text: str, number: int) -> None:
    assert gpu_count(text) == number


@pytest.mark.parametrize("text", ["", "a100", "2(x3)", "gpu:", "four", "-1", "4,"])
def test_what_is_no_count_of_gpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no count of GPUs"):
        gpu_count(text)


@given(
    st.lists(st.integers(0, 2000), min_size=1, max_size=6, unique=True), st.sampled_from(["n", "gpu-a", "r1c"]), st.integers(1, 4)
)
def test_node_lists_are_read_back(numbers: list[int], prefix: str, width: int) -> None:
    names = [str(number).zfill(width) for number in sorted(numbers)]
    assert expand_nodelist(f"{prefix}[{','.join(names)}]") == [prefix + name for name in names]
    first, last = names[0], names[-1]
    if len(first) == len(last):
        whole = expand_nodelist(f"{prefix}[{first}-{last}]")
        assert whole == [prefix + str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]


@given(st.integers(1, 10**7), st.integers(0, 200))
def test_ports_of_neighbouring_jobs_differ_and_are_out_of_the_way(job: int, other: int) -> None:
    port = port_for(str(job))
    assert 20000 <= port < 29000
    assert other == 0 or port_for(str(job + other)) != port
