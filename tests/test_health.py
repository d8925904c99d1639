"""What a node finds doubtful about itself: limits, cores, leftovers, GPUs."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.conftest import ROOT
from trainer import process
from trainer.node import gpus, health
from trainer.node.identity import Identity
from trainer.node.prepare import own_trouble


def kinds(ranks: int, workers: int, tmp_path: Path, **environ: str) -> list[str]:
    return [text.split(":")[0] for text in health.warnings(ranks, workers, environ, tmp_path, tmp_path)]


def test_a_machine_that_has_enough(tmp_path: Path) -> None:
    assert kinds(1, 1, tmp_path) == [] and kinds(1, 0, tmp_path, OMP_NUM_THREADS="1") == []


def test_more_workers_than_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(health, "usable_cores", lambda: 8)
    assert kinds(2, 4, tmp_path) == [] and kinds(2, 5, tmp_path) == ["E10"]
    (text,) = health.warnings(2, 5, {}, tmp_path, tmp_path)
    assert text.startswith("E10: data.num_workers=5 for each of 2 ranks, and 8 usable cores; fix: data.num_workers=4")


def test_threads_that_the_user_has_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(health, "usable_cores", lambda: 8)
    assert kinds(4, 0, tmp_path, OMP_NUM_THREADS="2") == [] and kinds(4, 0, tmp_path, OMP_NUM_THREADS="8") == ["E12"]


def test_little_locked_memory_matters_only_beside_infiniband(tmp_path: Path) -> None:
    script = f"""
import pathlib, resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
from trainer.node import health
print(*health.warnings(1, 0, {{}}, pathlib.Path({str(tmp_path)!r}), pathlib.Path({str(tmp_path)!r})))
"""

    def told() -> str:
        return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert told() == "\n"
    (tmp_path / "uverbs0").touch()
    assert told().startswith("64 KiB of locked memory allowed, InfiniBand needs more; fix: ulimit -l unlimited")


def test_shared_memory_of_dead_processes(tmp_path: Path) -> None:
    dead, alive = tmp_path / "torch_1_2_3", tmp_path / "nccl-abc"
    dead.write_bytes(b"x" * (2 << 20))
    alive.write_bytes(b"x")
    (tmp_path / "somebody-elses").write_bytes(b"x")
    with alive.open("rb"):
        (text,) = health.warnings(1, 0, {}, tmp_path, tmp_path)
    assert text.startswith(f"E17: 2 MiB in 1 files of dead processes in {tmp_path} (torch_1_2_3); fix: ")


def test_the_file_limit_is_raised_as_far_as_it_may() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 2048)); from trainer.node import health;"
        "health.raise_file_limit(); print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "(2048, 2048)\n"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/job/step\n", {"job/cpu.max": "200000 100000", "job/step/cpu.max": "max 100000"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000"}, 1),
        ("3:cpu,cpuacct:/docker/abc\n", {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 3),
        ("1:cpu:/a\n0::/\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 64),
        ("0::/\n", {"cpu.max": "1000 100000"}, 1),
    ],
)
def test_cores_by_quota(own: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    assert process.usable_cores({}, tmp_path / "fs", tmp_path / "own") == cores
    assert process.usable_cores({"SLURM_CPUS_PER_TASK": "1"}, tmp_path / "fs", tmp_path / "own") == 1


@pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/cpu/cpu.cfs_period_us", os.W_OK) or os.getuid() != 0, reason="needs a writable cpu cgroup (v1)"
)
def test_cores_by_a_real_quota() -> None:
    group = Path("/sys/fs/cgroup/cpu") / f"ddp-job-kit-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("100000")
        script = f"open('{group}/tasks', 'w').write('0'); from trainer import process; print(process.usable_cores({{}}))"
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout == "1\n"
    finally:
        group.rmdir()


class Nvml(ModuleType):
    """A recording of NVIDIA's management library: what it would tell of GPUs that are not here."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, *models: str, **told: object) -> None:
        super().__init__("recorded_nvml")
        self.models, self.told = models, {"mode": 0, "ecc": 0, "rows": (0, 0, 0, 0), "processes": [], **told}
        self.shut = False

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None:
        self.shut = True

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.models)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.told.get("lost") == index:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return self.models[gpu]

    def nvmlDeviceGetComputeMode(self, gpu: int) -> object:
        return self.told["mode"]

    def nvmlDeviceGetRemappedRows(self, gpu: int) -> object:
        return self.told["rows"]

    def nvmlDeviceGetTotalEccErrors(self, gpu: int, kind: int, counter: int) -> object:
        if self.told["ecc"] is None:
            raise self.NVMLError("Not Supported")
        return self.told["ecc"]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> object:
        return self.told["processes"]


H100 = ("NVIDIA H100 80GB HBM3",) * 2


def look(monkeypatch: pytest.MonkeyPatch, library: Nvml, **environ: str) -> gpus.Gpus:
    monkeypatch.setitem(sys.modules, "recorded_nvml", library)
    found = gpus.look(environ, "recorded_nvml")
    assert found is not None and library.shut
    return found


def test_gpus_that_are_well(monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(monkeypatch, Nvml(*H100))
    assert found.traits == {"driver": "580.65.06", "GPUs": "2 x NVIDIA H100 80GB HBM3"}
    assert found.trouble is None and not found.warnings
    assert look(monkeypatch, Nvml(*H100, ecc=None)).warnings == [], "a GPU without error correction"
    assert len(look(monkeypatch, Nvml(*H100), CUDA_VISIBLE_DEVICES="1").models) == 1
    assert len(look(monkeypatch, Nvml(*H100), CUDA_VISIBLE_DEVICES="GPU-4f2a,GPU-77").models) == 2
    eight = Nvml(*H100 * 4)
    for given, count in {"": 0, "-1": 0, "NoDevFiles": 0, "0,-1,1": 1, "-1,0": 0, "0,0": 0, "9": 0, "7, 6": 2}.items():
        assert len(look(monkeypatch, eight, CUDA_VISIBLE_DEVICES=given).models) == count, given


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"mode": 2}, "GPU 0 is set to compute mode Prohibited"),
        ({"rows": (0, 1, 0, 1)}, "GPU 0 has memory that could not be remapped"),
        ({"lost": 1}, "GPU 1: GPU is lost"),
    ],
)
def test_a_gpu_that_cannot_be_used(told: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(monkeypatch, Nvml(*H100, **told))
    assert found.trouble == words
    node = Identity(2, 1, 2, "10.0.0.1", 23456, "PET_*")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.14.1", version=SimpleNamespace(cuda="13.0")))
    trouble = own_trouble(node, {}, "auto", 2, found, None)
    assert trouble and f"FAULT E18 host={node.host} node_rank=1: {words}; fix: drain this machine" in str(trouble)


def test_gpus_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Identity(2, 1, 2, "10.0.0.1", 23456, "PET_*")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.14.1", version=SimpleNamespace(cuda="13.0")))
    trouble = own_trouble(node, {}, "auto", 8, look(monkeypatch, Nvml(*H100)), None)
    assert trouble and ": resources.gpus_per_node=8, and 2 GPUs to be seen here; fix: give the node its GPUs" in str(trouble)
    assert own_trouble(node, {}, "auto", 8, None, None) is None, "nothing is known, nothing is wrong"
    assert gpus.look({}, "no_such_library") is None


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"ecc": 3}, "GPU 0 has 3 uncorrected memory errors since the driver was loaded"),
        ({"rows": (0, 1, 1, 0)}, "GPU 0 has memory that is to be remapped"),
        ({"processes": [SimpleNamespace(pid=4242)]}, "GPU 0 is in use by pid 4242"),
    ],
)
def test_a_gpu_that_is_doubtful(told: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(monkeypatch, Nvml(*H100, **told))
    assert found.trouble is None and len(found.warnings) == 2 and found.warnings[0].startswith(words)


def test_no_limit_of_open_files_is_no_small_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert kinds(1, 1, tmp_path) == []
