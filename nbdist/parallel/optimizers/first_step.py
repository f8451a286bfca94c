"""An optimizer that nobody knows is compared with one process before its first step.

 a small parameter of each kind, with its gradient, made whole          collective
 three copies of the optimizer step clones of these, and nothing else   DTensors meet their ranks
   here     as they lie on this rank, without gradients of what others step
   alone    whole: what one process makes of them
   apart    this rank's parts as plain tensors: what comes out where a part is taken for the whole
 `here` has to be `alone`                                               collective

The copies have the same parameters, so one that goes by all gradients together is no error where
it has them all. The step itself, its state and random generators stay as they are.
"""

from __future__ import annotations

import math
import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbdist.errors import NbdistError
from nbdist.parallel.base.consensus import all_gather_object, one_line
from nbdist.parallel.base.tensors import local_as, local_of
from nbdist.parallel.base.training_state import same_random
from nbdist.parallel.live import build, registry
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.optimizers import rules
from nbdist.parallel.reshard.redistribute import Reshard, redistribute
from nbdist.strategy.choice import Strategy, label
from nbdist.strategy.tensor_layout import local_shape

# Of a change. Sums in another order make 1e-6 of it, an 8-bit optimizer's blocks that begin
# elsewhere 7e-4, a norm of parts mostly percents (measured).
_RELATIVE = 1e-4
# Of what parts alone would make: all of it where a part is taken for the whole; 0.05 where Muon's
# bf16 rounds partial sums.
_OF_APART = 0.25
# Of smaller ones a rank may have all that counts.
_LEAST_ELEMENTS = 64
# Half a dozen copies of a sample are on each rank at once: 400 MB of fp32.
_MOST_ELEMENTS = 1 << 24
_MOST_SAMPLES = 6

_PLAIN = (
    int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type,
    types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip


class _Kind(NamedTuple):
    """Equal for parameters that lie alike, are stepped on the same ranks and have as many dims."""

    n_dims: int
    splits: tuple[int | None, ...]
    stages: frozenset[int] | None
    ranks: frozenset[int] | None


# Key -> (model, first name in it, what is in the optimizer's groups).
_Names = Mapping[str, tuple[Prepared, str, torch.Tensor]]

# Under which strategy each was compared.
_compared: weakref.WeakKeyDictionary[Optimizer, Strategy] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Sample:
    """A parameter that is looked at.

    Attributes:
        key: Its name, which no other parameter has.
        here: What is in the optimizer's groups.
        part: This rank's part of its gradient, plain; None where others step it.
        value, gradient: Whole.
    """

    key: str
    model: Prepared
    name: str
    here: torch.Tensor
    part: torch.Tensor | None
    value: torch.Tensor
    gradient: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Offset:
    """How far a parameter's change is from one process's, at most, and what that may be.

    Attributes:
        off: Of `here`.
        apart: Of `apart`.
        change: The largest of one process.
        rounding: Of the parameter's dtype.
    """

    name: str
    off: float
    apart: float
    change: float
    rounding: float

    @property
    def is_wrong(self) -> bool:
        limit = max(_RELATIVE * self.change + self.rounding, _OF_APART * self.apart)
        return not self.off <= limit  # as a NaN


def attach(optimizer: Optimizer) -> Callable[[], None] | None:
    """Let an unknown optimizer be compared at its next step, where the strategy asks for it.

    That step is collective: every rank. What is returned ends it; None where there is nothing.
    """
    layouts = [model.layouts[name] for model, name, _ in registry.names_in(optimizer).values()]
    ways = rules.ways(registry.current(), layouts)
    if rules.is_known(optimizer) or not ways or "flat" in ways:
        return None
    return optimizer.register_step_pre_hook(_before_step).remove


def _before_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    choice = registry.current()
    if torch.compiler.is_compiling() or _compared.get(optimizer) == choice:
        return
    names = registry.names_in(optimizer)
    keys = _chosen(names)
    if not keys:
        return  # nothing has a gradient
    _compared[optimizer] = choice
    small = [key for key in keys if math.prod(_shape(*names[key])) <= _MOST_ELEMENTS]
    sentences = [_compare(optimizer, _samples({key: names[key] for key in small}))]
    if large := [key for key in keys if key not in small]:
        sentences.append(_not_compared(optimizer, f"{', '.join(large)} would take too much memory"))
    for sentence in filter(None, sentences):
        print(sentence, file=sys.stderr)  # noqa: T201  # into the cell's output


def _compare(optimizer: Optimizer, samples: Sequence[_Sample]) -> str:
    """Compare an optimizer's step with one process's; "" where they are equal. Collective."""
    offsets: list[_Offset] = []
    reason = ""
    try:
        with same_random():
            offsets = _offsets(optimizer, samples)
    except Exception as error:  # noqa: BLE001  # of the user's code, and told
        reason = one_line(error)
    by_rank = all_gather_object((offsets, reason))
    if reason := next((theirs for _, theirs in by_rank if theirs), ""):
        return _not_compared(optimizer, reason)
    wrong = [offset for theirs, _ in by_rank for offset in theirs if offset.is_wrong]
    if not wrong:
        return ""
    worst = max(wrong, key=lambda offset: offset.off / max(offset.change, offset.rounding))
    strategy = label(registry.current())
    return (
        f"{type(optimizer).__name__} does not step under {strategy} as in one process: "
        f"{worst.name} is off by {worst.off:.1e}, where a step changes it by {worst.change:.1e}. "
        "It takes what is on this rank for the whole: under fsdp, tp and ep by .to_local(), or by "
        ".item() of a norm (write .full_tensor().item(), on all ranks); under zero1 and pp in sums "
        "over all parameters. "
        "Or use ddp, or an optimizer that treats each element by itself (AdamW, SGD)."
    )


def _not_compared(optimizer: Optimizer, reason: str) -> str:
    title, strategy = type(optimizer).__name__, label(registry.current())
    return (
        f"{title}'s step under {strategy} could not be compared with one process's: {reason}. "
        "If it looks at norms or whole matrices, compare the losses of some steps with ddp's."
    )


def _chosen(names: _Names) -> list[str]:
    """Choose each kind's smallest parameter that has a gradient, split matrices first.

    Collective: every rank.
    """
    grads = {key: None if p.is_meta else p.grad is not None for key, (*_, p) in names.items()}
    by_rank = all_gather_object(grads)
    common = [key for key in names if {theirs.get(key) for theirs in by_rank} - {None} == {True}]
    kinds: dict[_Kind, str] = {}
    for key in sorted(common, key=lambda key: _order(*names[key])):
        kinds.setdefault(_kind(*names[key]), key)
    return [kinds[kind] for kind in sorted(kinds, key=_importance)][:_MOST_SAMPLES]


def _samples(names: _Names) -> list[_Sample]:
    """Parameters that have a gradient, whole. Collective: every rank."""
    held = {key: p for key, (*_, p) in names.items() if not p.is_meta}
    parts = {key: local_as(p.grad, p) for key, p in held.items() if p.grad is not None}
    gradients = _whole(names, parts)
    values = _whole(names, {key: local_of(p) for key, p in held.items()})
    return [
        _Sample(
            key, model, name, here, parts.get(key) if _is_stepped(model, name) else None,
            values[key], gradients[key],
        )
        for key, (model, name, here) in names.items()
    ]  # fmt: skip


def _shape(model: Prepared, name: str, _here: torch.Tensor) -> tuple[int, ...]:
    return model.layouts[name].shape


def _order(model: Prepared, name: str, _here: torch.Tensor) -> tuple[bool, int]:
    """Small ones first; at the end those that are tiny, or of which a rank has an empty part."""
    layout, degrees = model.layouts[name], model.degrees
    shapes = [local_shape(layout, degrees, rank) for rank in range(degrees.product)]
    size, least = math.prod(layout.shape), min(math.prod(s) for s in shapes if s is not None)
    return size < _LEAST_ELEMENTS or not least, size


def _kind(model: Prepared, name: str, _here: torch.Tensor) -> _Kind:
    layout = registry.state_side(model.built, name).layout
    splits = layout.tp_dim, layout.shard_dim, layout.ep_dim
    return _Kind(len(layout.shape), splits, layout.stages, layout.ranks)


def _importance(kind: _Kind) -> tuple[bool, int]:
    return all(dim is None for dim in kind.splits), -kind.n_dims


def _is_stepped(model: Prepared, name: str) -> bool:
    side = registry.state_side(model.built, name)
    return local_shape(side.layout, side.degrees, model.built.job.mesh.rank) is not None


def _whole(names: _Names, local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors that lie as these parameters do, copied. Collective: every rank."""
    moves = [
        Reshard(key, parameter.dtype, model.side(name), model.whole(name))
        for key, (model, name, parameter) in names.items()
    ]
    home = next((tensor.device for tensor in local.values()), registry.device())
    return {key: tensor.clone() for key, tensor in redistribute(moves, local, home).items()}


def _offsets(optimizer: Optimizer, samples: Sequence[_Sample]) -> list[_Offset]:
    """Step the copies, and look at what is stepped here."""
    stepped = [sample for sample in samples if sample.part is not None]
    if not stepped:
        return []
    whole = {s.key: (s.here, s.value.clone(), s.gradient) for s in samples}
    alone = _step(optimizer, whole, lambda t: t.full_tensor() if isinstance(t, DTensor) else t)
    here = apart = _step(
        optimizer,
        {s.key: (s.here, s.here.detach().clone(), s.here.grad) for s in stepped},
        lambda tensor: tensor,
    )
    if any(isinstance(sample.here, DTensor) for sample in stepped):
        parts = {s.key: (s.here, local_of(s.here).clone(), s.part) for s in stepped}
        apart = _step(optimizer, parts, local_of)
    offsets = []
    for sample in stepped:
        layout, model, made = sample.model.layouts[sample.name], sample.model, alone[sample.key]
        wanted = build.part_of(made, layout, model.degrees, model.built.job.mesh.rank)
        if wanted is None or not made.isfinite().all():
            continue
        rounding = 4 * torch.finfo(made.dtype).eps * sample.value.abs().max().item()
        off, of_apart = (_farthest(local_of(by[sample.key]), wanted) for by in (here, apart))
        change = _farthest(made, sample.value)
        offsets.append(_Offset(sample.key, off, of_apart, change, rounding))
    return offsets


def _farthest(tensor: torch.Tensor, wanted: torch.Tensor) -> float:
    return (tensor - wanted).abs().max().item() if wanted.numel() else 0.0


_Given = Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


def _step(
    optimizer: Optimizer, given: _Given, lay: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Compute one step of an optimizer's copy on other parameters, by key.

    Args:
        optimizer: The one that is copied, with its groups' options and its state.
        given: Key -> a parameter of it, the value in its place, and the gradient of that.
        lay: Makes a tensor of the state lie as the values do.

    Raises:
        NbdistError: It keeps what cannot be copied, such as another optimizer.
    """
    fresh = {}
    clones = {}
    for key, (parameter, value, gradient) in given.items():
        clones[key] = fresh[id(parameter)] = torch.nn.Parameter(value)
        clones[key].grad = None if gradient is None else gradient.detach().clone()
    torchs = vars(torch.optim.SGD([torch.zeros(1)]))
    attributes = {
        key: value if key in torchs else _copied(value, f"its attribute {key}", lambda t: t)
        for key, value in vars(optimizer).items()
        if key not in ("step", "param_groups", "state")  # a scheduler's wrapper is around this one
    }
    copied: Any = object.__new__(type(optimizer))
    vars(copied).update(attributes)
    copied.param_groups = [
        group for old in optimizer.param_groups if (group := _group(old, fresh))["params"]
    ]
    copied.state = defaultdict(dict)
    for parameter, *_ in given.values():
        for key, value in optimizer.state.get(parameter, {}).items():
            copied.state[fresh[id(parameter)]][key] = _copied(value, f"its state {key}", lay)
    step_unseen(copied)
    return {key: clone.detach() for key, clone in clones.items()}


def step_unseen(optimizer: Optimizer) -> None:
    """Step an optimizer without the hooks of all optimizers, which would count it as a step."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    step(optimizer)


def _group(group: Mapping[str, Any], fresh: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    """A group with other parameters, by id; without those that have none."""
    places = [place for place, p in enumerate(group["params"]) if id(p) in fresh]
    options = {
        key: [value[place] for place in places]
        if key == "param_names"
        else _copied(value, f"{key} of its groups", lambda t: t)
        for key, value in group.items()
        if key != "params"
    }
    return {**options, "params": [fresh[id(group["params"][place])] for place in places]}


def _copied(value: Any, what: str, lay: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy that shares nothing which a step could change."""
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return lay(value.detach()).clone()
    if isinstance(value, Mapping):
        return type(value)({key: _copied(each, what, lay) for key, each in value.items()})  # type: ignore[call-arg]
    if isinstance(value, list | tuple | set):
        return type(value)(_copied(each, what, lay) for each in value)
    if isinstance(value, _PLAIN):
        return value
    raise NbdistError(f"{what} is a {type(value).__name__}, which is not copied")
