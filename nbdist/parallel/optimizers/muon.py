"""torch.optim.Muon on matrices that are split: each is orthogonalized on one rank, its owner.

 update                     of this rank's part: the gradient with its momentum
 updates                    each rank's part -> the owner                              collective
 Newton-Schulz steps        of the whole matrix, by torch.optim.Muon itself, on the owner alone
 changes                    the owner -> each rank's part                              collective
 momentum, decay, change    of this rank's part

torch's own step meets all ranks in every product of a DTensor: fifteen times and more for each
matrix, which takes longer (docs/strategies.md#optimizers). As the owner has the whole matrix, bf16
rounds here as it does in one process.

Source of the algorithm: https://kellerjordan.github.io/posts/muon/, as torch.optim.Muon has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from nbdist.parallel.base import consensus
from nbdist.parallel.base.tensors import like, local_as, local_of
from nbdist.parallel.live import registry
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.optimizers.first_step import step_unseen
from nbdist.parallel.reshard.redistribute import Reshard, redistribute
from nbdist.strategy.tensor_layout import TensorLayout, owners

# What the step below knows. A Muon with other options steps as torch does.
_OPTIONS = frozenset(
    ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps",
     "adjust_lr_fn")
)  # fmt: skip
# Of matrices that are whole at once, for each rank: 64 MB of fp32, and as much of their changes.
_ELEMENTS_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A split matrix that is trained.

    Attributes:
        name: In its model.
        parameter: What is in the optimizer's groups: a DTensor, or on meta where only ranks of
            another stage have it.
        group: The group that it is in.
    """

    model: Prepared
    name: str
    parameter: torch.Tensor
    group: Mapping[str, Any]

    @property
    def layout(self) -> TensorLayout:
        return self.model.layouts[self.name]

    @property
    def size(self) -> int:
        """Numbers of the whole."""
        return math.prod(self.layout.shape)

    @property
    def dtype(self) -> torch.dtype:
        """In which it is sent: changes of 16 bits would be rounded once more."""
        return torch.promote_types(self.parameter.dtype, torch.float32)


def attach(optimizer: Optimizer) -> Callable[[], None] | None:
    """Let Muon step split matrices on their owners; None where it has none, or is no torch.optim's.

    Its steps are collective, every rank, as with DTensors they are without this. What is returned
    ends it. A step with a closure, which makes the gradients, stays torch's.
    """
    if type(optimizer) is not torch.optim.Muon or set(optimizer.defaults) != _OPTIONS:
        return None
    if not any(_is_split(model, name) for model, name, _ in registry.names_in(optimizer).values()):
        return None
    hidden = _HiddenGradients()
    handles = (
        optimizer.register_step_pre_hook(hidden.before),
        optimizer.register_step_post_hook(hidden.after),
    )

    def detach() -> None:
        for handle in handles:
            handle.remove()

    return detach


def _is_split(model: Prepared, name: str) -> bool:
    layout = model.layouts[name]
    is_split = layout.shard_dim is not None or layout.tp_dim is not None
    return is_split and layout.ep_dim is None and model.degrees.product > 1


@dataclass(slots=True)
class _HiddenGradients:
    """Gradients of what is stepped here, which torch's step then passes over."""

    hidden: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def before(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Step the split matrices. Collective: every rank."""
        self.hidden.clear()  # of a step that has failed
        # The optimizer itself comes first.
        if any(given is not None for given in (*args[1:], kwargs.get("closure"))):
            return
        matrices = _matrices(optimizer)
        with torch.no_grad():
            for together in _batches(matrices):
                _step(optimizer, together)
        for matrix in matrices.values():
            if matrix.parameter.grad is not None:
                self.hidden.append((matrix.parameter, matrix.parameter.grad))
                matrix.parameter.grad = None

    def after(self, _optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Put the gradients back."""
        for parameter, gradient in self.hidden:
            parameter.grad = gradient
        self.hidden.clear()


def _matrices(optimizer: Optimizer) -> dict[str, _Matrix]:
    """List split, trained matrices of all stages by unique names; the same list on all ranks."""
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {
        key: _Matrix(model, name, parameter, group_of[id(parameter)])
        for key, (model, name, parameter) in registry.names_in(optimizer).items()
        if _is_split(model, name) and parameter.requires_grad
    }


def _batches(matrices: Mapping[str, _Matrix]) -> Iterator[dict[str, _Matrix]]:
    """The largest first, as many at once as all ranks have room for."""
    room = _ELEMENTS_AT_ONCE * consensus.world_size()
    batch: dict[str, _Matrix] = {}
    n_elements = 0
    for key in sorted(matrices, key=lambda key: (-matrices[key].size, key)):
        if batch and n_elements + matrices[key].size > room:
            yield batch
            batch, n_elements = {}, 0
        batch[key] = matrices[key]
        n_elements += matrices[key].size
    if batch:
        yield batch


def _step(optimizer: Optimizer, matrices: Mapping[str, _Matrix]) -> None:
    """Step these matrices. Collective: every rank."""
    owner_of = owners({key: m.layout for key, m in matrices.items()}, consensus.world_size())
    sides = {
        key: (m.dtype, m.model.side(m.name), m.model.whole(m.name, frozenset({owner_of[key]})))
        for key, m in matrices.items()
    }
    there = [Reshard(key, dtype, parts, whole) for key, (dtype, parts, whole) in sides.items()]
    back = [Reshard(key, dtype, whole, parts) for key, (dtype, parts, whole) in sides.items()]
    here = {key: matrix for key, matrix in matrices.items() if not matrix.parameter.is_meta}
    updates = {key: _update(optimizer, matrix) for key, matrix in here.items()}
    device = next((update.device for update in updates.values()), registry.device())
    gathered = redistribute(there, updates, device)
    changes = {key: _change(matrices[key].group, update) for key, update in gathered.items()}
    # Not before: a step that is ended while ranks meet has changed nothing.
    for key, change in redistribute(back, changes, device).items():
        parameter, group = here[key].parameter, here[key].group
        if parameter.grad is not None:
            gradient, buffer = _momentum(optimizer, parameter)
            buffer.lerp_(gradient, 1 - group["momentum"])
            rest = 1 - float(group["lr"]) * group["weight_decay"]
            local_of(parameter).mul_(rest).add_(change)


def _momentum(optimizer: Optimizer, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's parts of a gradient and of its momentum, which begins with zeros."""
    state, name = optimizer.state[parameter], "momentum_buffer"
    if name not in state:
        state[name] = torch.zeros_like(parameter)
    assert parameter.grad is not None
    if getattr(state[name], "placements", None) != getattr(parameter, "placements", None):
        # torch's own steps make it like the gradient, which may be partial sums.
        state[name] = like(parameter, local_as(state[name], parameter))
    return local_as(parameter.grad, parameter), local_of(state[name])


def _update(optimizer: Optimizer, matrix: _Matrix) -> torch.Tensor:
    """Return this rank's part of what is orthogonalized; zeros without a gradient."""
    parameter, momentum = matrix.parameter, matrix.group["momentum"]
    if parameter.grad is None:
        return torch.zeros_like(local_of(parameter), dtype=matrix.dtype)
    gradient, buffer = _momentum(optimizer, parameter)
    update = buffer.lerp(gradient, 1 - momentum)
    if matrix.group["nesterov"]:
        update = gradient.lerp(update, momentum)
    return update.to(matrix.dtype)


def _change(group: Mapping[str, Any], update: torch.Tensor) -> torch.Tensor:
    """Compute the change of a whole matrix by a step of torch.optim.Muon, without its decay."""
    matrix = torch.nn.Parameter(torch.zeros_like(update))
    matrix.grad = update
    options = {option: group[option] for option in _OPTIONS}
    options |= {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    step_unseen(torch.optim.Muon([matrix], **options))
    return matrix.detach()
