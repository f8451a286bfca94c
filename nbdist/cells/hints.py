"""What to do about errors whose reason is how ranks and notebook differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from nbdist.core.failures import RankFailure
from nbdist.hang import torch_messages


@dataclass(frozen=True, slots=True)
class HintContext:
    """What a hint may need to know of the notebook.

    Attributes:
        python: The Python that the ranks run.
        has_name: Whether the notebook itself has a variable of this name.
    """

    python: str
    has_name: Callable[[str], bool]


def explain(failure: RankFailure, around: HintContext) -> RankFailure:
    """The failure in plain words, with what to do added to its message where that is known."""
    failure = _readable(failure)
    find = _HINTS.get(failure.name)
    hint = find(failure.message, around) if find else ""
    return replace(failure, message=f"{failure.message}. {hint}") if hint else failure


def _readable(failure: RankFailure) -> RankFailure:
    """The failure with torch's message in one sentence, which reads the same on all ranks."""
    message = torch_messages.readable(failure.message)
    traceback = tuple(line.replace(failure.message, message) for line in failure.traceback)
    return (
        failure
        if message == failure.message
        else replace(failure, message=message, traceback=traceback)
    )


def _missing_module(_message: str, around: HintContext) -> str:
    return (
        f"The ranks run {around.python}: install it there ({around.python} -m pip install NAME). "
        "If the notebook can import it, its sys.path has changed since %dist_init: %dist_reset "
        "takes it over, or append to sys.path in a distributed cell"
    )


def _name_of_the_notebook(message: str, around: HintContext) -> str:
    match = re.search(r"name '(\w+)' is not defined", message)
    if match is None or not around.has_name(match.group(1)):
        return ""
    name = match.group(1)
    return (
        f"{name} exists in the notebook, not on the ranks: each process has its own "
        f"variables. Define it in a %%distributed cell, or copy it with %dist_push {name}"
    )


def _second_accelerator(message: str, _around: HintContext) -> str:
    if "AcceleratorState has already been initialized" not in message:
        return ""
    return (
        "This rank already uses an Accelerator with other settings. Run %dist_reset, then create "
        "yours before anything uses `accelerator`"
    )


_HINTS: dict[str, Callable[[str, HintContext], str]] = {
    "ModuleNotFoundError": _missing_module,
    "NameError": _name_of_the_notebook,
    "ValueError": _second_accelerator,
}
