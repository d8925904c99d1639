"""Every way of starting the same config ends with the same weights."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.forked import free_port
from tests.jobs import SHORT, TRAINER, command, equal, finish, logs, overrides, saved, start

pytestmark = pytest.mark.ranks
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks by `trainer run`."""
    run = tmp_path_factory.mktemp("a 'reference'") / "run"
    code, output = command(*TRAINER, "run", *SHORT, overrides(run))
    assert code == 0, output
    return run


def test_one_plain_process(reference: Path, folder: Path) -> None:
    code, output = command(sys.executable, "-m", "trainer.train", *SHORT, overrides(folder / "run"))
    assert code == 0, output
    assert "1 ranks on cpu" in output
    assert equal(saved(folder / "run"), saved(reference), within=1e-6)


def test_torchrun_on_one_node(reference: Path, folder: Path) -> None:
    torchrun = [*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(free_port()), "-m", "trainer.train"]
    code, output = command(*torchrun, *SHORT, overrides(folder / "run"))
    assert code == 0, output
    assert equal(saved(folder / "run"), saved(reference))


def test_an_exception_under_torchrun_is_told_and_ends_with_1(folder: Path) -> None:
    torchrun = [*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(free_port()), "-m", "trainer.train"]
    faulty = "model.args={rank: 1, number: 5, what: raise ValueError('bad sample 7')}"
    code, output = command(*torchrun, *SHORT, overrides(folder / "run"), "model.target=tests.targets:faulty_model", faulty)
    assert code == 1 and output.count("ValueError: bad sample 7") == 1, output
    assert re.search(r"rank +: 1 \(local_rank: 1\)\s+exitcode +: 1 ", output), output


@pytest.mark.parametrize("first", [0, 1])
def test_torchrun_on_two_nodes_either_first(first: int, reference: Path, folder: Path) -> None:
    port = str(free_port())
    torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    nodes = {}
    for rank in (first, 1 - first):
        nodes[rank] = start(*torchrun, "--node-rank", str(rank), "-m", "trainer.train", *SHORT, overrides(folder / "run"))
        if rank == first:
            with pytest.raises(subprocess.TimeoutExpired):
                nodes[rank].wait(1.5)  # it waits for the other
    for node in nodes.values():
        code, output = finish(node)
        assert code == 0, output
    assert equal(saved(folder / "run"), saved(reference))


def test_trainer_node_alone_starts_its_ranks(reference: Path, folder: Path) -> None:
    code, output = command(*TRAINER, "node", *SHORT, overrides(folder / "run"))
    assert code == 0, output
    assert equal(saved(folder / "run"), saved(reference))


@pytest.mark.parametrize("first", [0, 1])
def test_trainer_node_on_two_nodes_by_hand(first: int, reference: Path, folder: Path) -> None:
    two = [*SHORT, overrides(folder / "run"), "resources.nodes=2", "resources.ranks_per_node=1"]
    port = str(free_port())
    pet = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    nodes = [start(*TRAINER, "node", *two, **pet, PET_NODE_RANK=str(rank)) for rank in (first, 1 - first)]
    for node in nodes:
        code, output = finish(node)
        assert code == 0, output + logs(folder)
    assert equal(saved(folder / "run"), saved(reference))


def test_four_ranks_and_two_nodes_by_submit(reference: Path, folder: Path) -> None:
    run = folder / "run"
    four = ["resources.nodes=2", "resources.ranks_per_node=2", "training.micro_batch_size=8"]
    code, output = command(*TRAINER, "submit", *SHORT, overrides(run), *four)
    assert code == 0, output
    code, output = command(*TRAINER, "logs", "--follow", str(run))
    assert code == 0 and "done: the run ended well" in output, output + logs(run)
    assert "4 ranks on cpu" in output
    assert equal(saved(run), saved(reference), within=1e-6)


@pytest.mark.parametrize("way", ["run", "torchrun"])
def test_a_script_of_your_own(way: str, folder: Path) -> None:
    if way == "torchrun":
        script = [
            *TORCHRUN,
            "--nproc-per-node",
            "2",
            "--master-port",
            str(free_port()),
            "configs/own_script.py",
            "--steps",
            "100",
        ]
        code, output = command(*script)
    else:
        code, output = command(*TRAINER, "run", "configs/own_script.yaml", overrides(folder / "run"))
    assert code == 0, output
    assert "step 100 loss 0.0000 on 2 ranks" in output


def test_a_script_in_a_folder_of_its_own_finds_its_modules_and_arguments(folder: Path) -> None:
    (folder / "helper.py").write_text("ANSWER = 42\n")
    (folder / "my train.py").write_text(
        "import sys, os, helper\n"
        "print(helper.ANSWER, sys.argv[1:], os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
    )
    (folder / "run.yaml").write_text(
        'name: mine\nentrypoint: "my train.py"\nentrypoint_args: ["a b", "--local_rank={local_rank}", "{rank}/{world_size}"]\n'
        "resources: {ranks_per_node: 2}\n"
    )
    code, output = command(*TRAINER, "run", "run.yaml", cwd=folder, CUDA_VISIBLE_DEVICES="3,5")
    assert code == 0, output
    (run,) = (folder / "runs").iterdir()
    assert "42 ['a b', '--local_rank=0', '0/2'] 0 2 3,5" in output
    (other,) = run.glob("logs/attempt-000/rank-0001.*.log")
    assert "42 ['a b', '--local_rank=1', '1/2'] 1 2 3,5" in other.read_text()


def test_what_a_script_imports_of_known_libraries_is_there_when_its_ranks_start(folder: Path) -> None:
    """And nothing else of it has been run."""
    (folder / "other.py").write_text("import os\nprint('other runs in', os.environ['RANK'])\n")
    (folder / "script.py").write_text(
        "import sys\nprint('there:', 'torchvision.ops' in sys.modules, 'torch._dynamo' in sys.modules)\n"
        "import torch, torchvision.ops, other\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
    )
    (folder / "run.yaml").write_text("name: mine\nentrypoint: script.py\n")
    code, output = command(*TRAINER, "run", "run.yaml", cwd=folder)
    assert code == 0 and "there: True True" in output and output.count("other runs in 0") == 1, output


def test_a_compiled_model_learns_the_same_and_saves_under_the_same_names(reference: Path, folder: Path) -> None:
    code, output = command(*TRAINER, "run", *SHORT, overrides(folder / "run"), "training.compile=true")
    assert code == 0, output
    assert equal(saved(folder / "run"), saved(reference), within=1e-5)


def test_torchs_old_launch_flag_is_accepted(reference: Path, folder: Path) -> None:
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.launch", "--nproc-per-node", "2"]
    script = str(ROOT / "trainer" / "train" / "__main__.py")
    code, output = command(*launch, "--master-port", str(free_port()), script, *SHORT, overrides(folder / "run"))
    assert code == 0, output
    assert equal(saved(folder / "run"), saved(reference))
