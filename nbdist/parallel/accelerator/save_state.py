"""States as files that any strategy on any number of ranks can read: whole values, by name.

The files are Accelerate's: `model.safetensors` with the names of the user's module, so a single
process reads it too, `optimizer.bin`, `scheduler.bin`, `scaler.pt`, `random_states_RANK.pkl`,
`custom_checkpoint_0.pkl`. `loader.bin` is ours: which epoch, and its order.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import load, save
from safetensors.torch import load_file

from nbdist.errors import NbdistError
from nbdist.parallel.accelerator.model_state import Portable, portable
from nbdist.parallel.base.consensus import all_gather_object, all_or_none
from nbdist.parallel.base.weak_list import WeakList
from nbdist.parallel.live.registry import names_in
from nbdist.parallel.reshard import full_state

# A whole state says so: torch's own would be taken for this rank's part.
_FORMAT = "nbdist: whole tensors by parameter name"
# There was none: DeepSpeed's is in a form of its own.
_ABSENT = "nbdist: no state of the optimizer"
_MAX_NAMED = 3


@dataclass(slots=True)
class _State:
    is_saving: bool = False
    is_loading: bool = False


_state = _State()


def is_saving() -> bool:
    """Whether `save_state` runs: optimizers give their whole state then."""
    return _state.is_saving


@contextmanager
def saving(accelerator: Any) -> Iterator[None]:
    """Let Accelerate's save_state write whole states in here. Collective: every rank."""
    agree(accelerator)
    _state.is_saving = True
    try:
        yield
    finally:
        _state.is_saving = False


@contextmanager
def loading(accelerator: Any, *, is_strict: bool) -> Iterator[None]:
    """Let Accelerate's load_state read whole states in here. Collective: every rank.

    Models are loaded by a hook, as Accelerate allows: it would load whole tensors into parts.
    Hooks of the user's come first and may take models out.
    """
    agree(accelerator)

    def hook(models: list[torch.nn.Module], folder: str) -> None:
        def plan_all() -> None:
            loads.extend(
                _plan(model, folder, number, is_strict=is_strict)
                for number, model in enumerate(models)
            )

        loads: list[tuple[Portable, dict[str, torch.Tensor]]] = []
        all_or_none(f"Loading {folder}", plan_all)
        for model, values in loads:
            model.load(values)
        models.clear()
        for index, loader in enumerate(accelerator._dataloaders):  # noqa: SLF001
            path = Path(folder) / _file_name("loader.bin", index)
            if path.exists() and hasattr(loader, "set_epoch_state"):
                loader.set_epoch_state(load(path))

    handle = accelerator.register_load_state_pre_hook(hook)
    _state.is_loading = True
    try:
        yield
    finally:
        _state.is_loading = False
        handle.remove()
    # Accelerate reads it from the rank's own file; there may be more ranks than at saving.
    steps = [accelerator.step]
    dist.broadcast_object_list(steps, src=0)
    accelerator.step = steps[0]


def save_loaders(accelerator: Any, folder: Path) -> None:
    """Write which epoch each loader is in. Rank 0 does; this rank alone."""
    for index, loader in enumerate(accelerator._dataloaders):  # noqa: SLF001
        if hasattr(loader, "epoch_state"):
            save(loader.epoch_state(), folder / _file_name("loader.bin", index))


def agree(accelerator: Any, *, is_collected: bool = False) -> None:
    """Leave out what is prepared on some ranks only. Collective: every rank.

    An old model is gone when Python has collected it, on each rank at another time; what is
    not there on one rank cannot be saved by all. `is_collected`: Python has just done so.
    """
    if not is_collected:
        gc.collect()
    by_rank = all_gather_object([weak_list.entries() for weak_list in _lists(accelerator)])
    kinds = [[[kind for _, kind in entries] for entries in lists] for lists in by_rank]
    if all(of_rank == kinds[0] for of_rank in kinds):
        return  # numbers may differ: a rank that has replaced another begins with 0
    common = set.intersection(*map(_numbers, by_rank))
    for weak_list in _lists(accelerator):
        weak_list.keep(common)


def numbers(accelerator: Any) -> set[int]:
    """Return numbers of what the accelerator has prepared and that lives on this rank."""
    return _numbers([weak_list.entries() for weak_list in _lists(accelerator)])


def _numbers(lists: list[list[tuple[int, str]]]) -> set[int]:
    return {number for entries in lists for number, _ in entries}


def _lists(accelerator: Any) -> list[WeakList]:
    names = "_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects"
    return [getattr(accelerator, name) for name in names]


def whole_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state by parameter name. Collective: every rank."""
    state: dict[str, Any] = full_state.full_optimizer_state(optimizer)
    return {"format": _FORMAT, **state}


def absent() -> dict[str, Any]:
    """In an optimizer's place: its state could not be saved. Says so, once for each."""
    tell_forgotten("DeepSpeed's state of the optimizer is not saved")
    return {"format": _ABSENT}


def is_absent(state: Mapping[str, Any]) -> bool:
    """Whether a state is what `absent` gave."""
    return state.get("format") == _ABSENT


def tell_forgotten(why: str) -> None:
    """Print, on rank 0, that moments begin anew where a state is loaded."""
    if dist.get_rank() == 0:
        print(f"{why}: after a load its moments start at zero.", file=sys.stderr)  # noqa: T201


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take over a state: what `whole_optimizer` gave, else torch's own. This rank alone.

    torch's own is taken for this rank's part, but not while `load_state` runs: there it comes
    from a single process or from Accelerate under DDP, and is whole.
    """
    if is_absent(state):
        tell_forgotten("The saved state has no optimizer state")
    elif state.get("format") == _FORMAT:
        state = {key: value for key, value in state.items() if key != "format"}
        full_state.load_full_optimizer_state(optimizer, state)
    elif _state.is_loading and (named := _state_by_name(optimizer, state)) is not None:
        full_state.load_full_optimizer_state(optimizer, named)
    else:
        optimizer.load_state_dict(dict(state))


def _state_by_name(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[str, Any] | None:
    """State by names in place of numbers; None if a parameter is of no prepared model.

    Raises:
        NbdistError: There are other numbers of parameters in its groups.
    """
    names = {id(parameter): key for key, (_, _, parameter) in names_in(optimizer).items()}
    names_by_group = [
        [names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups
    ]
    numbers_by_group = [list(group["params"]) for group in state["param_groups"]]
    if any(name is None for group in names_by_group for name in group):
        return None
    if [len(group) for group in names_by_group] != [len(group) for group in numbers_by_group]:
        raise NbdistError(
            f"The saved {type(optimizer).__name__} has groups of "
            f"{', '.join(str(len(group)) for group in numbers_by_group)} parameters, this one of "
            f"{', '.join(str(len(group)) for group in names_by_group)}. Make it as it "
            "was when it was saved."
        )
    name_of = dict(
        zip(itertools.chain(*numbers_by_group), itertools.chain(*names_by_group), strict=True)
    )
    return {
        "state": {name_of[number]: values for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": group_names}
            for group, group_names in zip(state["param_groups"], names_by_group, strict=True)
        ],
    }


def _plan(
    model: torch.nn.Module, folder: str, index: int, *, is_strict: bool
) -> tuple[Portable, dict[str, torch.Tensor]]:
    """A model and what is to be loaded into it, by first names. Nothing is changed.

    Raises:
        NbdistError: Names are missing or unknown, where that matters, or shapes differ.
    """
    target, tensors = portable(model), _read(Path(folder), index)
    values = {
        target.firsts[name]: tensor for name, tensor in tensors.items() if name in target.firsts
    }
    wrong = [
        f"{name} has shape {tuple(values[name].shape)} there and {shape} here"
        for name, shape in target.shapes.items()
        if name in values and tuple(values[name].shape) != shape
    ]
    if is_strict:
        wrong += [
            f"{n} is missing there" for n in target.saved_names() if target.firsts[n] not in values
        ]
        wrong += [f"{name} is unknown here" for name in tensors if name not in target.firsts]
    if wrong:
        more = f"; and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise NbdistError(
            f"{folder} does not fit {type(target.base).__name__}: "
            f"{'; '.join(wrong[:_MAX_NAMED])}{more}. Load what was saved of the same model"
            + (", or load_state(..., strict=False)." if is_strict else ".")
        )
    return target, values


def _read(folder: Path, index: int) -> dict[str, torch.Tensor]:
    """The saved tensors of one model; on disk until they are used."""
    path = folder / _file_name("model.safetensors", index)
    if path.exists():
        tensors: dict[str, torch.Tensor] = load_file(path)
    else:
        path = folder / _file_name("pytorch_model.bin", index)
        if not path.exists():
            raise NbdistError(
                f"{folder} has no model number {index}: neither model.safetensors nor "
                "pytorch_model.bin. Prepare as many models as were saved, in the same order."
            )
        tensors = load(path, map_location="cpu", mmap=True)
    # Accelerate's own under DDP.
    if tensors and all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors


def _file_name(name: str, index: int) -> str:
    """Name a file as Accelerate does: model.safetensors, model_1.safetensors."""
    return name.replace(".", f"_{index}.") if index else name
