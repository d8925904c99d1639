"""Right answers, not just no error: the loop against the same mathematics written by hand."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.forked import on_ranks
from trainer.errors import ConfigError
from trainer.train.batches import GlobalOrder, Loading, TensorImages, batches
from trainer.train.distributed import World
from trainer.train.loop import Loop, StepOptions
from trainer.train.models import lenet, split_lenet
from trainer.train.optim import LearningRate, MovingAverage, Schedule
from trainer.train.parts import take_apart
from trainer.train.window import Window

CPU = torch.device("cpu")


def small_data(samples: int = 80) -> TensorImages:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (samples, 1, 8, 8), dtype=torch.uint8, generator=generator)
    return TensorImages(images, torch.arange(samples) % 10, 128.0, 64.0)


def make_loop(world: World, options: StepOptions | None = None, model: nn.Module | None = None, **arguments: object) -> Loop:
    torch.manual_seed(0)
    model = model or lenet(1, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rate = LearningRate(optimizer, Schedule(100, warmup_steps=5))
    return Loop(model, nn.CrossEntropyLoss(), optimizer, rate, world, options or StepOptions(), **arguments)  # type: ignore[arg-type]


def run_steps(loop: Loop, steps: int, batch_size: int = 16) -> None:
    order = GlobalOrder(80, batch_size, loop.options.accumulation, loop.world.rank, loop.world.world_size, seed=0)
    loading = batches(small_data(), order.micro_batches(loop.step, loop.step + steps), 0, Loading())
    for _ in range(steps):
        loop.take_step(loading)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(steps: int, batch_size: int = 16) -> torch.Tensor:
    """One process, whole batches, torch and nothing else."""
    torch.manual_seed(0)
    model, data = lenet(1, 8), small_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order, schedule = GlobalOrder(80, batch_size, 1, 0, 1, seed=0), Schedule(100, warmup_steps=5)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.05 * schedule.factor(step)
        images, labels = data.batch(order.global_batch(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return weights(model)


def test_one_process_does_what_is_written_by_hand() -> None:
    loop = make_loop(World())
    run_steps(loop, 20)
    assert torch.equal(weights(loop.bare), by_hand(20))


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 4), (2, 2), (4, 1), (2, 1)])
def test_ranks_and_accumulation_make_no_difference(world_size: int, accumulation: int) -> None:
    def train(world: World) -> torch.Tensor:
        loop = make_loop(world, StepOptions(accumulation=accumulation))
        run_steps(loop, 20)
        assert isinstance(loop.model, DistributedDataParallel) == (world_size > 1)  # alone, there is nobody to exchange with
        return weights(loop.bare)

    found = on_ranks(world_size, train)
    assert all(torch.equal(found[0], other) for other in found)
    assert (found[0] - by_hand(20)).abs().max() < 1e-6


def test_gradients_are_exchanged_in_the_last_micro_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(world: World) -> tuple[int, int]:
        loop = make_loop(world, StepOptions(accumulation=2))
        assert isinstance(loop.model, DistributedDataParallel)
        exchanged = [0]

        def hook(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            exchanged[0] += 1
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        loop.model.register_comm_hook(None, hook)
        run_steps(loop, 3)
        return exchanged[0], loop.step

    assert on_ranks(2, count) == [(3, 3)] * 2


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_counts_each_sample_once(world_size: int) -> None:
    """10 samples on 3 ranks: the accuracy is exactly k/10, and the loss is the mean over samples, not of the ranks' means."""

    def evaluate(world: World) -> dict[str, float]:
        return make_loop(world).evaluate(small_data(10), batch_size=3)

    torch.manual_seed(0)
    model, (images, labels) = lenet(1, 8), small_data(10).batch(torch.arange(10))
    hits = int((model(images).argmax(1) == labels).sum())
    expected = nn.functional.cross_entropy(model(images), labels).item()
    for values in on_ranks(world_size, evaluate):
        assert values["eval_samples"] == 10
        assert values["eval_accuracy"] == hits / 10
        assert values["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_more_ranks_than_samples_can_evaluate() -> None:
    values = on_ranks(3, lambda world: make_loop(world).evaluate(small_data(2), batch_size=4))
    assert [v["eval_samples"] for v in values] == [2, 2, 2]


def test_training_values_are_over_all_ranks_and_all_steps_since_the_last() -> None:
    def train(world: World) -> list[dict[str, float]]:
        loop = make_loop(world, StepOptions(accumulation=4 // world.world_size))
        found = []
        for steps in (3, 70):  # more than the window holds back
            run_steps(loop, steps)
            found.append(loop.training_values())
        return found

    alone, (first, second) = on_ranks(1, train)[0], on_ranks(2, train)
    assert first[0]["samples"] == 48 and first[1]["samples"] == 1120
    for a, b in zip(first, second, strict=True):
        assert a["loss"] == b["loss"] and a["accuracy"] == b["accuracy"]
    for a, b in zip(first, alone, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6) and a["accuracy"] == b["accuracy"]


def test_batchnorm_statistics_are_equal_before_evaluation_and_in_what_is_saved() -> None:
    """Each rank sees other data, so its running statistics differ; what is evaluated and saved is rank 0's."""

    def train(world: World) -> tuple[float, torch.Tensor, bool]:
        model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
        loop = make_loop(world, model=model)
        run_steps(loop, 4)
        before = model[1].running_mean.clone()
        value = loop.evaluate(small_data(10), 4)["eval_loss"]
        saved = loop.state()["model"]["1.running_mean"].clone()
        return value, saved, torch.equal(before, saved)

    (loss_0, saved_0, same_0), (loss_1, saved_1, same_1) = on_ranks(2, train)
    assert loss_0 == loss_1 and torch.equal(saved_0, saved_1)
    assert same_0 and not same_1, "the statistics did differ, or the test shows nothing"


def test_clipping_bounds_the_step() -> None:
    free, clipped = make_loop(World()), make_loop(World(), StepOptions(grad_clip_norm=1e-3))
    start = weights(free.bare).clone()
    for loop in (free, clipped):
        run_steps(loop, 1)
    moved = (weights(clipped.bare) - start).norm()
    assert moved <= 0.05 * 1e-3 * 1.01 < (weights(free.bare) - start).norm()


def test_bf16_computes_in_bf16_and_keeps_fp32_weights() -> None:
    loop = make_loop(World(), StepOptions(precision="bf16"))
    seen = []
    loop.bare.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.dtype))
    run_steps(loop, 3)
    assert set(seen) == {torch.bfloat16} and weights(loop.bare).dtype == torch.float32
    assert (weights(loop.bare) - by_hand(3)).abs().max() < 1e-2


def test_a_skipped_fp16_step_moves_neither_weights_nor_schedule() -> None:
    loop = make_loop(World(), StepOptions(precision="fp16"))
    run_steps(loop, 1)
    assert (loop.step, loop.updates) == (1, 1)
    before = weights(loop.bare).clone()
    loop.loss = lambda outputs, targets: outputs.sum() * float("inf")
    run_steps(loop, 1)
    assert (loop.step, loop.updates) == (2, 1) and torch.equal(weights(loop.bare), before)
    loop.loss = nn.CrossEntropyLoss()
    run_steps(loop, 1)
    assert (loop.step, loop.updates) == (3, 2) and loop.rate.current == 0.05 * Schedule(100, 5).factor(1)


def test_the_scaler_is_saved() -> None:
    loop = make_loop(World(), StepOptions(precision="fp16"))
    run_steps(loop, 1)
    loop.loss = lambda outputs, targets: outputs.sum() * float("inf")
    run_steps(loop, 1)
    state = {**copy.deepcopy(loop.state()), "step": 2, "ranks": [loop.own_state()]}
    other = make_loop(World(), StepOptions(precision="fp16"))
    other.load_state(state)
    assert other.state()["scaler"] == loop.state()["scaler"]
    assert other.state()["scaler"]["scale"] == 32768.0, "halved once from torch's 65536"


def test_ema_is_what_is_evaluated() -> None:
    loop = make_loop(World())
    loop.average = MovingAverage(loop.bare, decay=0.5)
    start = weights(loop.bare).clone()
    run_steps(loop, 1)
    moved = weights(loop.bare).clone()
    seen = []
    loop.bare.register_forward_pre_hook(lambda module, inputs: seen.append(weights(module)))
    loop.evaluate(small_data(10), 10)
    assert torch.allclose(seen[0], (start + moved) / 2, atol=1e-7)
    assert torch.equal(weights(loop.bare), moved), "training goes on with the plain weights"


def test_a_model_split_inside_a_rank_trains_as_the_whole_one() -> None:
    def train(world: World) -> torch.Tensor:
        world = World(world.rank, world.local_rank, world.world_size, world.local_world_size, (CPU, CPU), True)
        torch.manual_seed(0)
        loop = make_loop(world, model=split_lenet(world.devices, 1, 8))
        assert isinstance(loop.model, DistributedDataParallel) and loop.model.device_ids is None
        run_steps(loop, 5)
        return weights(loop.bare)

    assert (on_ranks(2, train)[0] - by_hand(5)).abs().max() < 1e-6


def test_channels_last_gives_the_same() -> None:
    loop = make_loop(World(), StepOptions(channels_last=True))
    loop.bare.to(memory_format=torch.channels_last)
    run_steps(loop, 5)
    assert (weights(loop.bare) - by_hand(5)).abs().max() < 1e-5


def test_a_checkpoint_of_another_model_is_refused() -> None:
    loop = make_loop(World())
    state = {**loop.state(), "step": 0, "ranks": [loop.own_state()]}
    with pytest.raises(ConfigError, match="the checkpoint is of another model"):
        make_loop(World(), model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10))).load_state(state)


def test_the_optimizers_settings_are_the_configs_not_the_checkpoints() -> None:
    loop = make_loop(World())
    run_steps(loop, 2)
    state = copy.deepcopy({**loop.state(), "step": 2, "ranks": [loop.own_state()]})
    other = make_loop(World())
    other.optimizer.param_groups[0].update(weight_decay=0.7, momentum=0.3)
    other.load_state(state)
    group = other.optimizer.param_groups[0]
    assert (group["weight_decay"], group["momentum"]) == (0.7, 0.3)
    assert all("momentum_buffer" in entry for entry in other.optimizer.state.values()), "the moments are the checkpoint's"


def test_a_checkpoint_of_another_optimizer_is_refused() -> None:
    loop = make_loop(World())
    state = {**loop.state(), "step": 0, "ranks": [loop.own_state()]}
    other = make_loop(World())
    other.optimizer = torch.optim.Adam(other.bare.parameters())
    with pytest.raises(ConfigError, match="the checkpoint is of another model or optimizer"):
        other.load_state(state)


@pytest.mark.parametrize("targets", [torch.rand(8, 1), torch.rand(8)])
def test_a_regression_has_no_accuracy(targets: torch.Tensor) -> None:
    window = Window(CPU)
    window.add(torch.tensor(0.5), torch.rand(8, 1), targets)
    assert "accuracy" not in window.close(World())


def test_the_state_at_another_world_size_keeps_the_open_window() -> None:
    def train(world: World) -> tuple[dict[str, object], dict[str, float]]:
        loop = make_loop(world)
        run_steps(loop, 3)
        own = world.gather(loop.own_state())
        state = {**loop.state(), "step": loop.step, "ranks": own}
        return copy.deepcopy(state), loop.training_values()

    state, values = on_ranks(2, train)[0]
    loop = make_loop(World())
    loop.load_state(state)
    found = loop.training_values()
    assert found["samples"] == 48 and found["loss"] == pytest.approx(values["loss"], abs=1e-9)


def test_a_state_stays_as_it_is_until_the_weights_change() -> None:
    """Also the statistics of a BatchNorm that the model has under two names."""
    shared = nn.BatchNorm2d(1)
    body = lenet(channels=1, image_size=8, classes=10)
    model = nn.Sequential()
    for name, part in (("first", shared), ("again", shared), ("body", body)):
        model.add_module(name, part)
    loop = make_loop(World(), model=model, average=MovingAverage(model, 0.9))
    run_steps(loop, 2)
    tensors, _ = take_apart(loop.state())
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    seen: list[list[str]] = []
    loop.before_update = lambda: seen.append([name for name, was in before.items() if not torch.equal(was, tensors[name])])
    run_steps(loop, 1)
    assert seen[0] == [] and any(not torch.equal(was, tensors[name]) for name, was in before.items())
