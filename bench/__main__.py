"""All of them in one go: a table of what was measured beside its bar, the same as JSON, and a picture.

python -m bench [--out runs/bench] [--only start,loop]      under fifteen minutes on two cores
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.interleave import Ratio


@dataclass(frozen=True)
class Bar:
    """A number that a bench tells, and what it has to be."""

    bench: str
    name: str  # as in its JSON
    words: str
    least: float | None = None
    most: float | None = None
    null: str = "null"  # the null test beside it; empty: it has no yardstick that varies


ARGUMENTS = {
    "start": ["--rounds", "3"],
    "loop": ["--rounds", "60"],
    "input": ["--rounds", "20"],
    "wire": ["--rounds", "5"],
    "scaling": ["--rounds", "3"],
    "checkpoint": ["--rounds", "3"],
}
BARS = [
    Bar("start", "kit 2 / bare 1", "first step of 2 ranks, to a bare process's", most=1.10),
    Bar("start", "kit 2 / torchrun 2", "first step of 2 ranks, to torchrun's", most=0.65),
    Bar("start", "kit 8 / torchrun 8", "first step of 8 ranks, to torchrun's", most=0.30),
    Bar("start", "kit 2 / torchrun 2, CPU", "CPU of the start of 2 ranks, to torchrun's", most=0.4, null="null, CPU"),
    Bar("start", "restart in place, s", "seconds from an error to the next first step", most=0.3, null=""),
    Bar("loop", "kit", "CPU of a step that is all overhead, one rank, to a bare DDP loop's", most=1.05),
    Bar("loop", "kit of 2", "such a step of one of two ranks", most=1.05),
    Bar("loop", "flat", "such a step with ddp.engine=flat, one rank", most=0.80),
    Bar("loop", "accelerate", "such a step of Accelerate's"),
    Bar("loop", "lightning", "such a step of Lightning's"),
    Bar("input", "gather_of_copy 32", "packed bytes of 32 x 32, to a copy of them", least=0.55, null="null of bytes 32"),
    Bar("input", "gather_of_copy 224", "packed bytes of 224 x 224, to a copy of them", least=0.55, null="null of bytes 224"),
    Bar(
        "input", "moved_of_copy 32", "cropped, flipped floats of 32 x 32, to a copy of them", least=0.3, null="null of floats 32"
    ),
    Bar(
        "input",
        "moved_of_copy 224",
        "cropped, flipped floats of 224 x 224, to a copy of them",
        least=0.3,
        null="null of floats 224",
    ),
    Bar("input", "moved_over_pil 32", "cropped, flipped floats of 32 x 32, to PIL's pipeline", least=25, null="null of PIL 32"),
    Bar("input", "decoded_over_pil", "JPEGs decoded in full, to PIL", null="null of decoded"),
    Bar("input", "size_224_over_pil", "JPEGs scaled and cut to 224 x 224, to PIL", least=2, null="null of size_224"),
    Bar("wire", "bf16_of_fp32", "step at 1 Gbit/s with ddp.compress=bf16, to fp32's", most=0.7, null="null_of_fp32"),
    Bar(
        "wire", "all_reduce_of_line_rate", "25 MB all-reduce at 1 Gbit/s, to the line rate", least=0.8, null="null of all_reduce"
    ),
    Bar("scaling", "speedup", "two ranks, to one", least=1.85),
    Bar("checkpoint", "stall_of_async_save", "stall of the loop by a save, to async_save's", most=0.4, null="null of async_save"),
    Bar(
        "checkpoint",
        "stall_of_torch.save",
        "stall of the loop by a save, to torch.save and fsync",
        most=1 / 12,
        null="null of torch.save",
    ),
    Bar("checkpoint", "durable_of_raw", "time to disk, to a plain write and fsync", most=1.5, null="null of raw"),
]


def measure(bench: str) -> dict[str, Ratio]:
    """What a bench tells; empty if it fails, which it says itself."""
    print(f"--- {bench}", flush=True)
    argv = [sys.executable, "-m", f"bench.{bench}", *ARGUMENTS[bench], "--json"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    lines = done.stdout.splitlines()
    print("\n".join(lines[:-1]), flush=True)
    told = dict(json.loads(lines[-1])) if done.returncode == 0 and lines else {}
    return {name: Ratio(*values) for name, values in told.items()}


def rows(found: dict[str, dict[str, Ratio]]) -> list[dict[str, Any]]:
    """Each bar with what was measured."""
    told = []
    for bar in BARS:
        if (value := found.get(bar.bench, {}).get(bar.name)) is not None:
            null = found[bar.bench][bar.null] if bar.null else None
            told.append({**asdict(bar), "value": value, "null": null, "verdict": verdict(bar, value.median)})
    return told


def verdict(bar: Bar, value: float) -> str:
    if bar.least is None and bar.most is None:
        return ""
    return "reached" if (bar.least or 0) <= value <= (bar.most or math.inf) else "missed"


def table(told: list[dict[str, Any]]) -> str:
    """As Markdown, for the README."""
    lines = ["| what | measured [quartiles] | its null test | bar | |", "|---|---|---|---|---|"]
    for row in told:
        bar = f">= {row['least']:.3g}" if row["least"] else f"<= {row['most']:.3g}" if row["most"] else "-"
        lines.append(f"| {row['words']} | {row['value']} | {row['null'] or '-'} | {bar} | {row['verdict']} |")
    return "\n".join(lines)


def picture(told: list[dict[str, Any]], file: Path) -> None:
    """How far each is from its bar: right of the line is better."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    told = [row for row in told if row["verdict"]]
    values = [row["value"].median for row in told]
    ahead = [value / row["least"] if row["least"] else row["most"] / value for row, value in zip(told, values, strict=True)]
    figure, axes = pyplot.subplots(figsize=(10, 0.4 * len(told) + 1.2))
    axes.barh(
        [row["words"] for row in told], ahead, color=["#4878a8" if row["verdict"] == "reached" else "#c06048" for row in told]
    )
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
    names = arguments.only.split(",")
    if unknown := set(names) - set(ARGUMENTS):
        parser.error(f"--only {','.join(sorted(unknown))}: no such bench; choose from {','.join(ARGUMENTS)}")
    since, found = time.monotonic(), {name: measure(name) for name in names}
    machine = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}"
    told = rows(found)
    print(f"\n{table(told)}\n\n{machine}; {(time.monotonic() - since) / 60:.0f} min")
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine, "time": round(time.time()), "bars": told, "all": found}
    (arguments.out / "bench.json").write_text(json.dumps(content, indent=1, default=asdict) + "\n", encoding="utf-8")
    with suppress(ModuleNotFoundError):  # without matplotlib there is no picture
        picture(told, arguments.out / "bench.png")
    print(f"in {arguments.out}: {', '.join(sorted(file.name for file in arguments.out.iterdir()))}")


if __name__ == "__main__":
    main()
