"""A model in stages: what the user calls, with the loss of one process on every rank.

A training step runs the whole of torch's schedule, backward included, inside forward. The loss
that comes out is a node of autograd whose backward hands on the gradients that are there
already, times the gradient of the loss: so dividing, scaling and adding up work as ever. Where
forward returns no loss, `outer_loss` runs the step instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from nbdist.errors import NbdistError, OptionError
from nbdist.parallel.base.absent import refuse_state_dict
from nbdist.parallel.base.transform import ModelBuild
from nbdist.parallel.libraries import router_logits
from nbdist.parallel.pp.loss_node import LossNode
from nbdist.parallel.pp.outer_loss import OuterLossStep
from nbdist.parallel.pp.pytree import FlatValue, batch_size, pack, split_batch, unpack
from nbdist.parallel.pp.shape_inference import Findings, Route, evaluate, failure_of, infer
from nbdist.parallel.pp.stage import StageModule, Stages, StageStep
from nbdist.parallel.pp.tied_gradients import GradientShare, all_reduce_tied
from nbdist.parallel.sequence.kept import user_hooks
from nbdist.strategy.validate import LOOPED

# How many shapes of batches are remembered.
_REMEMBERED = 16


SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb": ScheduleInterleavedZeroBubble,
}


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How batches of one shape run: what the first has shown; torch's object, if with a loss."""

    findings: Findings
    schedule: Any


class Pipeline(torch.nn.Module):
    """The user's model over the ranks of a pipeline. Each call is collective: all of them.

    In training, forward returns what the model does with its loss alone, the mean over the
    micro-batches: equal on every rank. So the loss must be a mean over the batch. Of a model that
    returns no loss it returns the outputs, and the backward of what is computed of them is
    collective: every rank computes the same. In eval() or
    under no_grad the whole batch goes through the stages once, and every rank gets what the
    last one's forward returned.

    An error of the model's code is raised where it happened, as it is; the other ranks of the
    pipeline raise an NbdistError that names it. Gradients are then what they were before.

    Attributes:
        module: The user's model; the other stages' parameters in it are absent.
    """

    def __init__(
        self, job: ModelBuild, count: int, holders: Mapping[str, frozenset[int] | None]
    ) -> None:
        """Take a model that is laid out and filled, in `count` stages; the job's root has our own.

        `holders` are coordinates along pp by each parameter's first name; None for all.
        """
        super().__init__()
        self.module = job.base
        group = job.mesh.group("pp")
        assert group is not None
        ranks = job.choice.degrees.pp
        self._route = Route(group, job.mesh.coordinate.pp, ranks, count, job.device)
        self._job = job
        self._holders = holders
        self._plans: dict[Any, PipelinePlan] = {}
        self._warned: set[Any] = set()
        # Whatever this rank trains, its loss has a gradient if any rank's has.
        self._anchor = torch.zeros((), device=job.device, requires_grad=True)
        blocks, here = self._parts[0].blocks, {n for part in self._parts for n in part.span}
        self._elsewhere = [
            (f"{blocks.block_name(position)}.{path}".rstrip("."), module)
            for position, block in enumerate(blocks.modules)
            if position not in here
            for path, module in block.named_modules()
        ]
        for part in self._parts:
            part.finish(job.base, job.root, job.device)
        refuse_state_dict(job.base)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's loss in training, if it returns one; otherwise its own output.

        Raises:
            NbdistError: The model has failed on another rank, uses what its stage does not have,
                or ranks were given different batches.
            OptionError: The batch cannot be cut into the micro-batches that were asked for, or the
                model is to return router logits.
        """
        self._tell_unheard_hooks()
        if router_logits.are_asked(getattr(self.module, "config", None), kwargs):
            raise OptionError(
                "output_router_logits: each stage of a pipeline has the router logits of its own "
                "layers, and the last one would compute the auxiliary loss of these alone. "
                f"{router_logits.WITHOUT}"
            )
        batch = pack((args, kwargs))
        if self.training and torch.is_grad_enabled():
            trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
            if trained:
                return self._train(batch, trained)
        with torch.no_grad():
            output = evaluate(self._root, batch, self._route)
        if self.training:
            self._send_buffers()
        return output

    @property
    def _root(self) -> Stages:
        """Not a child: it has the same parameters as the module."""
        assert isinstance(self._job.root, Stages)
        return self._job.root

    @property
    def _parts(self) -> tuple[StageModule, ...]:
        return tuple(self._root.parts)  # type: ignore[arg-type]

    def _train(self, batch: FlatValue, trained: Mapping[str, torch.nn.Parameter]) -> Any:
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in batch.leaves):
            raise NbdistError(
                "an argument of forward requires a gradient, and a pipeline gives none to its "
                "inputs: make it a parameter or the result of a module inside the model, or "
                "detach() it"
            )
        count = self._count(batch_size(batch))
        pieces = split_batch(batch, count)
        plan = self._plan_for(pieces)
        if plan.findings.has_loss and count > 1 and batch_size(pieces[0]) == 1:
            # The only row of a micro-batch may be squeezed to a scalar, which is no loss.
            whole = self._plan_for([batch])
            if not whole.findings.has_loss:
                pieces, plan = [batch], whole
        self._tell_moving(plan.findings.moving, len(pieces))
        shares = [
            GradientShare(parameter, self._holders[name], None)
            for name, parameter in trained.items()
            if not parameter.is_meta
        ]
        if not plan.findings.has_loss:
            return self._outputs(batch, pieces, plan, shares)
        scaler = getattr(self._job.accelerator, "scaler", None)
        scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0
        loss = self._run(plan, pieces, shares, scale)
        self._send_buffers()
        parameters = [share.parameter for share in shares]
        gradients = [share.gradient for share in shares]
        loss = LossNode.apply(loss, 1 / scale, gradients, self._anchor, *parameters)  # type: ignore[no-untyped-call]
        return unpack(plan.findings.skeleton, [loss])

    def _run(
        self,
        plan: PipelinePlan,
        pieces: Sequence[FlatValue],
        shares: Sequence[GradientShare],
        scale: float,
    ) -> torch.Tensor:
        """Run the schedule: the loss is returned, gradients go into the shares."""
        for part, (incoming, outgoing) in zip(self._parts, plan.findings.borders, strict=True):
            part.incoming, part.outgoing = incoming, outgoing
            part.current = StageStep(pieces, scale / len(pieces))
        before = [share.parameter.grad for share in shares]
        for share in shares:
            share.parameter.grad = None
        try:
            self._run_schedule(plan.schedule, len(pieces))
            loss = self._agree(plan.findings.dtype)
            for share in shares:
                share.gradient = share.parameter.grad
        except BaseException:
            # It may have stopped anywhere: the next step begins with new ones.
            self._plans.clear()
            raise
        finally:
            for share, gradient in zip(shares, before, strict=True):
                share.parameter.grad = gradient
            for part in self._parts:
                part.current = StageStep()
        all_reduce_tied(shares, self._route.group)
        return loss

    def _outputs(
        self,
        batch: FlatValue,
        pieces: Sequence[FlatValue],
        plan: PipelinePlan,
        shares: Sequence[GradientShare],
    ) -> Any:
        """Return forward's result, for a loss outside of it (`OuterLossStep`)."""
        if len(pieces) > 1:
            whole = self._plan_for([batch])
            if not _is_cut(plan.findings, whole.findings, len(pieces)):
                pieces, plan = [batch], whole
        for part, (incoming, outgoing) in zip(self._parts, plan.findings.borders, strict=True):
            part.incoming, part.outgoing = incoming, outgoing
            part.current = StageStep(pieces, has_loss=False)
        step = OuterLossStep(self._parts, self._route, shares)
        try:
            step.run(len(pieces))
            self._agree(plan.findings.dtype)
            outputs = step.outputs(self._anchor)
        except BaseException:
            self._plans.clear()
            raise
        finally:
            for part in self._parts:
                part.current = StageStep()
        self._send_buffers()
        return outputs

    def _run_schedule(self, schedule: Any, count: int) -> None:
        numbers = torch.arange(count)
        # torch calls its loss function with a target or not at all.
        target = {"target": numbers} if self._parts[-1].is_last else {}
        try:
            schedule.step(number=numbers, return_outputs=False, **target)
        except RuntimeError as error:
            # torch's own text around the model's error is pages long.
            if error.__cause__ is not None and "ailed to run" in str(error):
                raise error.__cause__ from None
            raise

    def _agree(self, dtype: torch.dtype) -> torch.Tensor:
        """The mean loss, on every rank; raises on every rank if the model failed on one."""
        losses = [loss for part in self._parts for loss in part.current.losses]
        errors = [(part.index, part.current.failure) for part in self._parts]
        failures = [(index, error) for index, error in errors if error is not None]
        totals = torch.zeros(2, dtype=dtype, device=self._route.device)
        totals[1] = bool(failures)
        if losses and not failures:
            totals[0] = torch.stack(losses).mean()
        dist.all_reduce(totals, group=self._route.group)
        if not totals[1].item():
            return totals[0]
        own_report = failure_of(*failures[0]) if failures else None
        reports: list[NbdistError | None] = [None] * self._route.ranks
        dist.all_gather_object(reports, own_report, group=self._route.group)
        raise failures[0][1] if failures else next(filter(None, reports))

    def _plan_for(self, pieces: Sequence[FlatValue]) -> PipelinePlan:
        leaves = [leaf for leaf in pieces[0].leaves if isinstance(leaf, torch.Tensor)]
        kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        kind = self._route.device.type
        lowered = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = len(pieces), pieces[0].skeleton, kinds, lowered
        if self._is_known_everywhere(key, len(pieces)):
            return self._plans[key]
        is_halved = self._job.choice.options.schedule == "zb"
        findings = infer(self._root, pieces[0], self._route, self.module, is_halved=is_halved)
        schedule = self._schedule(findings, len(pieces)) if findings.has_loss else None
        plan = PipelinePlan(findings, schedule)
        self._plans.pop(key, None)
        self._plans[key] = plan
        if len(self._plans) > _REMEMBERED:
            del self._plans[next(iter(self._plans))]
        return plan

    def _is_known_everywhere(self, key: Any, count: int) -> bool:
        """Agree on a first run: ranks that gather parameters together all make it, or none."""
        group = self._job.mesh.group("dp_replicate", "dp_shard")
        if group is None:
            return key in self._plans
        extremes = torch.tensor([key not in self._plans, count, -count], device=self._route.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        is_new, most, least = extremes.tolist()
        if most != -least:
            raise NbdistError(
                f"data parallel ranks have batches of different sizes ({-least} and {most} "
                "micro-batches), and run their blocks together. Make the batches equal: "
                "drop_last=True leaves out a short last one"
            )
        return not is_new

    def _schedule(self, findings: Findings, count: int) -> Any:
        route, parts = self._route, self._parts
        loss = torch.empty((), dtype=findings.dtype, device="meta")
        for part, names in zip(parts, findings.whole, strict=True):
            if names and part.index not in self._warned:
                self._warned.add(part.index)
                warnings.warn(
                    f"--schedule zb: stage {part.index} uses {names[0]} more than once, and torch "
                    "cannot run such a backward in two halves. It runs in one there: correct, "
                    "but with the bubble that zb avoids.",
                    stacklevel=2,
                )
        stages = [
            PipelineStage(
                part if len(parts) > 1 else self._root,
                part.index,
                route.stages,
                route.device,
                # With both given torch does not run the model to find shapes.
                input_args=() if incoming is None else incoming.examples(),
                output_args=loss if outgoing is None else outgoing.examples(),
                group=route.group,
                # With it torch runs the whole backward first, and nothing in the second half.
                dw_builder=(lambda: lambda: None) if names else None,
            )
            for part, (incoming, outgoing), names in zip(
                parts, findings.borders, findings.whole, strict=True
            )
        ]
        name = self._job.choice.options.schedule
        if name == "1f1b" and count < route.stages:
            name = "gpipe"  # the same order then, which torch's 1F1B refuses to make
        argument = stages if name in LOOPED else stages[0]
        # The micro-batches' losses are divided beforehand, so torch need not divide gradients.
        return SCHEDULES[name](
            argument, count, loss_fn=lambda output, _target: output, scale_grads=False
        )

    def _tell_unheard_hooks(self) -> None:
        """Warn, once for each, of the user's forward hooks on modules of other stages."""
        names = [
            name
            for name, module in self._elsewhere
            if name not in self._warned and user_hooks(module)
        ]
        if names:
            self._warned.update(names)
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            warnings.warn(
                f"forward hooks on {', '.join(names[:2])}{more} are not called on this rank: other "
                "stages of the pipeline run these modules. A hook catches something on one rank "
                "alone, so what the loss needs has to be returned by forward; or use ddp or fsdp.",
                stacklevel=2,
            )

    def _tell_moving(self, moving: Mapping[str, int], count: int) -> None:
        """Warn, once for each buffer, that a step changes it as often as it has micro-batches."""
        names = [name for name in sorted(moving) if name not in self._warned]
        if names and count > 1:
            self._warned.update(names)
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            warnings.warn(
                f"forward changes buffers ({', '.join(names[:2])}{more}), and a pipeline runs it "
                f"once per micro-batch: {count} times in a step of this batch, each time with the "
                "statistics of a part of it. --microbatches 1 changes them once, as in one "
                "process; or take a strategy that cuts no batch, such as fsdp.",
                stacklevel=2,
            )

    def _count(self, size: int) -> int:
        """How many micro-batches: by itself as many as divide the batch, two per rank at most.

        More keep stages busy for longer; fewer compute faster each.
        """
        wanted = self._job.choice.options.microbatches
        if wanted is None:
            return next(n for n in range(2 * self._route.ranks, 0, -1) if size % n == 0)
        if size % wanted == 0:
            return wanted
        fitting = [str(n) for n in range(1, size + 1) if size % n == 0]
        raise OptionError(
            f"a batch of {size} cannot be cut into {wanted} micro-batches of one size. Use "
            f"--microbatches {' or '.join(fitting[-4:])}, or batches of a multiple of {wanted}; "
            "drop_last=True leaves out a short last one"
        )

    def _send_buffers(self) -> None:
        """Buffers that all ranks hold and forward changes: each is right on one of them."""
        moving: dict[str, int] = {}
        for plan in self._plans.values():
            moving.update(plan.findings.moving)
        for name, rank in sorted(moving.items()):
            if self._holders[name] is None:
                buffer = self.module.get_buffer(name)
                dist.broadcast(buffer, group=self._route.group, group_src=rank)


def _is_cut(piece: Findings, whole: Findings, count: int) -> bool:
    """Whether outputs of micro-batches, one behind the other, are those of the whole batch."""
    return piece.skeleton == whole.skeleton and all(
        part and part[1:] == all_rows[1:] and part[0] * count == all_rows[0]
        for part, all_rows in zip(piece.shapes, whole.shapes, strict=True)
    )
