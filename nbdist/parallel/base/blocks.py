"""A model's list of blocks: the like layers that are split, computed again or staged one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nbdist.errors import OptionError

# What the user types for the model itself, where it is the list.
ITSELF = "."
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class BlockList:
    """The list of blocks of a model.

    Attributes:
        name: Of the list in the model; empty where the model is the list itself.
    """

    name: str
    container: torch.nn.ModuleList | torch.nn.Sequential
    modules: tuple[torch.nn.Module, ...]

    def block_name(self, index: int) -> str:
        """The name of a block in the model."""
        return f"{self.name}.{index}" if self.name else str(index)


def find_blocks(model: torch.nn.Module, name: str = "") -> BlockList:
    """The list with most parameters of those that hold two or more modules of one kind.

    Of one kind are modules of one class, and those whose classes have a base in common that is not
    torch's: transformers' layers with attention and with a state space, for example.

    Depends on shapes alone: equal on all ranks, and for parameters that are split or on meta.
    No rank is met.

    Args:
        model: Whose blocks are wanted.
        name: The list to take instead, of any modules; "." is the model itself.

    Raises:
        OptionError: There is no such list, or several are the largest. Lists the candidates.
    """
    if name:
        for blocks in _all(model):
            if blocks.name == ("" if name == ITSELF else name):
                return blocks
        raise OptionError(
            f"--blocks {name}: {type(model).__name__} has no ModuleList or Sequential of that "
            f"name. {_lists(model)}"
        )
    ranked = sorted(candidates(model), key=_size, reverse=True)
    if not ranked:
        raise OptionError(
            f"{type(model).__name__} has no list of blocks: no ModuleList or Sequential in it "
            "holds two or more modules with parameters that are of one class, or of classes with "
            f"one base. Name a list that holds its layers with --blocks NAME. {_lists(model)}"
        )
    largest = [blocks for blocks in ranked if _size(blocks) == _size(ranked[0])]
    if len(largest) > 1:
        raise OptionError(
            f"{type(model).__name__} has {len(largest)} lists of blocks with "
            f"{_size(ranked[0]):,} parameters each. Choose one of them with --blocks NAME: "
            f"{', '.join(_describe(blocks) for blocks in largest)}"
        )
    return ranked[0]


def candidates(model: torch.nn.Module) -> tuple[BlockList, ...]:
    """The lists that can be a model's blocks, in the model's order."""
    return tuple(blocks for blocks in _all(model) if _are_alike(blocks.modules))


def _all(model: torch.nn.Module) -> Iterator[BlockList]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and len(module):
            yield BlockList(name, module, tuple(module))


def _are_alike(modules: tuple[torch.nn.Module, ...]) -> bool:
    """Whether they are two or more of one kind, each with parameters and called as a whole."""
    return (
        len(modules) > 1
        and _have_one_kind({type(module) for module in modules})
        # Lists of lists: their modules are called one by one, the inner list never.
        and not isinstance(modules[0], torch.nn.ModuleList | torch.nn.ModuleDict)
        and all(any(True for _ in module.parameters()) for module in modules)
    )


def _have_one_kind(classes: set[type[torch.nn.Module]]) -> bool:
    """Whether it is one class, or they have a base that is not torch's, as mixed layers have."""
    bases = set.intersection(*(set(each.__mro__) for each in classes))
    return len(classes) == 1 or any(
        issubclass(base, torch.nn.Module) and not base.__module__.startswith("torch.")
        for base in bases
    )


def _size(blocks: BlockList) -> int:
    return sum(parameter.numel() for parameter in blocks.container.parameters())


def _lists(model: torch.nn.Module) -> str:
    shown = [_describe(blocks) for blocks in _all(model)]
    if not shown:
        return "It has no lists at all."
    more = f", and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return f"Its lists: {', '.join(shown[:_SHOWN])}{more}"


def _describe(blocks: BlockList) -> str:
    classes = list(dict.fromkeys(type(module).__name__ for module in blocks.modules))
    kinds = classes[0] if len(classes) == 1 else f"{classes[0]} and others"
    return f"{blocks.name or ITSELF} ({len(blocks.modules)} x {kinds})"
