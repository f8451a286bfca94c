"""Whether a model computes the same from pieces of a sequence: tried once, on a short one."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from nbdist.errors import OptionError
from nbdist.parallel.base.mesh import ParallelMesh
from nbdist.parallel.base.training_state import keep_modes, keep_values, put_back_after, same_random
from nbdist.parallel.cp import attention, mixing
from nbdist.parallel.sequence import split_sequence
from nbdist.parallel.sequence.kept import find_holders, find_kept, keep_attributes

# Positions of a trial on each rank; doubled while every label in it is ignored.
_POSITIONS = 8
# Positions in which what reaches over the middle is looked for: a dilated convolution sees far.
_FARTHEST = 1024
# Parameters below hide what they multiply: a trial has random values in their place.
_HIDES = 1e-2
# Largest differences, relative to the largest value: of attention's inputs and of outputs, and
# of a loss. Between float32 runs 1e-6 is usual, and wrong positions make 1e-2 and more.
_TOLERANCE = (1e-3, 1e-5)
_TOLERANCE_HALF = (5e-2, 5e-3)

_OTHERWISE = ". Or use a strategy that splits no sequence, such as fsdp"
# Refused although a trial could pass: attention whose output weights are still 0 shows nothing.
_NO_ATTENTION = (
    "this model never calls torch.nn.functional.scaled_dot_product_attention. Attention of its own "
    "would see only each rank's piece of the sequence, and without attention there is nothing to "
    "gain. Use that function (transformers: attn_implementation='sdpa'; nn.MultiheadAttention: "
    f"need_weights=False){_OTHERWISE}"
)
_POSITION = (
    "the inputs of its first attention differ: the model counts positions itself, from 0 on each "
    "rank (torch.arange). Let forward take `position_ids`, (1, T), and use them; nbdist passes them"
)
_REACHES = (
    "with its sequence split, this model would compute different results: positions reach each "
    "other outside of attention in {module}, whatever its weights, and each rank would see only "
    f"its piece of the sequence there{_OTHERWISE}"
)
_MIXES = (
    "positions mix outside of attention (a convolution, a mean over the sequence), or the model "
    "counts them itself. In that case let forward take `position_ids`, (1, T)"
)
_LOSS = (
    "its outputs are the same but the loss is not: the model shifts labels itself, or divides by "
    "its own count. Shift labels before the call, and use a loss of torch.nn.functional"
)


@dataclass(frozen=True, slots=True)
class OutputSplit:
    """The result of a forward whose sequence is split.

    Attributes:
        dims: For each tensor of the output, the dim in which ranks' parts follow each other;
            None where the mean over ranks is the whole's.
        why: Why it cannot be split, and what to do; "" if it can.
        is_mean: Of what modules keep as attributes, by name: whether the mean over ranks is the
            whole's, or each position has its own value.
    """

    dims: tuple[int | None, ...] = ()
    why: str = ""
    is_mean: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trial:
    """A call of a model, with the whole sequence, that `examine` runs whole and in pieces."""

    base: torch.nn.Module
    call: inspect.BoundArguments
    attend: attention.Attend
    mesh: ParallelMesh


@dataclass(frozen=True, slots=True)
class _Run:
    """One forward: its output, the inputs of each attention in it, what modules keep of it."""

    output: list[torch.Tensor]
    attention_inputs: list[torch.Tensor]
    is_half: bool
    kept: dict[str, list[torch.Tensor]]


def kind(call: inspect.BoundArguments) -> Hashable:
    """Describe the kind of a call: which arguments there are, their dims and flags."""

    def of(value: Any) -> Hashable:
        dims = tuple(tensor.ndim for tensor in split_sequence.tensors(value))
        return dims or (value if isinstance(value, bool | str | None) else type(value).__name__)

    return tuple((name, of(value)) for name, value in call.arguments.items())


def examine(trial: Trial) -> OutputSplit:
    """How the output of a call is split, from one sample's first positions.

    Collective over dp_replicate and cp, and alike on all of these. Forward runs four times or
    more, without gradients, and in eval mode where results are compared.
    """
    total, size = split_sequence.length(trial.call), trial.mesh.size("cp")
    n_positions = min(total, _POSITIONS * size)
    visible = _visible(trial.base)
    with torch.no_grad(), put_back_after(keep_modes(trial.base)):
        mixed_in = _mixing(trial)  # as it trains: some branches are there in training alone
        trial.base.eval()  # no dropout, and no statistics are taken
        whole = _run(trial, n_positions, visible)
        # Without a label that counts the loss is nan and says nothing.
        while n_positions < total and any(t.isnan().any() for t in whole.output if not t.ndim):
            n_positions = min(total, 2 * n_positions)
            whole = _run(trial, n_positions, visible)
        try:
            local = _run(trial, n_positions, visible, is_split=True)
        except OptionError as error:  # of the attention, on every rank
            return OutputSplit(why=str(error))
        del visible
        return _compare(trial.mesh, local, whole, mixed_in)


def _mixing(trial: Trial) -> str:
    """Find where positions mix outside of attention; "" nowhere."""
    total, size = split_sequence.length(trial.call), trial.mesh.size("cp")
    # A dim of this length is the sequence: no parameter has it, if that can be.
    taken = {n for parameter in trial.base.parameters() for n in parameter.shape}
    longest = min(total, _FARTHEST) // size
    count = next((n for n in range(longest, 1, -1) if n * size not in taken), longest)
    call = split_sequence.cut(trial.call, 0, count * size, n_batch=1)
    call = split_sequence.piece(call, trial.base, 0, 1)
    with same_random(), warnings.catch_warnings(), _without_trace(trial.base):
        warnings.simplefilter("ignore")  # of code that trains without gradients
        return mixing.find_mixing(trial.base, call, count * (size // 2))


def _without_trace(base: torch.nn.Module) -> AbstractContextManager[None]:
    buffers = keep_values("the model", lambda: dict(base.named_buffers()))
    return put_back_after(keep_attributes(base), buffers)


def _visible(base: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Random values, alike on all ranks, for the parameters that are (almost) zero, by name.

    Branches, heads and position embeddings begin so, and would hide what is wrong in them.
    """
    generator = torch.Generator().manual_seed(0)
    values: dict[str, torch.Tensor] = {}
    for name, parameter in base.named_parameters():
        if parameter.numel() and parameter.is_floating_point() and parameter.abs().max() < _HIDES:
            size = 0.1 if parameter.ndim < 2 else math.sqrt(parameter.shape[0] / parameter.numel())
            noise = torch.randn(parameter.shape, generator=generator) * size
            values[name] = noise.to(parameter)
    return values


def _run(
    trial: Trial,
    n_positions: int,
    visible: dict[str, torch.Tensor],
    *,
    is_split: bool = False,
) -> _Run:
    call, mesh = split_sequence.cut(trial.call, 0, n_positions, n_batch=1), trial.mesh
    mode = attention.SplitSequence()
    if is_split:
        call = split_sequence.piece(call, trial.base, mesh.coordinate.cp, mesh.size("cp"))
        mode = attention.SplitSequence(trial.attend, mesh.group("cp"))
    mode.attention_inputs = []
    with _without_trace(trial.base), mode:
        output = torch.func.functional_call(trial.base, visible, call.args, call.kwargs)
        outputs = list(split_sequence.tensors(output))
        attributes = find_kept(find_holders(trial.base))
        return _Run(outputs, mode.attention_inputs, mode.is_half, attributes)


def _compare(mesh: ParallelMesh, local: _Run, whole: _Run, mixed_in: str) -> OutputSplit:
    """Says what differs, alike on all ranks; `mixed_in` is where positions mix."""
    dims: list[int | None] = []
    errors = {"outputs": [0.0], "losses": [0.0]}
    if len(local.output) != len(whole.output):
        errors["outputs"].append(math.inf)
    else:
        for part, all_ in zip(local.output, whole.output, strict=True):
            dims.append(_dim(part, all_, mesh.size("cp")))
            error = _output_error(part, all_, dims[-1], mesh)
            errors["outputs" if all_.ndim else "losses"].append(error)
    inputs = _input_errors(local, whole, mesh)
    if not whole.attention_inputs:  # the same code runs on all ranks
        return OutputSplit(why=_NO_ATTENTION)
    differences = [inputs[0], max(inputs), max(errors["outputs"]), max(errors["losses"])]
    differences.append(float(bool(mixed_in)))
    assert mesh.device_mesh is not None
    # Each at its largest over all ranks.
    worst = torch.tensor(differences, dtype=torch.float64, device=mesh.device_mesh.device_type)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=mesh.group("dp_replicate", "cp"))
    # Attention computed in float32, and products did.
    is_exact = not whole.is_half and torch.get_float32_matmul_precision() == "highest"
    *differences, mixes = worst.tolist()
    if mixes:
        return OutputSplit(why=_REACHES.format(module=mixed_in or "a layer"))
    limits = _TOLERANCE if is_exact else _TOLERANCE_HALF
    if why := _difference(differences, limits):
        return OutputSplit(why=why)
    return OutputSplit(tuple(dims), is_mean=_are_means(mesh, local, whole, limits[1]))


def _are_means(mesh: ParallelMesh, local: _Run, whole: _Run, limit: float) -> dict[str, bool]:
    """Say whether the whole's values that modules keep are means of the ranks' values, by name."""
    group = mesh.group("cp")
    assert group is not None
    is_mean: dict[str, bool] = {}
    for name in sorted(local.kept.keys() & whole.kept.keys()):
        pairs = zip(local.kept[name], whole.kept[name], strict=False)
        alike = [(part, all_) for part, all_ in pairs if part.shape == all_.shape]
        means = [(split_sequence.all_reduce_mean(part, group), all_) for part, all_ in alike]
        is_mean[name] = all(_error(mean, all_) <= limit for mean, all_ in means)
    return is_mean


def _difference(differences: list[float], limits: tuple[float, float]) -> str:
    limit, loss_limit = limits
    allowed_of_each = (limit, limit, limit, loss_limit)
    reasons = (_POSITION, _MIXES, _MIXES, _LOSS)
    for error, allowed, reason in zip(differences, allowed_of_each, reasons, strict=True):
        if error > allowed:
            return (
                "with its sequence split, this model would compute different results "
                f"(relative difference {error:.1e}, more than {allowed:.0e}, tried on a short "
                f"sequence): {reason}{_OTHERWISE}"
            )
    return ""


def _dim(part: torch.Tensor, whole: torch.Tensor, size: int) -> int | None:
    """The only dim in which the whole is `size` times the part; None if there is none."""
    differing = [d for d, (a, b) in enumerate(zip(part.shape, whole.shape, strict=False)) if a != b]
    if part.ndim != whole.ndim or len(differing) != 1:
        return None
    return differing[0] if whole.shape[differing[0]] == size * part.shape[differing[0]] else None


def _output_error(
    part: torch.Tensor, whole: torch.Tensor, dim: int | None, mesh: ParallelMesh
) -> float:
    group = mesh.group("cp")
    assert group is not None
    if dim is not None:
        part = split_sequence.all_gather(part, dim, group)
    elif part.is_floating_point():
        part = split_sequence.all_reduce_mean(part, group)
    return _error(part, whole)


def _input_errors(local: _Run, whole: _Run, mesh: ParallelMesh) -> list[float]:
    """Return how much the inputs of each attention differ; the first may be the only one."""
    if len(local.attention_inputs) != len(whole.attention_inputs) or not local.attention_inputs:
        return [0.0, math.inf] if whole.attention_inputs else [0.0]
    size, place = mesh.size("cp"), mesh.coordinate.cp
    errors = []
    for part, all_ in zip(local.attention_inputs, whole.attention_inputs, strict=True):
        # What is no sequence (another model's output, say) is the same on each rank.
        expected = all_ if part.shape == all_.shape else all_.chunk(size, -2)[place]
        errors.append(_error(part, expected))
    # Query, key and value of each.
    return [max(errors[first : first + 3]) for first in range(0, len(errors), 3)]


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference beyond rounding, relative to the largest value.

    Equal nan and infinity are equal.
    """
    if actual.shape != expected.shape:
        return math.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else math.inf
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    difference = (actual.double() - expected.double()).abs().masked_fill(same, 0.0)
    if not difference.numel() or not difference.any():
        return 0.0
    largest = expected.double().abs().nan_to_num(0.0, 0.0).max().clamp_min(1e-30)
    relative = float((difference.max() / largest).nan_to_num(math.inf))
    # A few roundings to the dtype it has; a loss in bf16 has two digits.
    return max(0.0, relative - 4 * torch.finfo(expected.dtype).eps)
