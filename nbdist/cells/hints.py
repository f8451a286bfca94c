"""Advice on errors that differences between ranks and notebook cause."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from nbdist.core.failures import RankFailure, ranks_phrase
from nbdist.hang import torch_messages

# Whether the notebook itself has a variable of a name; None where there is no notebook.
HasName = Callable[[str], bool] | None
# Types of what cannot be pulled: it is found by its name, or belongs to its rank.
_STAY = frozenset({"module", "function", "type", "Accelerator", "LazyAccelerator"})


def explain(failure: RankFailure, has_name: HasName) -> RankFailure:
    """The failure in plain words, with what to do added to its message where that is known."""
    # torch's message in one sentence, which reads the same on all ranks.
    message = torch_messages.readable(failure.message)
    traceback = tuple(line.replace(failure.message, message) for line in failure.traceback)
    find = _HINTS.get(failure.name)
    if hint := find(message, has_name) if find else "":
        first, newline, rest = message.partition("\n")  # of CUDA's five lines the first is shown
        message = f"{first}. {hint}{newline}{rest}"
    return replace(failure, message=message, traceback=traceback)


def _missing_module(_message: str, has_name: HasName) -> str:
    python = sys.executable  # which the ranks run as well
    install = f"The ranks run {python}: install it there ({python} -m pip install NAME)"
    if has_name is None:
        return install
    return (
        f"{install}. If the notebook can import it, its sys.path has changed since %dist_init: "
        "%dist_reset takes it over, or append to sys.path in a distributed cell"
    )


def _name_of_the_notebook(message: str, has_name: HasName) -> str:
    match = re.search(r"name '(\w+)' is not defined", message)
    if match is None or has_name is None or not has_name(match.group(1)):
        return ""
    name = match.group(1)
    return (
        f"{name} exists in the notebook, not on the ranks: each process has its own "
        f"variables. Define it in a %%distributed cell, or copy it with %dist_push {name}"
    )


def name_of_the_ranks(name: str, types: Mapping[int, str]) -> str:
    """Advice in the notebook on a name that ranks have, by its type there."""
    where = f"{name} is on {ranks_phrase(sorted(types))}, not in the notebook"
    pull = f", or copy it with %dist_pull {name}"
    return f"{where}: run the cell with %%distributed{'' if _STAY & {*types.values()} else pull}"


def _second_accelerator(message: str, has_name: HasName) -> str:
    if "AcceleratorState has already been initialized" not in message:
        return ""
    return (
        "This rank already uses an Accelerator with other settings. "
        f"{'Create' if has_name is None else 'Run %dist_reset, then create'} yours before anything "
        "uses `accelerator`"
    )


def _words_of_torch(message: str, _has_name: HasName) -> str:
    sentences = (text for pattern, text in _OF_TORCH.items() if re.search(pattern, message))
    return next(sentences, "")


def _broken_gpu(message: str, has_name: HasName) -> str:
    if not re.search(_STICKY, message):
        return ""
    what = "No process comes back from that: this rank's variables on its GPU are lost"
    if has_name is None:
        return what
    return f"{what}. %dist_restart with its number replaces it; the other ranks keep theirs"


def _missing_gpu(message: str, _has_name: HasName) -> str:
    if "CUDA error: invalid device ordinal" not in message:
        return ""
    return (
        "This rank sees no GPU of that number: ranks can share one, so LOCAL_RANK is not always "
        "its number. A rank's own GPU is its current one from the start: leave "
        'torch.cuda.set_device(local_rank) out, and write "cuda" for f"cuda:{local_rank}"'
    )


def _gpu_error(message: str, has_name: HasName) -> str:
    return _broken_gpu(message, has_name) or _missing_gpu(message, has_name)


def _runtime_error(message: str, has_name: HasName) -> str:
    return _gpu_error(message, has_name) or _words_of_torch(message, has_name)


# Errors of CUDA after which every call of the process fails.
_STICKY = (
    r"CUDA error: (device-side assert|an illegal memory access|unspecified launch failure|"
    r"misaligned address|uncorrectable ECC)"
)

_ALL_USED = "add 0 * sum(p.sum() for p in model.parameters()) to the loss"
# Messages of torch's that name neither the strategy nor what to write -> what to do.
_OF_TORCH = {
    r"got mixed torch\.Tensor and DTensor": (
        "Under fsdp and tp parameters are DTensors, which do not mix with plain tensors in one "
        "operation. Instead of a penalty on parameters in the loss, add its gradient between "
        "backward and step: p.grad.add_(p.detach(), alpha=...), or let the optimizer do it "
        "(weight_decay). To add up numbers of several parameters, bring each to a plain one first: "
        "number.full_tensor() where it has that, on all ranks. "
        "docs/strategies.md, Code over all parameters, has more"
    ),
    "in-place operations that require placement changes are not supported": (
        "Under fsdp and tp parameters are DTensors, and torch's Adafactor and Rprop write to them "
        "in ways that DTensors do not have. Take another optimizer (AdamW, SGD, Muon), or a "
        "strategy that leaves parameters whole: ddp, zero1 or pp"
    ),
    r"setStorage: .* out of bounds for storage of size 0": (
        "Under fsdp a block's whole parameters are let go after its forward and its backward, and "
        "a gradient of a gradient (create_graph=True) or a second pass through the same graph "
        "needs them once more. Use tp (%dist_strategy tp); under ddp every parameter then needs a "
        f"gradient: {_ALL_USED}"
    ),
    "Expected to mark a variable ready only once": (
        "Under ddp, zero1 and cp one backward belongs to one forward, and gradients are averaged "
        "in it. Instead of two backwards (retain_graph=True) add the losses and call backward "
        "once; where each loss's gradient is wanted, take torch.autograd.grad and average it: "
        "accelerator.reduce(gradient, 'mean'). Under fsdp and tp two backwards are right"
    ),
    "Expected to have finished reduction in the prior iteration": (
        "Under ddp, zero1 and cp every trained parameter needs a gradient in every backward: "
        "freeze the others before prepare, take %dist_strategy ddp --find-unused, or, under "
        f"create_graph=True, {_ALL_USED}. The same is said where the backward before has failed"
    ),
    r"(on|expected) device meta|devices?,? .*\bmeta\b": (
        "Under pp a rank has no values of other stages' parameters (they are on the device meta). "
        "Code that puts all parameters or gradients together, as LBFGS does, cannot run: use an "
        "optimizer that steps each parameter by itself (AdamW, SGD), or %dist_strategy ddp"
    ),
}

_HINTS: dict[str, Callable[[str, HasName], str]] = {
    "AcceleratorError": _gpu_error,
    "ModuleNotFoundError": _missing_module,
    "NameError": _name_of_the_notebook,
    "RuntimeError": _runtime_error,
    "ValueError": _second_accelerator,
}
