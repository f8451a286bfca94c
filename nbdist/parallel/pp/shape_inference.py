"""A batch goes through the stages of a pipeline one after the other, without a schedule.

So outputs without gradients are made, and so the first micro-batch of a new shape shows what
goes from stage to stage before torch's schedule, which must know it, runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import Node, get_gradient_edge

from nbdist.errors import NbdistError
from nbdist.parallel.base.tensors import digest
from nbdist.parallel.dp.fsdp import settle
from nbdist.parallel.pp import side_values
from nbdist.parallel.pp.outputs import find_loss, has_nan, only_loss, without_cache
from nbdist.parallel.pp.p2p_tensors import StageBoundary
from nbdist.parallel.pp.pytree import FlatValue, broadcast, pack, receive, send, unpack
from nbdist.parallel.pp.stage import EVERYWHERE, StageModule, Stages
from nbdist.parallel.sequence.kept import keep_attributes
from nbdist.parallel.sequence.same_inputs import different_inputs


@dataclass(frozen=True, slots=True)
class Route:
    """Which rank has which stage of a pipeline, seen from this one: rank `here` of the group."""

    group: dist.ProcessGroup
    here: int
    ranks: int
    stages: int
    device: torch.device

    def rank_of(self, stage: int) -> int:
        """Which rank of the group has a stage."""
        return stage % self.ranks


@dataclass(frozen=True, slots=True)
class Findings:
    """The facts that one micro-batch shows of all that have its shape.

    Attributes:
        borders: What goes in and out, of each stage of this rank.
        has_loss: Forward returns a loss; without one, all that it returns is an output.
        skeleton: What forward returns in training, without the loss or the outputs.
        shapes: Of the loss or the outputs.
        dtype: Of the loss; fp32 where the model's has fewer bits.
        moving: Buffers that a forward changes -> which rank of the group has them right.
        whole: Of each stage of this rank, the parameters because of which its backward cannot
            run in two halves; empty where not asked for.
    """

    borders: tuple[tuple[StageBoundary | None, StageBoundary | None], ...]
    has_loss: bool
    skeleton: bytes
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    moving: dict[str, int]
    whole: tuple[tuple[str, ...], ...]


@dataclass(slots=True)
class _Run:
    """The result of a batch in this rank's stages.

    Attributes:
        ends: What went in and out, of each stage that has run.
        failed: The first stage that has failed, as far as this rank has heard.
        whole: As in `Findings`.
    """

    ends: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    error: Exception | None = None
    failed: NbdistError | None = None
    whole: list[tuple[str, ...]] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Report:
    """One rank's report of the first run to the others; the last one's has what `Findings` says."""

    failed: NbdistError | None
    digest: str
    output: tuple[bool, bytes, tuple[torch.Size, ...], torch.dtype] | None
    changed: tuple[str, ...]
    side: side_values.SideValues


@dataclass(frozen=True, slots=True)
class _Trial:
    """A trial of the user's model: this rank's stages with one micro-batch."""

    root: Stages
    batch: FlatValue
    route: Route
    base: torch.nn.Module


def failure_of(stage: int, error: Exception) -> NbdistError:
    """An error of this rank's model, as the other ranks raise it."""
    return NbdistError(
        f"pipeline stage {stage}, on rank {dist.get_rank()}, failed, so this rank's step was "
        f"cancelled too: {type(error).__name__}: {error}"
    )


def evaluate(root: Stages, batch: FlatValue, route: Route) -> Any:
    """Return the result of the model's forward on every rank. Collective: a pipeline's ranks.

    Raises:
        NbdistError: A stage has failed; where it did, its own error instead.
    """
    run = _run_through(root, batch, route)
    last = route.rank_of(route.stages - 1)
    value: Any = None
    if route.here == last:
        value = run.failed or without_cache(run.ends[-1][1])
    value = broadcast(value, last, route.group, route.device)
    if isinstance(value, NbdistError):
        raise run.error or value
    return value


def infer(
    root: Stages,
    batch: FlatValue,
    route: Route,
    base: torch.nn.Module,
    *,
    is_halved: bool = False,
) -> Findings:
    """Run a micro-batch and see. Collective: the ranks of a pipeline. Leaves no trace.

    With `is_halved` also find out whether backwards can run in two halves. `base` is the user's
    model.

    Raises:
        NbdistError: As `evaluate`; ranks were given different batches; or the model uses what its
            stage does not have.
    """
    with (
        torch.no_grad(),
        _without_trace(route.device, base) as find_changed,
        side_values.noting(base, _parts(root)) as find_side_values,
    ):
        run = _run_through(root, batch, route, is_checked=True, is_halved=is_halved)
        names, side = tuple(find_changed()), find_side_values()
    output = None
    if not run.failed and route.here == route.rank_of(route.stages - 1):
        value = run.ends[-1][1]
        packed = pack(value)
        dtypes = (tensor.dtype for tensor in packed.tensors)
        dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        shapes = tuple(tensor.shape for tensor in packed.tensors)
        output = find_loss(value) is not None, packed.skeleton, shapes, dtype
    own_batch = digest(leaf for leaf in batch.leaves if isinstance(leaf, torch.Tensor))
    report = _Report(run.failed, own_batch, output, names, side)
    reports: list[Any] = [None] * route.ranks
    dist.all_gather_object(reports, report, group=route.group)
    elsewhere = {k: v for r in reports if r is not reports[route.here] for k, v in r.side.items()}
    if run.error is not None:
        _tell_missing(run.error, elsewhere)
        raise run.error
    _check(reports, dist.get_process_group_ranks(route.group))
    if any(each.side for each in reports):
        _refuse_side_values(_Trial(root, batch, route, base), run, elsewhere)
    has_loss, skeleton, shapes, dtype = next(r.output for r in reports if r.output is not None)
    borders = tuple(
        (
            None if part.is_first else StageBoundary.of(received),
            None if part.is_last else StageBoundary.of(result),
        )
        for part, (received, result) in zip(_parts(root), run.ends, strict=True)
    )
    # A buffer that the first rank changes is used before the blocks, and others' may have NaN.
    by_importance = (*range(len(reports))[::-1], 0)
    moving = {name: here for here in by_importance for name in reports[here].changed}
    return Findings(borders, has_loss, skeleton, shapes, dtype, moving, tuple(run.whole))


def _parts(root: Stages) -> Sequence[StageModule]:
    return tuple(root.parts)  # type: ignore[arg-type]


def _run_through(
    root: Stages,
    batch: FlatValue,
    route: Route,
    *,
    is_checked: bool = False,
    is_halved: bool = False,
) -> _Run:
    """Run this rank's stages, between receiving and sending. A failure is passed on as well.

    Checked, what stages use and do not have is refused.
    """
    run = _Run()
    for part in _parts(root):
        received: Any = None
        if not part.is_first:
            source = route.rank_of(part.index - 1)
            received = receive(source, route.group, route.device)
        result = received
        if not isinstance(received, NbdistError):
            try:
                result = _result(root, part, batch, received, is_checked=is_checked)
                # torch does not split the first stage's backward.
                is_split = is_halved and not part.is_first
                run.whole.append(_unsplit(root, part, batch, received) if is_split else ())
            except Exception as error:  # noqa: BLE001  # the model's code raises what it likes
                run.error, result = error, failure_of(part.index, error)
        if isinstance(result, NbdistError):
            run.failed = run.failed or result
        run.ends.append((received, result))
        if not part.is_last:
            send(result, route.rank_of(part.index + 1), route.group, route.device)
    settle(root)
    return run


def _result(
    root: Stages, part: StageModule, batch: FlatValue, received: Any, *, is_checked: bool
) -> Any:
    arguments = () if part.is_first else (received,)
    result = root(*arguments, batch=batch, part=part)
    if part.is_last and is_checked:
        result = only_loss(result)
    # Raises, while the others can still be told, where something cannot be sent.
    assert pack(result).tensors is not None
    if is_checked:
        _check_result(part, batch, received, result)
    return result


def _unsplit(root: Stages, part: StageModule, batch: FlatValue, received: Any) -> tuple[str, ...]:
    """The parameters because of which a stage's backward cannot run in two halves."""
    packed = pack(received)
    leaves = [
        tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        for tensor in packed.tensors
    ]
    with torch.enable_grad():
        result = root(unpack(packed.skeleton, leaves), batch=batch, part=part)
        loss = find_loss(result) if part.is_last else None
        outputs = pack(result).tensors if loss is None else (loss,)
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    return tuple(_params_with_shared_grad(outputs, inputs, dict(part.tree.named_parameters())))


def _check_result(part: StageModule, batch: FlatValue, received: Any, result: Any) -> None:
    if not has_nan(result) or has_nan(received):
        return
    wrong = part.find_wrong_guess(batch, received)
    if wrong == part.blocks.block_name(0):
        raise NbdistError(
            f"forward uses what blocks before {part.blocks.block_name(part.span[0])} return for "
            f"more than the next block's input; stage {part.index} of the pipeline knows only what "
            "the last block before its own returned. Let blocks pass on all that is needed (a "
            "block may return a tuple), or use another strategy than pp"
        )
    if wrong:
        raise NbdistError(
            f"forward uses {wrong} on stage {part.index} of the pipeline, which does not hold it: "
            "embeddings are on the first stage, the head is on the last. Before "
            f"accelerator.prepare say model.{EVERYWHERE} = [{wrong.rpartition('.')[0]!r}]: every "
            "stage holds it then"
        )


def _check(reports: Sequence[_Report], ranks: Sequence[int]) -> None:
    failed = next((report.failed for report in reports if report.failed is not None), None)
    if failed is not None:
        raise failed
    if len({report.digest for report in reports}) > 1:
        raise different_inputs(ranks)


def _tell_missing(error: Exception, elsewhere: side_values.SideValues) -> None:
    """Raise in words of our own where forward asks for what another stage's blocks keep."""
    asked = error.name if isinstance(error, AttributeError) else ""
    names = sorted(name for name in elsewhere if asked and name.endswith(f".{asked}"))
    if names:
        raise side_values.refusal(names) from error


def _refuse_side_values(trial: _Trial, run: _Run, elsewhere: side_values.SideValues) -> None:
    """Raise, on every rank, if a stage's result depends on what other stages' blocks keep."""
    names: set[str] = set()
    for part, (received, result) in zip(_parts(trial.root), run.ends, strict=True):
        if part.is_first or not _uses(trial, part, received, elsewhere) or has_nan(result):
            continue
        for values in side_values.by_attribute(elsewhere):
            names |= {*values} if _uses(trial, part, received, values) else set()
    settle(trial.root)
    everywhere: list[set[str]] = [set()] * trial.route.ranks
    dist.all_gather_object(everywhere, names, group=trial.route.group)
    if names := set().union(*everywhere):
        raise side_values.refusal(sorted(names))


def _uses(trial: _Trial, part: StageModule, received: Any, values: side_values.SideValues) -> bool:
    """Whether a stage's result depends on these values, which are not made on its rank."""
    device = trial.route.device
    with (
        torch.no_grad(),
        _without_trace(device, trial.base),
        side_values.unknown(trial.base, part, values, device),
    ):
        try:
            result = trial.root(received, batch=trial.batch, part=part)
        except Exception:  # noqa: BLE001  # the model's code may refuse NaN in words of its own
            return True
        return has_nan(only_loss(result) if part.is_last else result)


@contextmanager
def _without_trace(device: torch.device, base: torch.nn.Module) -> Iterator[Any]:
    """Put random numbers, buffers and attributes back. Yields what says which buffers changed."""
    buffers = {name: buffer for name, buffer in base.named_buffers() if not buffer.is_meta}
    put_back = keep_attributes(base)
    copies = {name: buffer.clone() for name, buffer in buffers.items()}

    def find_changed() -> Iterator[str]:
        # NaN is not equal to itself, and here it is a change.
        return (name for name, buffer in buffers.items() if not torch.equal(buffer, copies[name]))

    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        try:
            yield find_changed
        finally:
            put_back()
            for name, buffer in buffers.items():
                buffer.copy_(copies[name])


def _params_with_shared_grad(
    outputs: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
) -> list[str]:
    """The parameters whose gradient has several sources, by name. This rank alone.

    The zero bubble schedule puts the second halves of backwards, gradients of weights, where a
    rank would wait. torch runs one backward for each group of parameters and frees what it has
    gone through; a parameter whose gradient has several sources among the results of the inputs
    takes away what another one's needs.
    """
    users = _users(tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None)
    on_the_way: set[Any] = set()
    for leaf in inputs:
        on_the_way |= _above(_leaf(leaf), users, set())
    return [
        name
        for name, parameter in parameters.items()
        if parameter.requires_grad
        and len(_above(_leaf(parameter), users, on_the_way) & on_the_way) > 1
    ]


def _leaf(tensor: torch.Tensor) -> Any:
    return get_gradient_edge(tensor).node


def _users(roots: Iterable[Node]) -> dict[Any, list[Any]]:
    """Each node of the graph -> the nodes that have used its result."""
    users: dict[Any, list[Any]] = defaultdict(list)
    todo: list[Any] = list(roots)
    visited = set(todo)
    while todo:
        node = todo.pop()
        for source, _ in node.next_functions:
            if source is None:
                continue
            users[source].append(node)
            if source not in visited:
                visited.add(source)
                todo.append(source)
    return users


def _above(node: Any, users: Mapping[Any, list[Any]], ends: set[Any]) -> set[Any]:
    """List the nodes that depend on a node; nothing beyond the ends."""
    dependents: set[Any] = set()
    todo = [node]
    while todo:
        for user in users.get(todo.pop(), ()):
            if user not in dependents:
                dependents.add(user)
                if user not in ends:
                    todo.append(user)
    return dependents
