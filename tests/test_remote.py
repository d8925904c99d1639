"""Checkpoints at a URL: a real S3 server on loopback, and file:// for what every kind has in common."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tests.conftest import ROOT, wait_until
from tests.forked import free_port, on_ranks
from tests.jobs import SHORT, TRAINER, command, equal, losses, overrides, processes_of
from tests.test_checkpoint import Saver, in_writer, state
from trainer.errors import ConfigError, FaultError
from trainer.train.checkpoint import Checkpointer
from trainer.train.distributed import World
from trainer.train.listing import listing, whole_or_refused
from trainer.train.parts import read
from trainer.train.place import place_of
from trainer.train.remote import Bucket
from trainer.train.stored import MANIFEST, name_of
from trainer.train.weights import export


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An S3 server; returns the variables that lead to it."""
    port = free_port()
    environ = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    log = tmp_path_factory.mktemp("s3") / "log"
    with open(log, "wb") as file:
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
    try:

        def answers() -> bool:
            try:
                return bool(urllib.request.urlopen(environ["AWS_ENDPOINT_URL"], timeout=5).status)
            except OSError:
                return False

        assert wait_until(answers, 60), log.read_text()
        yield environ
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        return f"file://{folder}/objects/path"
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    files(f"s3://{bucket}").mkdir(bucket)
    return f"s3://{bucket}/path"


def files(url: str) -> Any:
    return fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)[0]


def at(url: str, step: int, ending: str) -> str:
    """The path of a file of a checkpoint."""
    (found,) = [path for path in files(url).find(f"{url}/{name_of(step)}") if path.endswith(ending)]
    return str(found)


def steps(url: str, folder: Path) -> list[int]:
    return sorted(row.step for row in place_of(url, folder / "looks").rows() if row.how == "whole")


def saver(url: str, folder: Path, world: World | None = None, **more: Any) -> Saver:
    return Saver(url, world or World(), local_folder=str(folder / "disk"), **more)


def save(url: str, folder: Path, *numbers: int, **more: Any) -> None:
    with closing(saver(url, folder, **more)) as checkpoints:
        for step in numbers:
            checkpoints.save(step, state(step), {"mine": step})


def load(url: str, folder: Path, **more: Any) -> dict[str, Any]:
    with closing(saver(url, folder, **more)) as checkpoints:
        found = checkpoints.load()
        assert found is not None
        return found


def test_what_is_saved_is_loaded_and_the_oldest_are_dropped(url: str, folder: Path) -> None:
    save(url, folder, 5, 10, 15, keep_last=2)
    assert steps(url, folder) == [10, 15]
    assert not [path for path in files(url).find(url) if name_of(5) in path], "nothing of it is left"
    found = load(url, folder)
    assert found["step"] == 15 and found["ranks"] == [{"mine": 15}]
    assert torch.equal(found["weights"], torch.full((1000,), 15.0))
    assert not list((folder / "disk").rglob("*.safetensors")), "no copies are left on this node"


@pytest.mark.parametrize("how", ["bit", "half", "gone", "manifest", "null"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(how: str, url: str, folder: Path, caplog: Any) -> None:
    save(url, folder, 5, 9)
    store = files(url)
    part, manifest = at(url, 9, ".safetensors"), at(url, 9, MANIFEST)
    content = bytearray(store.cat_file(part))
    if how == "bit":
        content[len(content) // 2] ^= 1
        store.pipe_file(part, bytes(content))
    elif how == "half":
        store.pipe_file(part, bytes(content[: len(content) // 2]))
    elif how == "gone":
        store.rm_file(part)
    else:
        store.pipe_file(manifest, store.cat_file(manifest)[:30] if how == "manifest" else b"null")
    assert load(url, folder)["step"] == 5
    assert "checkpoint of step 9 is damaged" in caplog.text and "4 steps are lost" in caplog.text
    assert [line.split()[4] for line in listing(url).splitlines()[1:]] == ["whole", "damaged"]
    save(url, folder, 9)
    assert load(url, folder)["step"] == 9


def test_a_start_is_refused_where_all_are_damaged(url: str, folder: Path) -> None:
    save(url, folder, 5, 9)
    for step in (5, 9):
        files(url).pipe_file(at(url, step, ".safetensors"), b"x")
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"^checkpoint.resume=auto: every checkpoint in .* is damaged \(steps 5, 9\); restore"
        ):
            load(url, folder)


def test_all_ranks_of_several_nodes_load_what_all_have_written(url: str, folder: Path) -> None:
    def train(world: World) -> tuple[int, list[int]]:
        node = replace(world, local_rank=world.rank % 2, local_world_size=2)
        with closing(Checkpointer(url, node, local_folder=str(folder / f"disk-{world.rank // 2}"))) as checkpoints:
            checkpoints.save(4, state(4), {"rank": world.rank})
            found = checkpoints.load()
            assert found is not None
            return found["step"], [own["rank"] for own in found["ranks"]]

    assert on_ranks(4, train) == [(4, [0, 1, 2, 3])] * 4


# In the writer: uploads of parts never end; what is written on this node does.
UPLOADS_HANG = """
import sys, time
sys.path.insert(0, ROOT)
from trainer.train.objects import Objects
Objects.write = lambda *given: (open(MARK, "w").close(), time.sleep(600))
"""


UPLOAD_OF_15_HANGS = """
import sys, time
sys.path.insert(0, {root!r})
from trainer.train.objects import Objects
real = Objects.write
Objects.write = lambda self, path, content: time.sleep(600) if "step-00000015" in path else real(self, path, content)
"""


@pytest.mark.parametrize("disk", [True, False])
def test_a_kill_within_an_upload_leaves_the_one_before(disk: bool, url: str, folder: Path, monkeypatch: Any) -> None:
    """The part is there, and no manifest. Where this node's disk is still there, the save is brought from it."""
    save(url, folder, 5)
    mark = folder / "uploaded"
    in_writer(folder, monkeypatch, UPLOADS_HANG.replace("ROOT", repr(str(ROOT))).replace("MARK", repr(str(mark))))
    code = (
        "import sys, time; from trainer.train.checkpoint import Checkpointer; from trainer.train.distributed import World; "
        "from tests.test_checkpoint import state; "
        "Checkpointer(sys.argv[1], World(), local_folder=sys.argv[2]).save(10, state(10), {'mine': 10}); time.sleep(600)"
    )
    environ = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    with subprocess.Popen([sys.executable, "-c", code, url, str(folder / "disk")], env=environ) as process:
        try:
            assert wait_until(mark.exists, 60)
        finally:
            process.send_signal(signal.SIGKILL)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (folder / "sitecustomize.py").unlink()
    assert "unfinished" in listing(url) and at(url, 10, ".safetensors")
    if not disk:
        (folder / "disk").rename(folder / "gone")
    assert load(url, folder)["step"] == (10 if disk else 5)
    assert "unfinished" not in listing(url)
    save(url, folder, 15)
    assert steps(url, folder) == ([5, 10, 15] if disk else [5, 15])


def test_an_upload_that_fails_is_told_and_what_is_on_the_disk_is_kept(url: str, folder: Path, monkeypatch: Any) -> None:
    save(url, folder, 5)
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom trainer.train.objects import Objects\n"
    in_writer(folder, monkeypatch, f"{code}def no(*given): raise RuntimeError('SlowDown')\nObjects.open = no")
    with (
        closing(saver(url, folder)) as checkpoints,
        pytest.raises(FaultError, match=r"step 10 could not be written to .*SlowDown"),
    ):
        checkpoints.save(10, state(10), {"mine": 10})
    (folder / "sitecustomize.py").unlink()
    assert load(url, folder)["step"] == 10


def test_parts_of_another_save_of_the_same_step_do_no_harm(url: str, folder: Path) -> None:
    place = place_of(url, folder / "looks")
    place.put(5, "older", 0, memoryview(b"of a writer that was cut off"))
    place.put(5, "older", 1, memoryview(b"and another"))
    save(url, folder, 5)
    assert load(url, folder)["weights"][0] == 5


def test_rows_and_the_newest_for_people(url: str, folder: Path) -> None:
    save(url, folder, 5, 9)
    place = place_of(url, folder / "looks")
    place.put(20, "m", 0, memoryview(b"under way"))
    assert [(row.step, row.how) for row in place.rows()] == [(20, "unfinished"), (9, "whole"), (5, "whole")]
    assert all(abs(row.saved - time.time()) < 3600 for row in place.rows())
    assert read(whole_or_refused(place, 5))["step"] == 5
    files(url).pipe_file(at(url, 9, ".safetensors"), bytes(files(url).size(at(url, 9, ".safetensors"))))
    assert read(whole_or_refused(place))["step"] == 5, "same size, other bytes: seen when it is fetched"
    with pytest.raises(ConfigError, match="no whole checkpoint of step 9 there"):
        whole_or_refused(place, 9)


def test_what_is_exported(url: str, folder: Path) -> None:
    with closing(saver(url, folder)) as checkpoints:
        checkpoints.save(5, {"model": {"a": torch.arange(3)}, "average": None}, {})
    chosen, count = export(url, folder / "m.pt")
    assert chosen.name == name_of(5) and count == 1
    assert torch.equal(torch.load(folder / "m.pt")["a"], torch.arange(3))


def test_a_service_that_does_not_answer_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match=r"run_dir: .*; start again when the storage answers"):
        load("s3://bucket/path", folder)
    with pytest.raises(ConfigError, match=r"^s3://bucket/path: cannot be read"):
        listing("s3://bucket/path")


@pytest.mark.parametrize("missing", ["fsspec", "s3fs"])
def test_a_missing_extra_is_one_line(missing: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] in (missing, "s3fs")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"^checkpoint.folder=s3://b/p: needs fsspec .*; pip install 'ddp-job-kit\[remote\]'$"):
        Bucket("s3://b/p", folder)


def test_the_writer_stays_without_torch() -> None:
    code = "import sys, trainer.train.writer, trainer.train.remote, s3fs; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_goes_on_from_s3_is_equal_to_the_bit(
    ranks: int, folder: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while the upload of step 15 is under way, and started again on a node that has a new disk."""
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    files(f"s3://{bucket}").mkdir(bucket)

    def words(name: str) -> list[str]:
        where = [f"checkpoint.folder=s3://{bucket}/{name}", overrides(folder / name)]
        return [*TRAINER, "run", *SHORT, "checkpoint.every_steps=5", f"resources.ranks_per_node={ranks}", *where]

    code, output = command(*words("whole"))
    assert code == 0, output
    url = f"s3://{bucket}/broken"
    (folder / "sitecustomize.py").write_text(UPLOAD_OF_15_HANGS.format(root=str(ROOT)))
    environ = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    with (folder / "output").open("wb") as file:
        process = subprocess.Popen(words("broken"), cwd=ROOT, env=environ, stdout=file, stderr=file, start_new_session=True)
        reached = wait_until(lambda: steps(url, folder) == [5, 10], 60)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert reached, (folder / "output").read_text()
    assert wait_until(lambda: not processes_of(folder / "broken"), 20)
    shutil.rmtree(folder / "broken" / "local", ignore_errors=True)
    code, output = command(*words("broken"))
    assert code == 0 and f"resuming at step 10 from {url}" in output, output
    pairs = [read(whole_or_refused(place_of(f"s3://{bucket}/{name}", folder / f"d-{name}"))) for name in ("whole", "broken")]
    assert pairs[1]["step"] == 20
    assert equal(pairs[0]["model"], pairs[1]["model"]) and losses(folder / "whole") == losses(folder / "broken")
    code, output = command(*TRAINER, "checkpoints", str(folder / "broken"))
    assert code == 0 and output.splitlines()[-1].endswith("whole"), output
    code, output = command(*TRAINER, "export", str(folder / "broken"), str(folder / "m.pt"))
    assert code == 0 and equal(torch.load(folder / "m.pt"), pairs[1]["model"]), output
