"""Options of any strategy: checkpointing, compile, the attention's kernel, the fused optimizer."""

from __future__ import annotations

import os
import shutil
from typing import Any
from weakref import WeakKeyDictionary

import torch

from nbdist.errors import OptionError
from nbdist.parallel.base.activation_checkpointing import blocks_to_checkpoint, checkpoint_block
from nbdist.parallel.base.blocks import BlockList, candidates, find_blocks
from nbdist.parallel.base.sdpa import choose_backend, refuse_backend
from nbdist.parallel.base.transform import Layouts, ModelBuild, Transform

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def _plan(job: ModelBuild, layouts: Layouts) -> Layouts:
    """Changes no layout; refuses what the model or the device does not have."""
    options = job.choice.options
    refuse_backend(job)
    if options.checkpoint:
        blocks_to_checkpoint(options.checkpoint, _blocks(job, f"--checkpoint {options.checkpoint}"))
    if options.is_compiled:
        _blocks(job, "--compile")
        # torch.compile makes C++ for the CPU, at the first step: too late to say that it cannot.
        compiler = os.environ.get("CXX") or "g++"
        if job.device.type == "cpu" and not (shutil.which(compiler) or shutil.which("clang++")):
            raise OptionError(
                f"--compile: there is no C++ compiler ({compiler}) on this machine, and the CPU "
                "needs one. Install g++, or leave --compile out."
            )
    return layouts


def _lay_out(job: ModelBuild) -> None:
    """Set the forward of blocks and of the root; no parameter is touched.

    From inside to outside of a block: attention's kernel, computed again, compiled. The
    kernel is chosen inside too, because what is computed again runs outside of the root.
    """
    options = job.choice.options
    present = set(job.root.modules())
    if options.checkpoint:
        blocks = find_blocks(job.base, options.blocks)
        for block in blocks_to_checkpoint(options.checkpoint, blocks):
            if block in present:
                checkpoint_block(block, options.checkpoint, options.sdpa)
    if options.is_compiled:
        for block in dict.fromkeys(find_blocks(job.base, options.blocks).modules):
            if block in present:
                block.compile()
    if options.sdpa:
        # A compiled block's calls are not seen.
        choose_backend(job.root, options.sdpa, is_checked=not options.is_compiled)


def _blocks(job: ModelBuild, what: str) -> BlockList:
    if not job.choice.options.blocks and not candidates(job.base):
        try:
            return find_blocks(job.base)
        except OptionError as error:
            raise OptionError(f"{what} works block by block. {error}") from None
    return find_blocks(job.base, job.choice.options.blocks)


# What an optimizer's groups said, in order, while its step is fused by `set_fused`.
_before: WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()


def refuse_fused(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Refuse an optimizer that has no fused step on this device. Changes nothing.

    Raises:
        OptionError: Lists the optimizers that have one.
    """
    name = type(optimizer).__name__
    choices = ", ".join(kind.__name__ for kind in _FUSED)
    if not isinstance(optimizer, _FUSED):
        raise OptionError(
            f"--fused: {name} has no fused step. Use one of {choices}, or leave --fused out."
        )
    if isinstance(optimizer, torch.optim.Adagrad) and device.type != "cpu":
        raise OptionError(
            "--fused: Adagrad's fused step runs on the CPU only. Leave --fused out, or use "
            "Adam, AdamW or SGD."
        )
    if any(group["differentiable"] for group in optimizer.param_groups):
        raise OptionError(
            f"--fused: this {name} was made with differentiable=True, which a fused step does "
            "not support. Leave one of the two out."
        )


def set_fused(optimizer: torch.optim.Optimizer, *, is_on: bool) -> None:
    """Switch an optimizer's fused step on, or back to what the user made it with.

    Edits its groups in place and moves each parameter's step count to where its step looks
    for it. Numbers stay the same. Also to be called when parameters have moved to another
    device, or groups were added. No rank is met.

    Raises:
        OptionError: As `refuse_fused`, before anything changes.
    """
    groups = optimizer.param_groups
    if is_on:
        for device in {p.device for group in groups for p in group["params"]}:
            refuse_fused(optimizer, device)
        before = _before.setdefault(optimizer, [])
        before += [{key: g[key] for key in ("fused", "foreach")} for g in groups[len(before) :]]
        for group in groups:
            group.update(fused=True, foreach=False)
    else:
        for group, old in zip(groups, _before.pop(optimizer, []), strict=False):
            group.update(old)
    for group in groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(step_device(group, parameter))


def step_device(group: dict[str, Any], parameter: torch.Tensor) -> torch.device:
    """Choose the device on which a group's optimizer expects a parameter's count of steps.

    With the parameter where a kernel counts, else in the host's memory, which Python reads:
    torch.optim.adam, "special device hosting for step".
    """
    is_in_kernel = group.get("fused") or group.get("capturable")
    return parameter.device if is_in_kernel else torch.device("cpu")


STEP = Transform(plan=_plan, lay_out=_lay_out)
