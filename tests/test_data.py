import functools
import http.server
import multiprocessing
import pickle
import tarfile
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import IterableDataset

from trainer.errors import ConfigError
from trainer.train import data
from trainer.train.batches import TensorImages
from trainer.train.download import once_per_node

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")


def test_the_digits_are_the_uci_digits() -> None:
    training, evaluation = data.digits()
    assert isinstance(training, TensorImages) and isinstance(evaluation, TensorImages)
    assert (len(training), len(evaluation)) == (1437, 360)
    labels = torch.cat([training.labels, evaluation.labels])
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # the set's own counts
    images, targets = training.batch(torch.arange(1437))
    assert images.shape == (1437, 1, 8, 8) and images.dtype == torch.float32 and targets.dtype == torch.int64
    assert abs(images.mean().item()) < 0.01 and abs(images.std().item() - 1) < 0.01
    assert torch.equal(training[7][0], images[7])


def test_fake_images_are_the_same_everywhere_and_end() -> None:
    training, evaluation = data.fake_images(samples=20, shape=(3, 4, 4), classes=5)
    assert evaluation is not None and len(evaluation) == 2
    assert torch.equal(training[3][0], training[3][0]) and not torch.equal(training[3][0], training[4][0])
    assert len(list(training)) == 20


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize("found", [None, [1], ([1, 2], None, None), (iter([]), None), (Stream(), None)])
def test_a_target_that_returns_something_else_is_refused(found: object) -> None:
    with pytest.raises(ConfigError, match="data.target=my:data"):
        data.split("my:data", found)


def test_torchvision_is_needed_only_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError("No module named 'torchvision'")

    monkeypatch.setattr(data.importlib, "import_module", missing)
    assert len(data.digits()[0]) == 1437
    with pytest.raises(ConfigError, match="needs torchvision"):
        data.cifar10("/nowhere")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def _cifar_archive(folder: Path) -> Path:
    """A real CIFAR-10 archive with ten images a file, for torchvision's own reader."""
    inside = folder / "cifar-10-batches-py"
    inside.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        content = {"data": numpy.zeros((10, 3072), dtype=numpy.uint8), "labels": list(range(10))}
        (inside / name).write_bytes(pickle.dumps(content))
    (inside / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    path = folder / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(inside, "cifar-10-batches-py")
    return path


def test_cifar10_is_downloaded_by_torchvision_into_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = _cifar_archive(folder / "source")
    kind = torchvision.datasets.CIFAR10
    handler = functools.partial(_Quiet, directory=str(archive.parent))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(kind, "url", f"http://127.0.0.1:{server.server_port}/{archive.name}")
    for name in ("train_list", "test_list"):
        monkeypatch.setattr(kind, name, [[file, None] for file, _ in getattr(kind, name)])
    monkeypatch.setattr(kind, "tgz_md5", None)
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": None})
    with pytest.raises(ConfigError, match="data.args.root=.*set data.args.download=true"):
        data.cifar10(str(folder / "data"), download=False)
    try:
        training, evaluation = data.cifar10(str(folder / "data"))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (len(training), len(evaluation)) == (50, 10)  # type: ignore[arg-type]
    assert training[0][0].shape == (3, 32, 32)
    assert not [p for p in (folder / "data").iterdir() if p.name.startswith(".")], "nothing temporary is left"


def test_image_folder_reads_the_imagenet_layout(folder: Path) -> None:
    from PIL import Image

    for part in ("train", "val"):
        for label in ("cat", "dog"):
            (folder / part / label).mkdir(parents=True)
            Image.new("RGB", (50, 40)).save(folder / part / label / "1.jpg")
    training, evaluation = data.image_folder(str(folder), image_size=32)
    assert len(training) == 2 and training[0][0].shape == (3, 32, 32) and evaluation[1][1] == 1  # type: ignore[index,arg-type]
    with pytest.raises(ConfigError, match="must hold train/CLASS"):
        data.image_folder(str(folder / "train"))


def _download(root: Path, count: Path) -> None:
    def fetch(staging: Path) -> None:
        with open(count, "a") as file:
            file.write("x")
        (staging / "part").write_text("half")
        time.sleep(0.5)
        (staging / "part").write_text("whole")

    once_per_node(root, "part", lambda: (root / "part").exists(), fetch)
    assert (root / "part").read_text() == "whole"


def test_one_process_downloads_and_the_others_wait(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_download, args=(folder / "data", folder / "count")) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (folder / "count").read_text() == "x"
    assert [p.name for p in (folder / "data").iterdir()] == ["part"]


def test_a_failed_download_leaves_nothing_and_may_be_tried_again(folder: Path) -> None:
    def broken(staging: Path) -> None:
        (staging / "part").write_text("half")
        raise OSError("cable pulled")

    with pytest.raises(OSError, match="cable pulled"):
        once_per_node(folder / "data", "part", lambda: (folder / "data" / "part").exists(), broken)
    assert list((folder / "data").iterdir()) == []
    _download(folder / "data", folder / "count")
