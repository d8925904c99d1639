"""The command `trainer`. Each command loads its own room only, so that the login side starts fast and needs no torch."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from importlib import metadata
from pathlib import Path

from trainer import __version__, options, reference, settings, table
from trainer.config import Config
from trainer.errors import ConfigError, ExitCode, KitError
from trainer.launch import explain as explanations
from trainer.launch import job as jobs
from trainer.launch import plan as plans
from trainer.launch import run as runs

_INTERRUPTED = 130  # what a shell says of Ctrl-C


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code. The one place where errors become `error: ...` lines."""
    try:
        _refuse_foreign_trainer()
        arguments = _parse(argv)
        return int(arguments.function(arguments) or 0)
    except KitError as error:
        for line in error.lines:
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `trainer logs | head`; what runs a job never lets it come up here
        sys.stderr.close()
        return ExitCode.DONE
    except KeyboardInterrupt:
        return _INTERRUPTED


def check(arguments: argparse.Namespace) -> None:
    """Read and check a config; send nothing."""
    config = _load(arguments)
    resources = config.resources
    where = f"{resources.gpus_per_node} GPUs" if resources.gpus_per_node else "CPU"
    print(f"ok: {config.name} on {config.backend}: {resources.nodes} nodes x {resources.ranks} ranks, {where} on each node")


def render(arguments: argparse.Namespace) -> None:
    """Print what submit would send, and send nothing."""
    print(jobs.plan(_submission(arguments)).text(), end="")


def submit(arguments: argparse.Namespace) -> None:
    """Send a run to its backend and return."""
    submission = _submission(arguments)
    job = jobs.send(submission)
    shown = _short(job.folder)
    print(f"submitted {submission.config.name} to {submission.config.backend}{job.number}: {shown}")
    for task, changed in zip(job.tasks, jobs.variants(arguments.array), strict=True):
        print(f"  {_short(task.folder)}: {' '.join(changed)}")
    print(f"follow with: trainer logs --follow {_short(job.tasks[0].folder) if job.tasks else shown}")
    print(f"then: trainer status {shown}   or: trainer cancel {shown}")


def run(arguments: argparse.Namespace) -> int:
    """Run here and now, in this terminal."""
    config = _load(arguments)
    if config.backend != "local":
        config = config.model_copy(update={"backend": "local"})
        settings.check(config)
    run_dir = plans.new_run_dir(config, make=True)
    print(f"run folder: {_short(Path(run_dir))}", file=sys.stderr)
    return int(runs.backend("local").run_here(config, run_dir))


def node(arguments: argparse.Namespace) -> int:
    """Be one node of a job: what runs on every node, everywhere."""
    return int(importlib.import_module("trainer.node.__main__").main(arguments.config))


def rollcall(arguments: argparse.Namespace) -> int:
    """Hold only the roll call on the nodes of a run, and print who is there and what differs."""
    words = ["rollcall.only=true"]
    if not any(word.startswith("rollcall.probe=") for word in arguments.config):
        words.append("rollcall.probe=full")
    if "PET_NNODES" in os.environ or "SLURM_STEP_ID" in os.environ:  # one of the nodes, as under srun
        arguments.config += words
        return node(arguments)
    job = jobs.submit(_load(arguments, *words))
    print(f"roll call{job.number}: {_short(job.folder)}", file=sys.stderr)
    code = ExitCode.DONE
    try:
        job.wait()
    except jobs.JobFailedError as error:
        print(*error.lines, sep="\n", file=sys.stderr)
        ends = [each for each in job.run.events() if each["event"] == "node_end" and each["time"] >= job.run.job["submitted"]]
        code = ExitCode(ends[0]["exit_code"]) if ends else error.exit_code
    except KeyboardInterrupt:
        print(job.cancel(), file=sys.stderr)
        raise
    kept = job.folder / "rollcall.json"
    if kept.exists() and kept.stat().st_mtime >= job.run.job["submitted"]:  # not that of an earlier start in the folder
        text = kept.read_text(encoding="utf-8")
        print(text if arguments.json else table.table(json.loads(text), sys.stdout.isatty()))
    return code


def status(arguments: argparse.Namespace) -> None:
    """Say how a run stands."""
    found = jobs.Job.of(arguments.run)
    for job in [found, *found.tasks]:
        now = job.status()
        print(f"{_short(job.folder)}: {now.state}: {now.detail}")


def logs(arguments: argparse.Namespace) -> None:
    """Print a run's logs."""
    job = jobs.Job.of(arguments.run)
    for line in job.logs(arguments.follow, None if arguments.rank == "all" else int(arguments.rank)):
        print(line, flush=True)
    if arguments.follow:
        status(arguments)


def explain(arguments: argparse.Namespace) -> None:
    """Say why a run ended: the verdict, where each rank was, and the stacks of those that hung."""
    print(explanations.explain(jobs.Job.of(arguments.run).run))


def cancel(arguments: argparse.Namespace) -> None:
    """Ask a run to save and stop."""
    print(jobs.Job.of(arguments.run).cancel(arguments.now))


def checkpoints(arguments: argparse.Namespace) -> None:
    """List a run's checkpoints: step, time, size, and whether each is whole, damaged or unfinished."""
    listing = importlib.import_module("trainer.train.listing")
    print(listing.listing(runs.checkpoints_of(arguments.run)))


def export(arguments: argparse.Namespace) -> None:
    """Write a run's weights for use elsewhere: a plain state dict, as .safetensors or by torch.save."""
    weights = importlib.import_module("trainer.train.weights")
    chosen, count = weights.export(
        runs.checkpoints_of(arguments.run), Path(arguments.out), arguments.step, not arguments.no_average
    )
    print(f"{arguments.out}: {count} tensors of {_short(chosen)}")


def lint(arguments: argparse.Namespace) -> int:
    """Look for what breaks distributed training in Kubernetes manifests of your own."""
    found = importlib.import_module("trainer.launch.lint").lint([Path(file) for file in arguments.files])
    for line in found:
        print(line)
    return ExitCode.CONFIG if found else ExitCode.DONE


def schema(arguments: argparse.Namespace) -> None:
    """Print the config's JSON Schema."""
    print(reference.schema())


def settings_table(arguments: argparse.Namespace) -> None:
    """Print every setting with its type, default and meaning."""
    print(reference.settings_table())


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """argparse takes the config in one piece; here options may stand between its parts."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if any(word.startswith("-") for word in rest) or (rest and "config" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.config += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trainer", description="Multi-node PyTorch jobs from one YAML file.")
    parser.add_argument("--version", action="version", version=f"ddp-job-kit {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for function in (run, submit, check, render, node, rollcall):
        name = function.__name__
        command = commands.add_parser(name, help=function.__doc__)
        command.add_argument("config", nargs="+", help="YAML files, merged in order, and section.key=value overrides")
        command.set_defaults(function=function)
        if name in ("submit", "render"):
            options.add_queue_options(command)
        if name == "rollcall":
            command.add_argument("--json", action="store_true", help="all that the nodes told, as JSON")
    for name, function in {"status": status, "logs": logs, "explain": explain, "cancel": cancel}.items():
        command = commands.add_parser(name, help=function.__doc__)
        command.add_argument("run", nargs="?", help="run folder or its name under runs/ (default: the newest)")
        command.set_defaults(function=function)
        if name == "logs":
            command.add_argument("--follow", "-f", action="store_true", help="go on until the run ends")
            command.add_argument("--rank", default="0", type=options.rank, help="global rank, or all (default: 0)")
        if name == "cancel":
            command.add_argument("--now", action="store_true", help="kill it; the last checkpoint stands")
    command = commands.add_parser("checkpoints", help=checkpoints.__doc__)
    command.add_argument("run", nargs="?", help="run folder or its name under runs/ (default: the newest)")
    command.set_defaults(function=checkpoints)
    command = commands.add_parser("export", help=export.__doc__)
    command.add_argument("run", help="run folder or its name under runs/")
    command.add_argument("out", help="file to write: .safetensors, or any other name for torch.save")
    command.add_argument("--step", type=int, help="of the checkpoint (default: the newest whole one)")
    command.add_argument("--no-average", action="store_true", help="the weights themselves where the run kept a moving average")
    command.set_defaults(function=export)
    options.add_pack(commands)
    command = commands.add_parser("lint", help=lint.__doc__)
    command.add_argument("files", nargs="+", help="manifests, read together")
    command.set_defaults(function=lint)
    for name, function in {"schema": schema, "settings": settings_table}.items():
        commands.add_parser(name, help=function.__doc__).set_defaults(function=function)
    return parser


def _submission(arguments: argparse.Namespace) -> plans.Submission:
    configs = [_load(arguments, *changed) for changed in jobs.variants(arguments.array) or [[]]]
    after = jobs.Job.of(arguments.after).run if arguments.after else None
    return plans.Submission(configs, bool(arguments.array), after, arguments.simulate_preemption_after)


def _load(arguments: argparse.Namespace, *overrides: str) -> Config:
    config = settings.load_config(*arguments.config, *overrides)
    settings.check(config)
    for path in (Path(each) for each in arguments.config if not settings.is_override(each)):
        if (path.parent / "job.json").is_file() and config.run_dir and Path(config.run_dir).resolve() != path.parent.resolve():
            raise ConfigError(
                f"run_dir={config.run_dir}: {path} lies in another run's folder now; give run_dir={path.parent} to go on there"
            )
    return config


def _short(folder: Path) -> str:
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def _refuse_foreign_trainer() -> None:
    """Another distribution on PyPI imports as `trainer` too: in one environment the two overwrite each other's files."""
    try:
        version = metadata.version("trainer")
    except metadata.PackageNotFoundError:
        return
    raise ConfigError(
        f"trainer {version} from PyPI is installed in this environment and also imports as `trainer`; use an environment of its "
        "own for ddp-job-kit, or: pip uninstall trainer && pip install --force-reinstall --no-deps ddp-job-kit"
    )
