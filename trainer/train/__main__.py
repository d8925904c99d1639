"""The entry of a rank: reads the config, builds the parts, trains. The only module of this room that knows the config.

python -m trainer.train CONFIG [section.key=value ...]      one process
torchrun --nproc-per-node 2 -m trainer.train CONFIG         torch's own launcher, on one node or several
trainer run CONFIG                                          the kit's node process starts the ranks
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from trainer import targets
from trainer.config import Config, accumulation_steps
from trainer.errors import ERROR_FILE, ConfigError, ExitCode, FaultError, KitError, write_error_file
from trainer.process import leave_after
from trainer.pulse import PULSE, Phase, Pulse
from trainer.settings import dump_config, load_config, refuse_stopped
from trainer.train.agree import same_length
from trainer.train.batches import GlobalOrder, Loading, mix
from trainer.train.checkpoint import Checkpointer
from trainer.train.data import split
from trainer.train.distributed import World, joined
from trainer.train.exchange import ExchangeOptions
from trainer.train.loop import Loop, StepOptions
from trainer.train.optim import LearningRate, MovingAverage, Schedule, fused
from trainer.train.random_state import seed_all, set_random_state
from trainer.train.room import check_disk, check_shared_memory
from trainer.train.run import Cadence, Run
from trainer.train.stop import StopSignal
from trainer.train.timing import Trace
from trainer.train.utilisation import Utilisation
from trainer.train.weights import load

logger = logging.getLogger(__name__)

_UNWATCHED_SECONDS = 600.0  # under torchrun, unless watch.stall_seconds is set


def main(arguments: list[str]) -> int:
    """Train; returns the exit code of this rank."""
    try:
        # torch.distributed.launch still adds a flag for what LOCAL_RANK says
        config = load_config(*(a for a in arguments if not re.match(r"--local[-_]rank=", a)))
        gpus = config.resources.gpus_per_node if config.training.device == "auto" else 0
        with joined(gpus, _patience(config)) as world:
            _configure_logging(world)
            pulse = Pulse.of()
            pulse.enter(Phase.SETUP)
            code = train(config, world, pulse)
            pulse.enter(Phase.TEARDOWN)
        pulse.enter(Phase.DONE)
        return code
    except KitError as error:
        path = os.environ.get(ERROR_FILE)
        if path:
            write_error_file(path, error)
        if not (path and isinstance(error, FaultError)):  # the node process that reads it tells a fault
            for line in error.lines:
                print(line if isinstance(error, FaultError) else f"error: {line}", file=sys.stderr, flush=True)
        return error.exit_code


def train(config: Config, world: World, pulse: Pulse) -> int:
    """Train one run to its end, or to a stop signal; returns the exit code."""
    folder = Path(config.folder)
    end = config.resources.end_time(os.environ, time.time())
    refuse_stopped(config, world.from_rank_0(Path(config.stop_file).exists()))
    if world.rank == 0:
        _keep_config(config, folder)
    stop = StopSignal(world, Path(config.stop_file), end, lambda: saver.seconds)
    with stop, closing(_saver(config, world)) as saver:
        training, evaluation = _data(config)
        loading, micro = _loading(config, world), config.training.micro_batch_size
        check_shared_memory(training, micro or max(1, config.training.batch_size // world.world_size), loading, world)
        samples = len(training)  # type: ignore[arg-type]
        same_length(samples, config.data.target if config.data else "", world)
        order = _order(config, world, samples, loading.block_size)
        total = min(config.training.epochs * order.steps_per_epoch, config.training.max_steps or sys.maxsize)
        loop = _loop(config, world, order, total)
        loop.pulse = pulse
        _resume(config, loop, saver, order)
        if world.rank == 0 and (doubt := check_disk(saver.folder, loop.states, saver.keep_last)):
            logger.warning(f"warning: {doubt}")
        if world.rank == 0:
            _tell(config, world, order, loop, total)
        run = Run(world, order, total, loop, saver, training, evaluation, _cadence(config), loading)
        run.utilisation = Utilisation(world, config.training.precision, config.training.peak_tflops)
        traced = config.profile.start_step if world.rank in config.profile.ranks else None
        run.trace = Trace(traced, config.profile.steps, folder / "profile" / f"rank-{world.rank:04d}.json")
        code = ExitCode.STOPPED if run.go(stop, folder, config.training.tensorboard) else ExitCode.DONE
        stop.earned(code)
    return code


def _saver(config: Config, world: World) -> Checkpointer:
    options, run = config.checkpoint, Path(config.folder)
    local = options.local_folder or (str(run / "local") if options.folder else None)
    return Checkpointer(options.folder or run / "checkpoints", world, options.keep_last, options.on_failure == "continue", local)


def _patience(config: Config) -> float:
    """How many seconds one collective, or a loader worker, may take. A node process that watches is to speak first."""
    watch = config.watch
    if PULSE in os.environ:
        return 2 * watch.phase_seconds + (watch.stall_seconds or 0)
    return watch.stall_seconds or _UNWATCHED_SECONDS


def _data(config: Config) -> tuple[Dataset[Any], Dataset[Any] | None]:
    assert config.data
    return split(config.data.target, targets.call("data", config.data.target, config.data.args))


def _order(config: Config, world: World, samples: int, blocks: int) -> GlobalOrder:
    options = config.training
    try:
        accumulation = accumulation_steps(options.batch_size, options.micro_batch_size, world.world_size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return GlobalOrder(samples, options.batch_size, accumulation, world.rank, world.world_size, options.seed, blocks)


def _loop(config: Config, world: World, order: GlobalOrder, total: int) -> Loop:
    options = config.training
    seed_all(options.seed)  # the same weights on every rank
    model = _model(config, world)
    loss = targets.call("loss", config.loss.target, config.loss.args)
    optimizer = _optimizer(config, model)
    schedule = Schedule(total, config.schedule.warmup_steps, config.schedule.decay, config.schedule.final_fraction)
    reference = config.optimizer.scale_lr_from_batch_size
    rate = LearningRate(optimizer, schedule, options.batch_size / reference if reference else 1.0)
    assert config.model is not None
    skip, how = options.non_finite == "skip", (options.precision, options.grad_clip_norm, config.model.channels_last)
    step = StepOptions(order.accumulation, *how, skip)
    average = MovingAverage(model, options.ema_decay) if options.ema_decay is not None else None
    loop = Loop(model, loss, optimizer, rate, world, step, average, _exchange(config))
    seed_all(mix(options.seed, world.rank) % 2**32)  # from here on, dropout and the like differ between ranks
    return loop


def _optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    target, args = config.optimizer.target, config.optimizer.args
    scaled = config.training.precision == "fp16"  # by a scaler, which has its own way with such optimizers
    faster = {} if scaled else fused(targets.resolve("optimizer", target), args, model)
    optimizer: torch.optim.Optimizer = targets.call("optimizer", target, args, model.parameters(), **faster)
    return optimizer


def _exchange(config: Config) -> ExchangeOptions:
    assert config.model is not None
    ddp = config.ddp
    return ExchangeOptions(ddp.engine, ddp.compress, ddp.bucket_mb, ddp.static_graph, config.model.find_unused_parameters)


def _model(config: Config, world: World) -> nn.Module:
    assert config.model is not None
    target = config.model.target
    function = targets.resolve("model", target)
    own = "devices" in inspect.signature(function).parameters
    extra: dict[str, Any] = {"devices": list(world.devices)} if own else {}
    model: nn.Module = targets.call("model", target, config.model.args, **extra)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.target={target}: returned a {type(model).__name__}; it must return a torch.nn.Module")
    if config.model.weights:
        taken = load(model, Path(config.model.weights), config.model.weights_skip)
        if world.rank == 0:
            logger.info(f"starting from {taken} weights of {config.model.weights}")
    if not extra:
        model = model.to(world.device)
    if config.model.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if config.model.sync_batchnorm and world.grouped:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if config.training.compile:
        model.compile()  # in place, so that the names in its state stay the same
    return model


def _cadence(config: Config) -> Cadence:
    options = config.training
    every = (options.log_every_steps, options.evaluate_every_epochs, config.checkpoint.every_steps)
    return Cadence(*every, config.watch.checksum_every_steps)


def _loading(config: Config, world: World) -> Loading:
    data = config.data
    assert data is not None
    pin = data.pin_memory and world.device.type == "cuda"
    how = (data.num_workers, data.prefetch_factor, pin, data.multiprocessing_context)
    return Loading(*how, _patience(config), world.device, data.shuffle_block_size)


def _resume(config: Config, loop: Loop, saver: Checkpointer, order: GlobalOrder) -> None:
    state = saver.load(required=config.checkpoint.resume == "required")
    if state is None:
        return
    now = {"training.batch_size": order.batch_size, "training.seed": order.seed, "data: samples": order.samples}
    for name, value in {**now, "data.shuffle_block_size": order.block_size}.items():
        before = state.get(re.split(r"[.: ]+", name)[-1], 1)
        if before != value:
            raise ConfigError(
                f"{name}={value}: the checkpoint of step {state['step']} has {before} ({saver.folder}), "
                "and the order of the samples hangs on it; set it back or start a new run"
            )
    loop.load_state(state)
    ranks = state["ranks"]
    if len(ranks) == loop.world.world_size:  # at another world size the seeds of a fresh start stand
        set_random_state(ranks[loop.world.rank]["random"])


def _tell(config: Config, world: World, order: GlobalOrder, loop: Loop, total: int) -> None:
    size = sum(p.numel() for p in loop.bare.parameters())
    logger.info(
        f"{config.name}: {world.world_size} ranks on {world.device.type}, {config.training.precision}, {size:,} parameters, "
        f"batch {order.batch_size} = {world.world_size} ranks x {order.micro_batch_size} x {order.accumulation} accumulation"
    )
    logger.info(
        f"{order.samples} samples: {order.steps_per_epoch} steps an epoch, {order.samples % order.batch_size} samples left out "
        f"of each epoch, others each time; {total} steps in all"
    )


def _keep_config(config: Config, folder: Path) -> None:
    """The run folder tells its whole config, whoever started the ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.yaml").exists():
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")


def _configure_logging(world: World) -> None:
    level = logging.INFO if world.rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format=f"[{world.host} r{world.rank}] %(message)s", stream=sys.stderr, force=True)


if __name__ == "__main__":
    if PULSE not in os.environ:  # else what has forked this rank ends it
        leave_after(lambda: main(sys.argv[1:]))
    sys.exit(main(sys.argv[1:]))
