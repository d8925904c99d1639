"""From the command to the first optimizer step of the slowest rank: the kit, torchrun, and one bare process.

All start the same script (`first_step.py`), in turn. CPU is that of all processes together. A restart is measured from the error
of the first rank to the next first step of the slowest.

    python -m bench.start [--rounds 3] [--many 8] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.interleave import Ratio, as_json, each, free_port

SCRIPT = Path(__file__).with_name("first_step.py")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@dataclass(frozen=True)
class Start:
    """What one start took."""

    seconds: float  # until the slowest rank's first step
    cpu_seconds: float  # of all its processes, to their end


def bare(folder: Path, ranks: int) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, str(SCRIPT), str(folder)], {**ALONE, "MASTER_PORT": str(free_port())}


def torchrun(folder: Path, ranks: int) -> tuple[list[str], dict[str, str]]:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(SCRIPT), str(folder)]
    return [sys.executable, *words], {}


def kit(folder: Path, ranks: int, *more: str) -> tuple[list[str], dict[str, str]]:
    config = folder / "run.yaml"
    arguments = json.dumps([str(folder), *more])
    restarts = "watch: {max_restarts: 1}\n" if more else ""
    config.write_text(f"name: start\nentrypoint: {SCRIPT}\nentrypoint_args: {arguments}\nrun_dir: {folder}/run\n{restarts}")
    return [sys.executable, "-m", "trainer", "run", str(config), f"resources.ranks_per_node={ranks}"], {}


def start(argv: Sequence[str], environ: dict[str, str], folder: Path, ranks: int) -> Start:
    """Run a command to its end."""
    clean = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1]), **environ}
    clean.pop("PYTHONDONTWRITEBYTECODE", None)  # installed programs do not compile themselves at each start
    since = time.time()
    process = subprocess.Popen(argv, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, output
    return Start(last(folder, 0, ranks) - since, used.ru_utime + used.ru_stime)


def last(folder: Path, attempt: int, ranks: int) -> float:
    return max(float((folder / f"{attempt}-{rank}").read_text()) for rank in range(ranks))


def restart(ranks: int) -> float:
    """Seconds from an error to the next first step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start(*kit(folder, ranks, "fail"), folder, ranks)
        return last(folder, 1, ranks) - min(float(file.read_text()) for file in folder.glob("failed-*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--many", type=int, default=8, help="ranks of the larger start")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    ways = {"bare 1": (bare, 1), "null": (bare, 1), "kit 2": (kit, 2), "torchrun 2": (torchrun, 2)}
    ways |= {f"{name} {arguments.many}": (way, arguments.many) for name, way in (("kit", kit), ("torchrun", torchrun))}
    found: dict[str, list[Start]] = {name: [] for name in ways}
    restarts = []
    for _ in range(arguments.rounds):
        for name, (way, ranks) in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(start(*way(Path(folder), ranks), Path(folder), ranks))
        restarts.append(restart(2))
    seconds = {name: [one.seconds for one in starts] for name, starts in found.items()}
    cpu = {name: [one.cpu_seconds for one in starts] for name, starts in found.items()}
    for name in ways:
        print(f"{name:12} {median(seconds[name]):6.2f} s to the first step, {median(cpu[name]):6.2f} s of CPU")
    many = arguments.many
    told = {
        "kit 2 / bare 1": each(seconds["kit 2"], seconds["bare 1"]),
        "null": each(seconds["null"], seconds["bare 1"]),
        "null, CPU": each(cpu["null"], cpu["bare 1"]),
        "kit 2 / torchrun 2": each(seconds["kit 2"], seconds["torchrun 2"]),
        "kit 2 / torchrun 2, CPU": each(cpu["kit 2"], cpu["torchrun 2"]),
        f"kit {many} / torchrun {many}": each(seconds[f"kit {many}"], seconds[f"torchrun {many}"]),
        "restart in place, s": Ratio.of(restarts),
    }
    print("\n".join(f"{name}: {ratio}" for name, ratio in told.items()))
    if arguments.json:
        print(as_json(told))


if __name__ == "__main__":
    main()
