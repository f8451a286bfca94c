"""The memory of one rank under a strategy: its model built by the real steps, one step run."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nbdist.errors import OptionError
from nbdist.parallel.base.mesh import build_mesh
from nbdist.parallel.base.transform import ModelBuild
from nbdist.parallel.dp import fsdp
from nbdist.parallel.live import build
from nbdist.parallel.live.build import Built
from nbdist.parallel.live.training_step import loss_of
from nbdist.planner.fake import models
from nbdist.planner.fake.models import MetaModel
from nbdist.planner.fake.optimizers import stepped_bytes
from nbdist.planner.fake.process_group import CannotRun, fake_world
from nbdist.planner.fake.storage_counter import StorageCounter, resizes_seen
from nbdist.planner.fake_protocol import NAME, FakeAnswer, FakeRequest, Source
from nbdist.planner.memory import OVERHEAD_BYTES, Memory, has_buckets
from nbdist.planner.workload import Workload
from nbdist.strategy import footprint
from nbdist.strategy.choice import Strategy, steps_of
from nbdist.strategy.tensor_layout import local_shape, owners

# The part of each parameter and buffer that a rank holds; None for no part.
Shapes = dict[str, tuple[int, ...] | None]

_CPU = torch.device("cpu")
# What cannot be run without values or processes -> why. States are counted all the same.
_NOT_RUN = {
    "pipeline": "a pipeline's stages wait for each other",
    "cp": "a split sequence is compared with the whole one by value",
    "ep": "where tokens travel depends on values",
    "deepspeed": "DeepSpeed has its own process groups",
}


def answer(request: FakeRequest, source: Source) -> FakeAnswer:
    """Count one case; a failure is reported, not raised."""
    try:
        with fake_world(request.choice.world_size):
            return _counted(request.choice, request.load, source)
    except OptionError as error:
        return FakeAnswer(refused=str(error))
    except CannotRun as error:
        return FakeAnswer(problem=str(error))
    except Exception as error:  # noqa: BLE001  # any reason makes the formulas count instead
        return FakeAnswer(problem=_phrase(error))


def _counted(choice: Strategy, load: Workload, source: Source) -> FakeAnswer:
    _check(choice, load)
    subject = models.build_meta_model(source, load)
    job = ModelBuild(subject.model, choice, build_mesh(choice, "cpu"), _CPU)
    built = build.plan(job)
    states = _states(built, subject, load)
    try:
        return FakeAnswer(_run(built, subject, load, states))
    except CannotRun as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001  # a model that looks at values, for example
        problem = _phrase(error)
    buckets = states.gradients if has_buckets(choice) else 0.0
    part = replace(states, buffers=states.buffers + buckets, is_partial=True)
    return FakeAnswer(part, problem=problem)


def _phrase(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    said = f": {lines[0][:200]}" if lines else ""
    return f"the run failed with {type(error).__name__}{said}"


def _check(choice: Strategy, load: Workload) -> None:
    if choice.options.offload:
        raise CannotRun("offloaded states are in the host's memory")
    stored = footprint.recipe_of(choice)
    if load.recipe not in {"", "bf16"} and footprint.RECIPES[load.recipe] != stored:
        raise CannotRun(f"nbdist does not store the recipe {load.recipe} under {choice.name}")
    if "deepspeed" in steps_of(choice):
        raise CannotRun(_NOT_RUN["deepspeed"])


@dataclass(frozen=True, slots=True)
class _Share:
    """The memory that one rank holds.

    Attributes:
        parameters, trained: Bytes of all, and of those that have gradients.
        stepped: Shapes and types of what its optimizer steps.
    """

    parameters: int
    trained: int
    buffers: int
    stepped: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def total(self) -> int:
        """To find the rank that holds most: as with Adam."""
        stepped = sum(math.prod(shape) for shape, _ in self.stepped)
        return self.parameters + self.trained + 8 * stepped


def _states(built: Built, subject: MetaModel, load: Workload) -> Memory:
    """Parameters, gradients and optimizer of the rank that holds most, by the layouts."""
    choice, pp = built.job.choice, built.job.mesh.degrees.pp
    # Of each stage the first rank holds most, as torch.chunk has it; of zero1 nobody knows which.
    ranks = [stage * (choice.world_size // pp) for stage in range(pp)]
    if "zero1" in steps_of(choice):
        ranks = list(range(choice.world_size))
    shares = [_share(built, rank) for rank in ranks]
    most = max(shares, key=lambda share: share.total)
    state, step = stepped_bytes(most.stepped, subject.optimizer, load, choice)
    return Memory(
        parameters=most.parameters,
        gradients=most.trained,
        optimizer=state,
        activations=0,
        buffers=most.buffers,
        step=step,
        overhead=OVERHEAD_BYTES if load.has_gpu else 0.0,
        engine=NAME,
    )


def _share(built: Built, rank: int) -> _Share:
    degrees, tensors = built.job.mesh.degrees, build.tensors_of(built.job.base)
    owner_of = (
        owners(
            {name: built.layouts[name] for name in built.parameter_names},
            built.job.choice.world_size,
        )
        if "zero1" in steps_of(built.job.choice)
        else {}
    )
    shapes: Shapes = {n: local_shape(layout, degrees, rank) for n, layout in built.layouts.items()}
    if "fsdp1" in steps_of(built.job.choice):
        shapes |= _flat(built, shapes)
    sharded = {name: shape for name, shape in shapes.items() if shape is not None}
    trained = [
        name for name in built.parameter_names if name in sharded and tensors[name].requires_grad
    ]

    def size(names: Iterable[str]) -> int:
        return sum(math.prod(sharded[name]) * tensors[name].element_size() for name in names)

    return _Share(
        parameters=size(name for name in sharded if name in set(built.parameter_names)),
        trained=size(trained),
        buffers=size(name for name in sharded if name not in set(built.parameter_names)),
        stepped=tuple(
            (sharded[name], tensors[name].dtype)
            for name in trained
            if owner_of.get(name, rank) == rank and 0 not in sharded[name]
        ),
    )


def _flat(built: Built, shapes: Shapes) -> Shapes:
    """FSDP1 splits what a unit holds as one row: an equal part of each, the rest with the last."""
    names = {id(t): n for n, t in build.tensors_of(built.job.base).items() if n in shapes}
    result: Shapes = {}
    for unit in (*fsdp.units_of(built.job), built.job.base):
        inside = [names[id(p)] for p in unit.parameters() if id(p) in names]
        sizes = {name: math.prod(shapes[name] or (0,)) for name in inside if name not in result}
        part = -(-sum(sizes.values()) // built.job.mesh.degrees.dp_shard)
        for name, size in sizes.items():
            share = min(part, size)
            result[name], part = (share,), part - share
    return result


def _run(built: Built, subject: MetaModel, load: Workload, states: Memory) -> Memory:
    """A step, after one that makes what stays; the optimizer's is counted apart."""
    choice = built.job.choice
    for step in steps_of(choice):
        if step in _NOT_RUN:
            raise CannotRun(_NOT_RUN[step])
    if choice.options.is_compiled:
        raise CannotRun("what torch.compile does to a model is not known in advance")
    if subject.inputs is None:
        raise CannotRun("its inputs are not known: name a variable with --inputs")
    counter = StorageCounter()
    with resizes_seen(counter), contextlib.ExitStack() as stack:
        fake = FakeTensorMode()
        outer = _built(built, fake, counter)
        stack.enter_context(fake)
        stack.enter_context(counter)
        args, kwargs = subject.inputs()
        activation_bytes = 0
        for _ in range(2):
            built.job.base.zero_grad()
            base = counter.live_bytes
            counter.begin()
            activation_bytes = _step(outer, built, args, kwargs, counter) - base
        if not counter.peak_bytes:
            raise CannotRun("the model computes nothing")
        # DDP holds a copy of each gradient in its buckets; a fake group has no reducer.
        buckets = states.gradients if has_buckets(choice) else 0.0
        return replace(
            states,
            activations=max(0, activation_bytes),
            buffers=states.buffers + counter.gathered_peak_bytes + buckets,
            most=counter.peak_bytes + buckets,
        )


def _built(built: Built, fake: FakeTensorMode, counter: StorageCounter) -> torch.nn.Module:
    """The model under its strategy, of fake tensors; DDP's reducer is C++ and takes none."""
    tensors = build.tensors_of(built.job.base)
    degrees = built.job.mesh.degrees
    built.steps = tuple(
        step
        for name, step in zip(steps_of(built.job.choice), built.steps, strict=True)
        if name != "ddp"
    )
    with fake, counter:
        local = {
            name: torch.empty(shape, dtype=tensors[name].dtype)
            for name, layout in built.layouts.items()
            if (shape := local_shape(layout, degrees, 0)) is not None
        }
    # A mesh cannot be made, or cut, inside of the mode; FSDP1 flattens and splits in `wrap`.
    if "fsdp1" not in steps_of(built.job.choice):
        return build.commit(built, local)
    with fake, counter:
        return build.commit(built, local)


def _step(
    outer: torch.nn.Module, built: Built, args: Any, kwargs: Any, counter: StorageCounter
) -> int:
    """Forward and backward, as often as they are accumulated.

    Returns:
        Live bytes at the first forward's end, without what FSDP has gathered.
    """
    activation_bytes = 0
    times = built.job.choice.options.accumulate
    no_sync = getattr(outer, "no_sync", None) or functools.partial(fsdp.no_sync, built.job.root)
    for number in range(times):
        with no_sync() if number < times - 1 else contextlib.nullcontext():
            loss = _loss_of(outer(*args, **kwargs))
            activation_bytes = activation_bytes or counter.live_bytes - counter.gathered_bytes
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            del loss
    return activation_bytes


def _loss_of(output: Any) -> torch.Tensor:
    try:
        return loss_of(output)
    except OptionError as error:
        raise CannotRun("its output has no tensor to start backward from") from error
