"""How a run learns: its schedule, its loop, and how gradients get from rank to rank."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.placement import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section


class Schedule(Section):
    """The learning rate over the run, by optimizer steps."""

    warmup_steps: NonNegativeInt = 0
    """Steps in which the rate rises linearly to its full value."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """How it falls from there to the end of the run."""
    final_fraction: Fraction = 0.0
    """The rate at the end, as a fraction of the full one."""


class Training(Section):
    """The loop."""

    epochs: PositiveInt = 1
    """Passes over the training data."""
    max_steps: PositiveInt | None = None
    """End after this many optimizer steps, even in mid-epoch; the schedule ends there too."""
    batch_size: PositiveInt = 64
    """Samples of one optimizer step over all ranks: global, and never rewritten."""
    micro_batch_size: PositiveInt | None = None
    """Samples of one rank in one forward; null: batch_size / ranks. Accumulation steps follow from it."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the GPUs that resources.gpus_per_node asks for; cpu: the CPU even so."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of the forward pass (autocast); fp16 brings a gradient scaler."""
    grad_clip_norm: PositiveFloat | None = None
    """Clip the gradient's global norm."""
    compile: bool = False
    """torch.compile the model."""
    ema_decay: Fraction | None = None
    """Evaluate, and also save, an exponential moving average of the weights."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of weights, order and augmentation."""
    log_every_steps: PositiveInt = 50
    """Write metrics every so many optimizer steps."""
    evaluate_every_epochs: PositiveInt = 1
    """Evaluate after every so many epochs, and at the end."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What a step does whose loss or gradients are not finite: end the run, or be left out on all ranks (10 in a row end it)."""
    peak_tflops: PositiveFloat | None = None
    """TFLOP/s of one of a rank's devices at this precision, for `mfu` in metrics.jsonl; null: known of many NVIDIA GPUs."""
    tensorboard: bool = False
    """Write TensorBoard events beside metrics.jsonl."""


class Profile(Section):
    """A trace of some steps by torch's profiler: RUN/profile/rank-0000.json, for chrome://tracing or Perfetto."""

    start_step: NonNegativeInt | None = None
    """Optimizer steps done before the first one in it; null: no trace."""
    steps: PositiveInt = 3
    """Steps in it."""
    ranks: list[NonNegativeInt] = [0]
    """Ranks that write one."""


class Ddp(Section):
    """The exchange of gradients between ranks."""

    engine: Literal["ddp", "flat"] = "ddp"
    """ddp: torch's, in buckets behind the backward pass; flat: one buffer and one all-reduce, for small models."""
    compress: Literal["none", "bf16", "fp16"] = "none"
    """Send gradients as another type: half the bytes, for slow networks."""
    bucket_mb: PositiveFloat = 25
    """Size of ddp's buckets."""
    static_graph: bool = False
    """Tell ddp that all steps use the same parameters in the same order."""
