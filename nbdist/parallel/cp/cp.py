"""Context parallelism: each rank has a piece of every sequence, and the whole model."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch

from nbdist.errors import OptionError
from nbdist.parallel.base import recomputation
from nbdist.parallel.base.mesh import ParallelMesh
from nbdist.parallel.base.transform import Layouts, ModelBuild, Transform
from nbdist.parallel.cp import attention, check
from nbdist.parallel.cp.kept_watch import KeptWatch
from nbdist.parallel.cp.ulysses import check_heads
from nbdist.parallel.dp.ddp import forget_step
from nbdist.parallel.sequence import split_sequence

# What models call the number of their heads; torch's own, transformers', and usual ones.
_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead")


class ContextParallel(torch.nn.Module):
    """A model whose sequences are split over the ranks along cp; every rank calls it alike.

    Every rank gives the whole batch. Each tensor as long as the sequence in dim 1 is split
    there, in pieces that follow each other; attention spans them. Forward returns what the
    model returns for the whole sequence: a loss of torch.nn.functional is the whole one's, and
    other outputs are gathered. In training, an output that carries a loss has None for what
    would have to be gathered. Gradients are right after DDP's mean over dp_replicate and cp.

    The first call of each kind and mode is compared with the model's own forward on a short
    piece of the data. Without gradients, what cannot be split is computed whole, on each rank.

    Attributes:
        module: What computes: the user's model, or DDP around it.
    """

    def __init__(self, module: torch.nn.Module, job: ModelBuild) -> None:
        super().__init__()
        recomputation.follow(attention.as_now)
        self.module = module
        # Not registered: it is in `module` already.
        object.__setattr__(self, "_base", job.base)
        group = job.mesh.group("cp")
        assert group is not None
        self._group = group
        self._mesh: ParallelMesh = job.mesh
        compute = attention.CONTEXTS[job.choice.options.context]
        self._attend: attention.Attend = lambda problem: compute(problem, group)
        self._splits: dict[Hashable, check.OutputSplit] = {}
        self._watches: dict[Hashable, KeptWatch] = {}
        self.training = module.training

    @property
    def base(self) -> torch.nn.Module:
        """The user's own model, which `module` is or has inside."""
        model: torch.nn.Module = self.__dict__["_base"]
        return model

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside it, backward leaves gradients on this rank; as DDP's."""
        inner = getattr(self.module, "no_sync", None)
        return contextlib.nullcontext() if inner is None else inner()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result for the whole sequence. Collective: every rank.

        Raises:
            OptionError: If gradients are wanted and the sequence or the model cannot be split. In
                backward, if the loss uses what a module keeps of a piece, and that cannot be.
        """
        call = split_sequence.bind(self.base, args, kwargs)
        size = self._mesh.size("cp")
        why = split_sequence.why_whole(call, getattr(self.base, "config", None), size)
        split = None if why else self._split(call)
        if split is None or split.why:
            if torch.is_grad_enabled():
                raise OptionError(why or split.why)  # type: ignore[union-attr]
            return self.base(*args, **kwargs)
        piece = split_sequence.piece(call, self.base, self._mesh.coordinate.cp, size)
        with attention.SplitSequence(self._attend, self._group):
            output = self.module(*piece.args, **piece.kwargs)
        if torch.is_grad_enabled():
            self._watch(call, split).watch()
        return self._whole(output, split)

    def _split(self, call: inspect.BoundArguments) -> check.OutputSplit:
        # A module may do in training what it does not do in an evaluation.
        kind = check.kind(call), tuple(module.training for module in self.base.modules())
        if kind not in self._splits:
            trial = check.Trial(self.base, call, self._attend, self._mesh)
            self._splits[kind] = check.examine(trial)
        return self._splits[kind]

    def _watch(self, call: inspect.BoundArguments, split: check.OutputSplit) -> KeptWatch:
        length = split_sequence.length(call) // self._mesh.size("cp")
        key = check.kind(call), length
        if key not in self._watches:
            forget = functools.partial(forget_step, self.module)
            self._watches[key] = KeptWatch(self.base, split.is_mean, length, forget)
        return self._watches[key]

    def _whole(self, output: Any, split: check.OutputSplit) -> Any:
        """Gather or average each part of this rank's output, as the check has found."""
        tensors = list(split_sequence.tensors(output))
        if len(tensors) != len(split.dims):
            raise OptionError(
                f"forward returned {len(tensors)} tensors, but {len(split.dims)} at its first "
                "call, when it was checked against the whole sequence. Under cp it has to return "
                "the same number of tensors for the same arguments. Or use fsdp"
            )
        is_training = torch.is_grad_enabled() and self.base.training
        losses = [t for t, d in zip(tensors, split.dims, strict=True) if d is None and not t.ndim]
        keeps = not (is_training and any(loss.requires_grad for loss in losses))
        dims = iter(split.dims)

        def whole(part: torch.Tensor) -> torch.Tensor | None:
            dim = next(dims)
            if dim is not None:
                return split_sequence.all_gather(part, dim, self._group) if keeps else None
            if not part.is_floating_point():
                return part
            return split_sequence.all_reduce_mean(part, self._group)

        return split_sequence.map_tensors(whole, output)


def _plan(job: ModelBuild, layouts: Layouts) -> Layouts:
    """Changes no layout: each rank has the whole model.

    Raises:
        OptionError: Where heads cannot be split, or an option does not hold under cp.
    """
    options, degree = job.choice.options, job.choice.degrees.cp
    if options.is_compiled:
        raise OptionError(
            "--compile and a split sequence cannot be combined: attention is replaced while "
            "Python runs forward. Leave --compile out, or use fsdp"
        )
    if options.context == "ulysses":
        for n_heads in sorted(_heads(job.base)):
            check_heads(n_heads, degree)
    return layouts


def _heads(model: torch.nn.Module) -> set[int]:
    """How many heads attention has, where the model or its config says so."""
    holders = [*model.modules(), getattr(model, "config", None)]
    counts = [getattr(holder, name, None) for holder in holders for name in _HEADS]
    return {n for n in counts if isinstance(n, int) and not isinstance(n, bool) and n > 0}


STEP = Transform(plan=_plan, wrap=lambda job, outer: ContextParallel(outer, job))
