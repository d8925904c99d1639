"""The compose backend: N nodes in containers on this machine, by docker-compose.yml with the run's config, image and folders."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import yaml

from trainer.config import Config
from trainer.errors import ConfigError
from trainer.image import pinned
from trainer.launch.plan import KIT, Command, Plan, Submission, keep, locked, new_run_dir, resolved, write_plan
from trainer.launch.run import Run, Status
from trainer.process import started_at

TEMPLATE = "docker-compose.yml"
_NODE = "node0"  # the template's service that all nodes are made from
# Follows the containers to their end, then removes them: their output is in the log, their results in the run's folder.
_FOLLOW = '"$@" up --no-build --no-color --abort-on-container-failure; code=$?; "$@" down; exit $code'


def plan(submission: Submission, run_dir: str) -> Plan:
    """What `submit` starts: pure, nothing is touched.

    Raises:
        ConfigError: something was asked for that needs a queue.
    """
    submission.refuse_queue()
    config = submission.config
    services = {f"node{rank}": _service(config, run_dir, rank) for rank in range(config.resources.nodes)}
    text = yaml.safe_dump({"name": _project(config, run_dir), "services": services, "networks": {"nodes": {}}}, sort_keys=False)
    files = {"config.yaml": resolved(config, run_dir), TEMPLATE: text}
    return Plan("compose", run_dir, files, [Command(["sh", "-c", _FOLLOW, "sh", *_compose(run_dir)])])


def submit(submission: Submission) -> Run:
    """Start the containers in the background.

    Raises:
        ConfigError: no docker compose here, no such image, or the run folder's containers still run.
    """
    submission.refuse_queue()
    image = _image(submission.config)
    _docker("version", "--format", "{{.Server.Version}}")
    _docker("compose", "version")
    try:
        _docker("image", "inspect", "--format", "{{.Id}}", image)
    except ConfigError:
        raise ConfigError(f"container.image={image}: is not on this machine; build it with make image, or pull it") from None
    run_dir = new_run_dir(submission.config, make=True)
    with locked(submission, run_dir):
        made = plan(submission, run_dir)
        run = write_plan(made)
        (command,) = made.commands
        with open(run.folder / "logs" / "compose.log", "ab") as log:
            follower = subprocess.Popen(command.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        follower.returncode = 0  # it goes on without us
        keep(run, made, {"nodes": submission.config.resources.nodes, "pid": follower.pid, "started": started_at(follower.pid)})
    return run


def status(run: Run) -> Status:
    """How the run stands: running while its containers do, afterwards by what the nodes wrote."""
    job = run.job
    containers = _containers(run)
    if containers or started_at(job["pid"]) == job["started"]:
        return Status("running", f"{len(containers)} of {job['nodes']} containers run")
    return run.outcome("the run")


def cancel(run: Run, now: bool = False) -> str:
    """Ask the nodes to save and stop, or kill their containers; returns a line for the user."""
    if not _containers(run):
        return "not running"
    _docker(*_compose(str(run.folder))[1:], "kill", "--signal", "KILL" if now else "TERM")
    nodes = f"{run.job['nodes']} nodes"
    return f"killed {nodes}" if now else f"asked {nodes} to save and stop; see trainer status {run.folder}"


def _service(config: Config, run_dir: str, rank: int) -> dict[str, Any]:
    """The template's node as node `rank` of this run."""
    template = yaml.safe_load((KIT / TEMPLATE).read_text(encoding="utf-8"))
    service: dict[str, Any] = copy.deepcopy(template["services"][_NODE])
    del service["build"]
    environ = {**service["environment"], **config.container.env}
    environ.update(
        PET_NODE_RANK=str(rank), PET_NNODES=str(config.resources.nodes), PET_NPROC_PER_NODE=str(config.resources.ranks)
    )
    if "OMP_NUM_THREADS" not in config.container.env:  # all nodes share this machine's cores
        environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // config.world_size))
    service.update(
        image=_image(config),
        hostname=f"node{rank}",
        command=[config.container.python, "-m", "trainer", "node", f"{run_dir}/config.yaml"],
        user=f"{os.getuid()}:{os.getgid()}",
        working_dir=os.getcwd(),
        environment=environ,
        volumes=_mounts(config, run_dir),
    )
    resources = config.resources
    if resources.cpus_per_node:
        service["cpus"] = resources.cpus_per_node
    if resources.memory_gb_per_node:
        service["mem_limit"] = f"{max(1, int(resources.memory_gb_per_node * 1024))}m"
    if gpus := resources.gpus_per_node:
        service["ulimits"] |= {"memlock": -1, "stack": 67108864}
        devices = {"driver": "nvidia", "device_ids": [str(gpus * rank + i) for i in range(gpus)], "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [devices]}}}
    return {key: _literal(value) for key, value in service.items()}


def _mounts(config: Config, run_dir: str) -> list[dict[str, Any]]:
    """The folder of submission, the run's folder unless it lies in there, and what container.mounts adds."""
    here = os.getcwd()
    folders = [(here, here, False)] + ([] if Path(run_dir).is_relative_to(here) else [(run_dir, run_dir, False)])
    for mount in config.container.mounts:
        source, target, *how = mount.split(":")
        folders.append((source, target, how == ["ro"]))
    return [
        {"type": "bind", "source": source, "target": target, "read_only": read_only, "bind": {"create_host_path": False}}
        for source, target, read_only in folders
    ]


def _literal(value: Any) -> Any:
    """A value in which compose sees no variables; the template's own `${NAME:-default}` were replaced, or are its defaults."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, dict):
        return {key: _literal(part) for key, part in value.items()}
    return [_literal(part) for part in value] if isinstance(value, list) else value


def _image(config: Config) -> str:
    return config.container.image or pinned().built


def _project(config: Config, run_dir: str) -> str:
    """compose's name for the run: of the job's and the folder's, in the letters that it allows."""
    return f"{re.sub('[^a-z0-9_-]', '-', config.name.lower()).lstrip('-_')}-{zlib.crc32(run_dir.encode()):08x}"


def _compose(run_dir: str) -> list[str]:
    return ["docker", "compose", "--file", f"{run_dir}/{TEMPLATE}"]


def _containers(run: Run) -> list[str]:
    """The ids of the run's containers that have not ended."""
    return _docker(*_compose(str(run.folder))[1:], "ps", "--quiet").split()


def _docker(*argv: str) -> str:
    if shutil.which("docker") is None:
        raise ConfigError("backend=compose: no docker on PATH; install Docker with its compose plugin, or set backend=local")
    done = subprocess.run(["docker", *argv], capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().splitlines() or ["failed without a word"]
        raise ConfigError(f"docker {argv[0]}: {why[-1]}; see that Docker runs, with the compose plugin, and that you may use it")
    return done.stdout
