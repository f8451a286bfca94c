"""Ranks that share one copy of a model have to call it with the same inputs.

Each of them computes a part of the model, or of the sequence: with inputs of its own the result
belongs to no batch, and no collective fails. The first training step of a prepared model is
compared before it runs; of later calls lints/rank/model_inputs notes what went in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbdist.core.ranks import rank_label
from nbdist.errors import NbdistError
from nbdist.parallel.base import events
from nbdist.parallel.base.tensors import digest
from nbdist.parallel.base.transform import ModelBuild
from nbdist.parallel.sequence.split_sequence import tensors

# In this order; a pipeline alone compares its ranks' batches itself, with every new shape.
_COMPARED_AXES = ("cp", "tp", "pp")


def watch_inputs(job: ModelBuild, outer: torch.nn.Module) -> None:
    """Look at what a model is called with, where ranks share a copy of it. This rank alone."""
    degrees = job.choice.degrees
    if job.choice.name == "single" or degrees.dp == degrees.product:
        return
    axes = _COMPARED_AXES if degrees.cp * degrees.tp > 1 else ()
    groups = [group for axis in axes if (group := job.mesh.group(axis)) is not None]
    hook = InputHook(groups, degrees.peers(job.mesh.rank, "pp", "cp", "tp"))
    outer.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


class InputHook:
    """The forward hook of a prepared model; a copy or a pickled one does nothing."""

    def __init__(self, groups: Sequence[dist.ProcessGroup] = (), ranks: Sequence[int] = ()) -> None:
        """Compare the first training step in `groups`; `ranks` share this copy of the model."""
        self._groups = groups
        self._ranks = ranks
        self._is_compared = False

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Before each forward. Collective in the first one with gradients: the ranks of a copy.

        Raises:
            NbdistError: The ranks' inputs differ; on all of them.
        """
        if not self._ranks or torch.compiler.is_compiling():
            return
        # Others are fake, in a plan's own process, or DTensors, which are parts.
        inputs = [each for each in tensors((args, kwargs)) if type(each) is torch.Tensor]
        if not inputs:
            return
        if not self._is_compared and torch.is_grad_enabled():
            if self._groups:
                self._refuse_different(digest(inputs))
            self._is_compared = True
        for act in events.on_inputs:
            act(module, inputs, self._ranks)

    def _refuse_different(self, own_digest: str) -> None:
        """Compare along one axis after the other; what one finds goes on along the next."""
        is_apart = False
        for group in self._groups:
            reports: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(reports, (own_digest, is_apart), group=group)
            digests = {each for each, _ in reports}
            is_apart = len(digests) > 1 or any(apart for _, apart in reports)
        if is_apart:
            raise different_inputs(self._ranks)

    def __deepcopy__(self, _memo: object) -> InputHook:
        return InputHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return InputHook, ()


def different_inputs(ranks: Sequence[int]) -> NbdistError:
    """Build the error of ranks that share one copy of a model but got different inputs."""
    return NbdistError(
        f"Ranks {rank_label(ranks)} share one copy of the model and were given different inputs: "
        "each computes a part of the model with its own, so the loss belongs to no batch. Take "
        "batches from a prepared DataLoader, share them out with "
        "accelerator.split_between_processes, or make them alike on these ranks "
        "(torch.manual_seed(0) before they are drawn)"
    )
