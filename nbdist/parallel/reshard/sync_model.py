"""Make replicated models equal on all ranks: values, optimizers, schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from nbdist.core.ranks import rank_label
from nbdist.errors import NbdistError
from nbdist.parallel.live import live_models


@dataclass(frozen=True, slots=True)
class _Sketch:
    """The facts that have to be equal on two ranks before values are sent.

    Attributes:
        parts: Each parameter and buffer, each optimizer, its parameters and schedulers, under
            the names that a message gives them.
        ranks: Global ranks among which it is replicated.
    """

    parts: dict[str, Any]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Offer:
    """One rank's models, which of them no variable holds, and whether it replaces a dead rank."""

    sketches: dict[str, _Sketch]
    sharded: tuple[str, ...]
    unnamed: frozenset[str]
    is_new: bool


def sync_model(source: int) -> list[str]:
    """Send a rank's DDP models to all others and return their names, and what was left out.

    Collective: every rank, with the same source. Parameters, buffers, the state and settings of
    their optimizers, and their schedulers. Models are paired by name. Gradients are
    cleared. Nothing is changed on any rank when an error is raised. A model that no variable
    holds may be a leftover, such as a failed cell's: it is left out where it does not fit.

    Raises:
        NbdistError: There is no DDP model on the source, or a rank's model of that name is
            missing or has other tensors or optimizers; says which.
    """
    models = {model.name: model for model in live_models.find()}
    offer = _Offer(
        {name: _sketch(model) for name, model in models.items() if not model.is_sharded},
        tuple(name for name, model in models.items() if model.is_sharded),
        frozenset(name for name, model in models.items() if not model.is_named),
        live_models.is_catching_up(),
    )
    offers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(offers, offer)
    left_out = _refuse(offers, source)
    is_anyone_new = any(offer.is_new for offer in offers)
    rank = dist.get_rank()
    sketches = {n: sketch for n, sketch in offers[source].sketches.items() if n not in left_out}
    for name, sketch in sketches.items():
        if rank in sketch.ranks:
            _send(models[name], source, is_rebuilt=is_anyone_new)
    live_models.catching_up(False)
    return [
        *sketches,
        *(f"{n} left out, because no variable holds it: {why}" for n, why in left_out.items()),
    ]


def _sketch(model: live_models.NamedModel) -> _Sketch:
    ddp: Any = model.module
    names = {id(p): name for name, p in ddp.named_parameters()}
    parts: dict[str, Any] = {n: f"{t.dtype} {list(t.shape)}" for n, t in _tensors(model)}
    for name, optimizer in live_models.optimizers(model):
        groups = [[names.get(id(p), "?") for p in g["params"]] for g in optimizer.param_groups]
        sizes = "+".join(str(len(group)) for group in groups)
        schedulers = tuple(type(s).__name__ for s in live_models.schedulers(optimizer))
        parts[f"optimizer {name}"] = f"{type(optimizer).__name__} of {sizes} parameters"
        parts[f"parameters of optimizer {name}"] = tuple(map(tuple, groups))
        parts[f"schedulers of optimizer {name}"] = schedulers
    return _Sketch(parts, tuple(dist.get_process_group_ranks(ddp.process_group)))


def _refuse(offers: list[_Offer], source: int) -> dict[str, str]:
    """Raise the same error on every rank when something does not fit; what is left out, and why."""
    if not offers[source].sketches:
        sharded = offers[source].sharded
        raise NbdistError(
            f"rank {source} has no DDP model to send"
            + (
                f"; {', '.join(sharded)} is sharded (FSDP): each rank holds another part, and the "
                "part of a rank that has ended is lost. Load a checkpoint."
                if sharded
                else ". Name the rank that has one: %dist_sync_model --from R."
            )
        )
    problems = []
    left_out = {}
    for name, sketch in offers[source].sketches.items():
        differences = []
        if source not in sketch.ranks:
            differences.append(f"rank {source} is not in {name}'s process group")
        for rank in sketch.ranks:
            problem = _difference(name, sketch, offers[rank].sketches.get(name))
            if problem:
                differences.append(f"rank {rank}: {problem}")
        if differences and name in offers[source].unnamed:
            left_out[name] = differences[0]
        else:
            problems += differences
    if problems or len(left_out) == len(offers[source].sketches):
        problems = problems or list(left_out.values())
        raise NbdistError(
            f"The models differ from rank {source}'s; nothing was sent: {'; '.join(problems[:5])}. "
            "Create the model and its optimizer on that rank first, under the same names."
        )
    return left_out


def _difference(name: str, ours: _Sketch, theirs: _Sketch | None) -> str:
    """Word the difference that keeps a rank's model from another's values; "" for none."""
    if theirs is None:
        return f"no DDP model named {name}"
    if ours.ranks != theirs.ranks:
        return f"{name} is in a group of ranks {rank_label(theirs.ranks)}"
    mine, other = ours.parts, theirs.parts
    for key in dict.fromkeys((*mine, *other)):
        if mine.get(key) != other.get(key):
            return f"{name}: {key} is {other.get(key, 'missing')}, not {mine.get(key, 'missing')}"
    return ""


def _send(model: live_models.NamedModel, source: int, *, is_rebuilt: bool) -> None:
    """Send one model's values from the source. Collective: the ranks of the model's group."""
    ddp: Any = model.module
    with torch.no_grad():
        for _, tensor in _tensors(model):
            dist.broadcast(tensor.detach(), source, group=ddp.process_group)
    for _, optimizer in live_models.optimizers(model):
        _send_optimizer(optimizer, source, ddp.process_group)
    for parameter in model.module.parameters():
        parameter.grad = None
    if is_rebuilt:
        live_models.rebuild_reducer(ddp)


def _send_optimizer(optimizer: Optimizer, source: int, group: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    is_source = dist.get_rank() == source
    plan: list[Any] = [None]
    if is_source:
        plan = [
            (
                [_outline(optimizer.state.get(p, {})) for p in parameters],
                [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
                [scheduler.state_dict() for scheduler in live_models.schedulers(optimizer)],
            )
        ]
    dist.broadcast_object_list(plan, source, group=group)
    outlines, settings, schedulers = plan[0]
    for parameter, outline in zip(parameters, outlines, strict=True):
        _send_state(optimizer.state, parameter, outline, source, group)
    if is_source:
        return
    for local_group, source_group in zip(optimizer.param_groups, settings, strict=True):
        local_group.update(source_group)
    for scheduler, state in zip(live_models.schedulers(optimizer), schedulers, strict=True):
        scheduler.load_state_dict(state)


def _outline(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's optimizer state with each tensor replaced by how it is laid out."""
    return {
        key: _Layout(value.dtype, tuple(value.shape), value.device.type)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in state.items()
    }


@dataclass(frozen=True, slots=True)
class _Layout:
    """A tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str


def _send_state(
    states: Any, parameter: torch.Tensor, outline: dict[str, Any], source: int, group: Any
) -> None:
    """Send one parameter's optimizer state; on the source it stays the same objects."""
    if dist.get_rank() == source:
        for key, value in outline.items():
            if isinstance(value, _Layout):
                dist.broadcast(_to_group_device(states[parameter][key], group), source, group=group)
        return
    received = {}
    for key, value in outline.items():
        received[key] = value
        if isinstance(value, _Layout):
            device = parameter.device if value.device != "cpu" else torch.device("cpu")
            empty = torch.empty(value.shape, dtype=value.dtype, device=device)
            carried = _to_group_device(empty, group)
            dist.broadcast(carried, source, group=group)
            received[key] = carried.to(device)
    states.pop(parameter, None)
    if outline:
        states[parameter] = received


def _to_group_device(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The tensor on a device that the group can send from: Adam's step stays on the CPU."""
    kinds = {device.type for device in group._device_types}  # noqa: SLF001  # nothing public
    if tensor.device.type in kinds:
        return tensor.detach().contiguous()
    return tensor.detach().to("cuda")


def _tensors(model: live_models.NamedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.module.named_parameters()
    yield from model.module.named_buffers()
