"""All of them in one go: a table of what was measured beside its bar, the same as JSON, and a picture.

python -m bench [--out runs/bench] [--only start,loop]      under fifteen minutes on two cores
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bar:
    """A number that a bench tells, and what it has to be."""

    bench: str
    name: str  # as in its JSON
    words: str
    least: float | None = None
    most: float | None = None


ARGUMENTS = {
    "start": ["--rounds", "3"],
    "loop": ["--rounds", "60"],
    "input": ["--rounds", "10"],
    "wire": ["--rounds", "5"],
    "scaling": ["--rounds", "3"],
    "checkpoint": ["--rounds", "3"],
}
BARS = [
    Bar("start", "kit 2 / bare 1", "first step of 2 ranks, to a bare process's", most=1.10),
    Bar("start", "kit 2 / torchrun 2", "first step of 2 ranks, to torchrun's", most=0.65),
    Bar("start", "kit 8 / torchrun 8", "first step of 8 ranks, to torchrun's", most=0.30),
    Bar("start", "kit 2 / torchrun 2, CPU", "CPU of that start, to torchrun's", most=0.4),
    Bar("start", "restart in place, s", "seconds from an error to the next first step", most=0.3),
    Bar("loop", "kit", "CPU of a step that is all overhead, to a bare DDP loop's, one rank", most=1.05),
    Bar("loop", "kit of 2", "the same for one of two ranks", most=1.05),
    Bar("loop", "flat", "one rank with ddp.engine=flat", most=0.80),
    Bar("input", "gather_of_copy", "packed bytes by CPU, to a copy of them", least=0.55),
    Bar("input", "moved_of_copy", "cropped, flipped floats by CPU, to a copy of them", least=0.3),
    Bar("input", "moved_over_pil", "the same, to PIL's pipeline", least=25),
    Bar("input", "decoded_over_pil", "JPEGs decoded by CPU, to PIL", least=2),
    Bar("wire", "bf16_of_fp32", "step at 1 Gbit/s with ddp.compress=bf16, to fp32's", most=0.7),
    Bar("wire", "all_reduce_of_line_rate", "25 MB all-reduce at 1 Gbit/s, to the line rate", least=0.8),
    Bar("scaling", "speedup", "two ranks, to one", least=1.85),
    Bar("checkpoint", "stall_of_async_save", "stall of the loop by a save, to torch's async_save", most=0.4),
    Bar("checkpoint", "stall_of_torch_save", "the same, to torch.save and fsync", most=1 / 12),
    Bar("checkpoint", "durable_of_raw", "time to disk, to a plain write and fsync", most=1.5),
]


def measure(bench: str) -> dict[str, float]:
    """What a bench tells; empty if it fails, which it says itself."""
    print(f"--- {bench}", flush=True)
    argv = [sys.executable, "-m", f"bench.{bench}", *ARGUMENTS[bench], "--json"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    lines = done.stdout.splitlines()
    print("\n".join(lines[:-1]), flush=True)
    return dict(json.loads(lines[-1])) if done.returncode == 0 and lines else {}


def rows(found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Each bar with what was measured."""
    told = []
    for bar in BARS:
        if (value := found.get(bar.bench, {}).get(bar.name)) is not None:
            reached = value >= bar.least if bar.least is not None else value <= (bar.most or 0)
            told.append({**asdict(bar), "value": value, "reached": reached})
    return told


def table(told: list[dict[str, Any]]) -> str:
    """As Markdown, for the README."""
    lines = ["| what | measured | bar | |", "|---|---|---|---|"]
    for row in told:
        bar = f">= {row['least']:.3g}" if row["least"] is not None else f"<= {row['most']:.3g}"
        lines.append(f"| {row['words']} | {row['value']:.3g} | {bar} | {'reached' if row['reached'] else 'missed'} |")
    return "\n".join(lines)


def picture(told: list[dict[str, Any]], file: Path) -> None:
    """How far each is from its bar: right of the line is better."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    ahead = [row["value"] / row["least"] if row["least"] is not None else row["most"] / row["value"] for row in told]
    figure, axes = pyplot.subplots(figsize=(10, 0.4 * len(told) + 1.2))
    axes.barh([row["words"] for row in told], ahead, color=["#4878a8" if row["reached"] else "#c06048" for row in told])
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("times better than its bar")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for bench.json and bench.png")
    parser.add_argument("--only", default=",".join(ARGUMENTS), help="benches, with commas between")
    arguments = parser.parse_args()
    since, found = time.monotonic(), {name: measure(name) for name in arguments.only.split(",")}
    machine = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}"
    told = rows(found)
    print(f"\n{table(told)}\n\n{machine}; {(time.monotonic() - since) / 60:.0f} min")
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine, "time": round(time.time()), "bars": told, "all": found}
    (arguments.out / "bench.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    with suppress(ModuleNotFoundError):  # without matplotlib there is no picture
        picture(told, arguments.out / "bench.png")
    print(f"in {arguments.out}: {', '.join(sorted(file.name for file in arguments.out.iterdir()))}")


if __name__ == "__main__":
    main()
