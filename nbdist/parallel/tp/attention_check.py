"""Whether attention of unknown code computes the same with a part of its heads on each rank.

Tried out on this rank alone, before anything changes: one small batch through a copy of the
module with random weights, whole and split. A head count that nobody divided would otherwise
give wrong numbers without a word.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.errors import OptionError
from nbdist.parallel.libraries.peft_layers import base_layer
from nbdist.parallel.tp.model import divide_attributes, is_conv1d
from nbdist.parallel.tp.styles import split_dims
from nbdist.strategy.tp_plan import Plan, Style

# Their attention takes heads from the width of one head, or from attributes that are divided.
_KNOWN = ("transformers.", "torch.")
_BATCH, _LENGTH = 2, 6
_MOST = 1 << 27  # numbers in a module: 512 MiB of fp32
_TOLERANCE = 1e-4
_STANDARD = frozenset({*vars(torch.nn.Module()), "forward"})


@dataclass(frozen=True, slots=True)
class AttentionFit:
    """How an attention computes with its own heads on one rank.

    Attributes:
        values: Its attributes for heads and widths.
        n_shown: How wide its forward has to see its input; None for as it is.
    """

    values: Mapping[str, int]
    n_shown: int | None = None


@dataclass(frozen=True, slots=True)
class _Trial:
    """One attention, and what it computes as a whole.

    Attributes:
        whole: A copy with random weights.
        styles: Of its layers, by their names in it.
        rows: What came into each rowwise layer and out of it.
    """

    whole: torch.nn.Module
    styles: dict[str, Style]
    degree: int
    batch: torch.Tensor
    rows: dict[str, tuple[torch.Tensor, torch.Tensor]]
    result: torch.Tensor


def fit(
    module: torch.nn.Module, name: str, plan: Plan, columns: Sequence[str], degree: int
) -> AttentionFit:
    """How an attention has to be changed, so that it computes the same with its own heads.

    Some take the width of all heads from their input: `B, T, C = x.shape`, and `y.view(B, T, C)`
    later. Some count heads by an attribute, some by what is there, `x.view(B, T, -1, width)`.

    Raises:
        OptionError: Nothing makes the ranks compute their parts of the whole.
    """
    values = divide_attributes(module, name, plan, columns, degree)
    trial = _prepare(module, name, plan, columns, degree) if _can_try(module) else None
    if trial is None:
        return AttentionFit(values)
    width = trial.batch.shape[-1] // degree
    for candidate in (
        AttentionFit(values),
        AttentionFit(values, width),
        AttentionFit({}),
        AttentionFit({}, width),
    ):
        if _quietly(functools.partial(_fits, trial, candidate)):
            return candidate
    listing = ", ".join(f"{key} = {value}" for key, value in values.items()) or "nothing divided"
    raise OptionError(
        f"{name or 'the model'}: {type(module).__name__} does not compute the same if each of "
        f"tp={degree} ranks has its part of the heads ({listing}). Say which attributes are "
        'divided, as in model.tp_plan = {"layers.*.attn": "divide:n_heads", ...}, or leave its '
        "layers out of the plan."
    )


def is_tryable(module: torch.nn.Module) -> bool:
    """Whether its buffers are here: those of another stage's are on meta."""
    return not any(buffer.is_meta for buffer in module.buffers())


def _prepare(
    module: torch.nn.Module, name: str, plan: Plan, columns: Sequence[str], degree: int
) -> _Trial | None:
    """The whole computed; None where it wants other inputs, or ends outside of the module."""
    prefix = f"{name}." if name else ""
    styles = {path.removeprefix(prefix): plan[path] for path in plan if path.startswith(prefix)}
    rows = [path for path, style in styles.items() if style.kind == "rowwise"]
    column: Any = module.get_submodule(columns[0].removeprefix(prefix))
    n_in = column.weight.shape[0 if is_conv1d(column) else 1]
    captured: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def see(path: str, _layer: Any, args: Any, result: torch.Tensor) -> None:
        captured[path] = (args[0], result)

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        whole = _copy(module, _random)
        batch = torch.randn(_BATCH, _LENGTH, n_in)
        for path in rows:
            whole.get_submodule(path).register_forward_hook(functools.partial(see, path))
        result = _quietly(functools.partial(_run, whole, batch))
    if result is None or not rows or len(captured) < len(rows):
        return None
    return _Trial(whole, styles, degree, batch, captured, result)


def _can_try(module: torch.nn.Module) -> bool:
    """Whether its forward takes one tensor, as far as its arguments say, and it is not too big."""
    cls: Any = type(module)
    arguments = list(inspect.signature(cls.forward).parameters.values())[1:]
    needed = [
        argument
        for argument in arguments
        if argument.default is argument.empty and argument.kind < argument.VAR_POSITIONAL
    ]
    return (
        not cls.__module__.startswith(_KNOWN)
        and len(needed) == 1
        and is_tryable(module)
        and sum(parameter.numel() for parameter in module.parameters()) <= _MOST
    )


def _quietly(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception:  # noqa: BLE001  # the user's code fails as it likes
        return None


def _is_same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.shape != expected.shape:
        return False
    return bool((actual - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _fits(trial: _Trial, candidate: AttentionFit) -> bool:
    """Whether each rank brings its part of what goes into every rowwise layer."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return all(_fits_rank(trial, candidate, index) for index in range(trial.degree))


def _fits_rank(trial: _Trial, candidate: AttentionFit, index: int) -> bool:
    part = _copy(trial.whole, lambda weight: weight.detach())
    vars(part).update(candidate.values)
    for path, style in trial.styles.items():
        _split(part.get_submodule(path), style, index, trial.degree)
    right = []

    def compare(path: str, tensor: torch.Tensor) -> torch.Tensor:
        expected, result = trial.rows[path]
        right.append(_is_same(tensor, expected.chunk(trial.degree, dim=-1)[index]))
        return result  # the sum over the ranks, with which it goes on

    for path in trial.rows:
        layer: Any = part.get_submodule(path)
        layer.forward = functools.partial(compare, path)
    shown = trial.batch if candidate.n_shown is None else trial.batch[..., : candidate.n_shown]
    if candidate.n_shown is not None:
        _give(part, trial, shown)
    return (
        _is_same(_run(part, shown), trial.result) and len(right) == len(trial.rows) and all(right)
    )


def _split(layer: torch.nn.Module, style: Style, index: int, degree: int) -> None:
    parameters = dict(layer.named_parameters())
    for key, dim in split_dims(layer, style).items():
        pieces = [
            part.chunk(degree, dim)[index] for part in parameters[key].chunk(style.parts, dim)
        ]
        path, _, name = key.rpartition(".")
        part = torch.nn.Parameter(torch.cat(pieces, dim))
        layer.get_submodule(path).register_parameter(name, part)
    if is_conv1d(layer) and style.kind == "colwise":
        vars(base_layer(layer))["nf"] //= degree


def _give(part: torch.nn.Module, trial: _Trial, shown: torch.Tensor) -> None:
    """Let colwise layers get the real input where they are given what is shown."""

    def give(_layer: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        return (trial.batch, *args[1:]) if args[0] is shown else args

    for path, style in trial.styles.items():
        if style.kind == "colwise":
            part.get_submodule(path).register_forward_pre_hook(give)


def _copy(module: torch.nn.Module, fill: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    """A module like another, without its hooks and strategy, on the host, in evaluation."""
    cls: Any = type(module)
    copy: torch.nn.Module = cls.__new__(cls)
    torch.nn.Module.__init__(copy)
    attributes = {key: value for key, value in vars(module).items() if key not in _STANDARD}
    vars(copy).update(attributes)
    copy.training = False
    for key, child in module._modules.items():  # noqa: SLF001  # as torch's own tools
        copy.add_module(key, None if child is None else _copy(child, fill))
    for key, parameter in module._parameters.items():  # noqa: SLF001
        filled = None if parameter is None else torch.nn.Parameter(fill(parameter))
        copy.register_parameter(key, filled)
    for key, buffer in module._buffers.items():  # noqa: SLF001
        copy.register_buffer(key, None if buffer is None else _on_host(buffer))
    return copy


def _random(parameter: torch.Tensor) -> torch.Tensor:
    return torch.randn(parameter.shape) / math.sqrt(max(1, *parameter.shape))


def _on_host(buffer: torch.Tensor) -> torch.Tensor:
    host = buffer.detach().cpu()
    return host.float() if host.is_floating_point() else host


def _run(module: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result = module(batch)
    first = result[0] if isinstance(result, tuple | list) else result
    assert isinstance(first, torch.Tensor)
    return first
