"""One step of the live models under the strategy, and again as one process: what differs.

    under the strategy     hooks on every module, masks of dropout drawn and not used
    as one process         the same models switched to `single`, or to `fsdp` where that has no
                           room (references); each forward gets the batches of all data-parallel
                           ranks (whole_batch)
    with moved inputs      that again, inputs moved by one unit in the last place: how far
                           rounding alone can get (perturbation analysis)
    once more as it was    only where something differs: whether the step is the same twice

Weights, optimizers, loaders, random generators and the strategy are put back after each.
"""

from __future__ import annotations

import contextlib
import functools
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import set_seed

from nbdist.core.finding import Finding
from nbdist.errors import OptionError
from nbdist.hang.rank import reset_models
from nbdist.parallel.accelerator.accelerator import Accelerator
from nbdist.parallel.base.consensus import all_gather_object, rank
from nbdist.parallel.base.tensors import digest, like, local_of
from nbdist.parallel.dp import fsdp
from nbdist.parallel.live import build, fsdp1_state, registry
from nbdist.parallel.live.live_models import find
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.live.training_step import inputs_of, loss_of, optimizer_of, random_tokens
from nbdist.parallel.reshard.full_state import local_state
from nbdist.parallel.sequence.split_sequence import tensors
from nbdist.rpc.rank import namespace, progress
from nbdist.strategy.choice import Strategy, described
from nbdist.switch.rank import saved_state
from nbdist.switch.rank.commit import display_name
from nbdist.switch.rank.switch import switch
from nbdist.verification.differences import (
    GRADIENT,
    INPUT,
    OUTPUT_GRADIENT,
    PARAMETER,
    ROUNDINGS,
    Row,
    TensorKey,
    first_outside,
    problems,
    rows,
)
from nbdist.verification.draws import Draw, draw_problems
from nbdist.verification.losses import (
    LossTerm,
    OuterCall,
    code_finding,
    share_findings,
    weight_finding,
)
from nbdist.verification.optimizers import StateApart
from nbdist.verification.rank import compare, references
from nbdist.verification.rank.capture import ROOT, Capture, gradients_of
from nbdist.verification.rank.compare import Sides, StepRun
from nbdist.verification.rank.dropouts import dropped_out
from nbdist.verification.rank.exchange import Exchange, ReferenceMemoryError, is_memory_error
from nbdist.verification.rank.outer_code import OuterCode
from nbdist.verification.rank.pieces import RankShare
from nbdist.verification.rank.whole_batch import Peers, Samples, WholeBatch
from nbdist.verification.verdict import (
    FSDP,
    SINGLE,
    AxisEvidence,
    ModuleLine,
    StepFacts,
    StepRequest,
    Verification,
    conclude,
)

NAME = "verify"
# So many units in the last place: where moved inputs move more, something else may move as well.
_SUSPECT = 256.0
_MOST_NAMED = 4
_EPS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class _Pass:
    """One run of the step.

    Attributes:
        runs: Model by model.
        draws: The masks of dropout.
        samples: Model by model: (first, behind the last, all) of all ranks' batches.
        digests: What went into each forward of each model.
        are_equal: All data-parallel ranks had the same batch.
        terms, calls: Of the code around the models, in the reference.
    """

    runs: list[StepRun]
    draws: list[Draw]
    elapsed_s: float = 0.0
    samples: tuple[Samples, ...] = ()
    digests: tuple[str, ...] = ()
    are_equal: bool = False
    terms: tuple[LossTerm, ...] = ()
    calls: frozenset[OuterCall] = frozenset()


def verify(request: StepRequest) -> Verification:
    """Compare a step of the live models with the same step of one process. Collective: every rank.

    Everything is put back, however it ends.

    Raises:
        OptionError: There is no prepared model, it cannot run as one process, or nobody knows
            what it is called with.
        NbdistError: What the step raised on this rank or on another.
    """
    models, before = registry.prepared(), registry.current()
    if not models:
        raise OptionError(
            "There is no prepared model to verify. Prepare one on all ranks first: "
            "model = accelerator.prepare(model)."
        )
    reference = references.reference_of(before, request.against or SINGLE)
    if before.options.is_compiled:
        raise OptionError(
            "Hooks see nothing inside of modules that --compile has compiled. Verify without it: "
            f"%dist_strategy {before.name}, and compile again afterwards."
        )
    _refuse_changed(models)
    step = _step_of(request, models)
    with progress.during(NAME, is_whole=True), _everything_put_back(models):
        return _Verifier(request, models, before, reference, step).run()


class _Verifier:
    """The runs of one verification, and what follows from them."""

    def __init__(
        self,
        request: StepRequest,
        models: list[Prepared],
        before: Strategy,
        reference: Strategy,
        step: Callable[[], None],
    ) -> None:
        self._request = request
        self._models = models
        self._before = before
        self._step = step
        self._reference = reference
        self._note = ""
        self._states: tuple[StateApart, ...] = ()
        self._eps = _eps_of(before, models)
        self._methods = [references.methods_of(model.outer) for model in models]
        self._accelerators = [w for w in registry.watchers() if isinstance(w, Accelerator)]
        steps = (accelerator.gradient_accumulation_steps for accelerator in self._accelerators)
        self._accumulate = max(before.options.accumulate, *steps, 1)
        self._n_calls = 1  # of the user's code until an optimizer has stepped

    def run(self) -> Verification:
        """Run the step three times, four where something differs."""
        here = self._pass("the step under the strategy", self._before)
        reference = self._first_reference()
        moved = self._pass("the reference with moved inputs", self._reference, self._eps)
        sides = [self._sides(number, here, reference, moved) for number in range(len(self._models))]
        differences = tuple(
            replace(d, key=replace(d.key, name=side.prefix + d.key.name))
            for side in sides
            for d in compare.differences(side)
        )
        reports = all_gather_object(differences)
        all_rows = rows(reports, self._eps)
        first = first_outside(all_rows)
        varying = self._varying(sides, first, reference)
        facts = self._facts(sides, first, (here, reference, moved))
        facts = replace(facts, varying=varying)
        return conclude(
            Verification(
                strategy=described(self._before),
                reference=described(self._reference),
                rows=all_rows,
                not_compared=problems(reports),
                first=first,
                place=_place(sides, first, varying),
                eps=self._eps,
                n_steps=reference.runs[0].captured.n_steps,
                step_s=here.elapsed_s,
                reference_s=reference.elapsed_s,
                host_bytes=max(all_gather_object(_size_bytes(here, reference, moved))),
                note=self._note,
                degrees=self._before.degrees,
                accumulate=self._accumulate,
                n_calls=self._n_calls,
            ),
            facts,
        )

    def _first_reference(self) -> _Pass:
        """Run the step as one process; under fsdp where that lacks room and none was asked for."""
        what, is_free = "the reference", not self._request.against
        if is_free and (note := references.memory_note(self._reference)):
            self._take_fsdp(note)
            is_free = False
        try:
            return self._pass(what, self._reference)
        except ReferenceMemoryError as error:
            if not is_free:
                raise
            self._take_fsdp(references.failure_note(error))
        return self._pass(what, self._reference)

    def _take_fsdp(self, note: str) -> None:
        self._reference = references.reference_of(self._before, FSDP)
        self._note = note

    def _varying(self, sides: list[Sides], first: Row | None, reference: _Pass) -> str | None:
        """The first module that a second run of the reference changes; run only where it may."""
        limit = _SUSPECT * self._eps
        is_suspect = first is not None or any(compare.furthest(side) > limit for side in sides)
        if not any(all_gather_object(is_suspect)):
            return None
        again = self._pass("the reference once more", self._reference)
        limit = ROUNDINGS * self._eps
        names = all_gather_object(compare.varying(reference.runs, again.runs, limit))
        return next((name for name in names if name is not None), None)

    def _facts(
        self, sides: list[Sides], first: Row | None, passes: tuple[_Pass, _Pass, _Pass]
    ) -> StepFacts:
        """Gather the facts that decide the kind of a difference. Collective: every rank."""
        here, reference, moved = passes
        evidence: list[tuple[AxisEvidence, ...]] = []
        if first is not None:
            evidence = all_gather_object(compare.evidence(*_side_of(sides, first.key)))
        are_apart = _are_apart(here, reference) or (here.digests and _are_apart(reference, moved))
        return StepFacts(
            evidence=tuple(evidence),
            apart=tuple(
                all_gather_object(tuple(n for side in sides for n in compare.apart_before(side)))
            ),
            draws=draw_problems(
                all_gather_object(here.draws), self._before.degrees, reference.draws
            ),
            is_same_batch=reference.are_equal,
            are_other_inputs=any(all_gather_object(bool(are_apart))),
            outer=tuple(self._outer_findings(reference)),
            settings=tuple(all_gather_object(here.runs[0].captured.settings)),
            states=self._states,
        )

    def _outer_findings(self, reference: _Pass) -> Iterator[Finding]:
        """Findings in the code around the models. Collective: every rank."""
        degrees = self._before.degrees
        peers = {_data_peers(self._before, number) for number in range(degrees.product)}
        terms = all_gather_object(reference.terms)
        yield from share_findings(terms, peers)
        weights = (weight_finding(of_rank, self._accumulate) for of_rank in terms)
        yield from filter(None, (next(filter(None, weights), None),))
        if code_finding(all_gather_object(reference.calls), peers) is None:
            return
        # Code that asks for a random number is no code by rank: once more, all with one seed.
        again = self._pass("the reference with one seed", self._reference, is_seeded=True)
        finding = code_finding(all_gather_object(again.calls), peers)
        if finding is not None:
            yield finding

    def _sides(self, number: int, here: _Pass, reference: _Pass, moved: _Pass) -> Sides:
        degrees = self._before.degrees
        share = RankShare(degrees, degrees.coordinate(rank()), reference.samples[number])
        weight = float(degrees.dp * degrees.cp)
        if degrees.pp > 1 and (root := _root_weight_of(reference.runs[number])):
            weight /= root  # a pipeline's backward knows nothing of what its loss is divided by
        return Sides(
            self._models[number], here.runs[number], reference.runs[number], moved.runs[number],
            share, weight, _prefix(self._models, number),
        )  # fmt: skip

    def _pass(
        self, what: str, choice: Strategy, moved_eps: float = 0.0, *, is_seeded: bool = False
    ) -> _Pass:
        """Make the step under a strategy, and put everything back."""
        progress.tell(what)
        is_reference = choice is self._reference
        try:
            if is_reference:
                self._states = tuple(references.take_rank_0s(self._models))
                _switch(choice)
            if is_seeded:
                set_seed(0)
            return self._captured(is_reference=is_reference, moved_eps=moved_eps)
        except BaseException:
            _reset_broken(self._models)
            raise
        finally:
            saved_state.clear_new_variables()
            if is_reference:
                switch(self._before)
            saved_state.restore_training_state()

    def _captured(self, *, is_reference: bool, moved_eps: float) -> _Pass:
        exchange = Exchange()
        ranks = _data_peers(self._before, rank())
        captures = [Capture(model, moved_eps=moved_eps) for model in self._models]
        befores = [_values(model) for model in self._models]
        whole_batches = [
            WholeBatch(model.base, ranks.index(rank()), Peers(ranks, exchange), capture)
            for model, capture in zip(self._models, captures, strict=True)
            if is_reference
        ]
        with contextlib.ExitStack() as stack:
            draws = stack.enter_context(dropped_out(captures[0].current_module))
            for model in self._models:
                model.base.zero_grad(set_to_none=True)
            for capture in captures:
                stack.enter_context(capture.attached())
            for whole in whole_batches:
                stack.enter_context(whole.attached())
            outer = OuterCode([model.base for model in self._models], self._accumulate)
            if is_reference:
                stack.enter_context(outer.attached())
                for model, names in zip(self._models, self._methods, strict=True):
                    stack.enter_context(references.answering(model.base, names))
            inputs = [stack.enter_context(_inputs_watched(model)) for model in self._models]
            if is_reference:
                stack.enter_context(registry.data_shared_as(self._before))
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            gather = exchange.gather if is_reference else all_gather_object
            make = functools.partial(self._steps, captures, gather)
            elapsed_s = exchange.run(make) if is_reference else make()
        _refuse_changed(self._models)
        runs = self._runs(captures, befores, is_reference=is_reference)
        digests = tuple(digest for watched in inputs for digest in watched.digests)
        if not whole_batches:
            return _Pass(runs, draws, elapsed_s, digests=digests)
        return _Pass(
            runs, draws, elapsed_s, tuple(whole.samples for whole in whole_batches), digests,
            {True} == {is_equal for whole in whole_batches for is_equal in whole.are_equal},
            tuple(outer.terms), outer.calls,
        )  # fmt: skip

    def _runs(
        self, captures: list[Capture], befores: list[dict[str, torch.Tensor]], *, is_reference: bool
    ) -> list[StepRun]:
        """Captured runs; of a reference whole tensors, and rank 0's. Collective: every rank."""
        runs = [
            StepRun(capture.captured, before, _values(model))
            for model, capture, before in zip(self._models, captures, befores, strict=True)
        ]
        for model, run in zip(self._models, runs if is_reference else (), strict=is_reference):
            if self._reference.name == FSDP:
                run.captured.gradients = references.gathered(model, run.captured.gradients)
                run.before = references.gathered(model, run.before)
                run.after = references.gathered(model, run.after)
            compare.compute_as_rank_0(run)
        return runs

    def _steps(self, captures: list[Capture], gather: Callable[[int], list[int]]) -> float:
        """Make the steps; modules are watched in the first. How long that took.

        A call of the user's that is one micro-batch is made until an optimizer has stepped.
        """
        for accelerator in self._accelerators:  # not in the middle of a step, as in the reference
            accelerator.step, accelerator.sync_gradients = 0, True
        began_s = time.perf_counter()
        for n_calls in range(1, self._accumulate + 1):
            self._step()
            n_steps = max(capture.captured.n_steps for capture in captures)
            if n_calls == self._accumulate or any(gather(n_steps)):
                break
        self._n_calls = n_calls
        elapsed_s = time.perf_counter() - began_s
        for model, capture in zip(self._models, captures, strict=True):
            capture.remove()
            if not capture.captured.n_steps:  # nothing has stepped, so nothing has cleared them
                capture.captured.gradients = gradients_of(model)
        for _ in range((self._request.n_steps - 1) * n_calls):
            self._step()
        return elapsed_s


def _switch(choice: Strategy) -> None:
    """To the reference; on all ranks a ReferenceMemoryError where one of them has no room."""
    try:
        switch(choice)
    except Exception as error:  # on all ranks: a switch ends alike everywhere
        if any(all_gather_object(is_memory_error(error))):
            raise ReferenceMemoryError(str(error)) from error
        raise


def _refuse_changed(models: list[Prepared]) -> None:
    """Parameters that came or went after prepare are under no strategy. Collective: every rank."""
    names = {
        f"{name} of {display_name(model.built)}"
        for model in models
        for name in build.names_of(model.base).keys() ^ model.built.names.keys()
    }
    changed = sorted(set().union(*all_gather_object(names)))
    if changed:
        more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
        raise OptionError(
            f"{', '.join(changed[:_MOST_NAMED])}{more} came or went after prepare(): the strategy "
            "knows nothing of such parameters, so ranks train them apart, and there is nothing to "
            "compare with. Change the model first and prepare it then; %dist_reset starts afresh."
        )


def _reset_broken(models: list[Prepared]) -> None:
    """Let models be ready for a switch after half a step: fsdp leaves parameters gathered."""
    modules = {m for model in models for m in (model.base, model.outer, model.built.job.root)}
    reset_models.reset(tuple(named for named in find() if named.module in modules))


def _size_bytes(*passes: _Pass) -> int:
    return sum(run.size_bytes for each in passes for run in each.runs)


def _data_peers(choice: Strategy, number: int) -> tuple[int, ...]:
    """The ranks whose batches make up the whole one with that of rank `number`, in order."""
    if choice.name == "single":
        return (number,)
    return choice.degrees.peers(number, "dp_replicate", "dp_shard")


def _step_of(request: StepRequest, models: list[Prepared]) -> Callable[[], None]:
    """The user's step, or one forward, backward and optimizer's step of the only model."""
    if request.code:
        program = compile(request.code, "<step>", "exec")
        return lambda: exec(program, namespace.everything())  # noqa: S102  # the user's own line
    if len(models) > 1:
        names = ", ".join(display_name(model.built) for model in models)
        raise OptionError(
            f"There are several prepared models ({names}), and nobody knows which step is meant. "
            "Say it after two dashes: %dist_verify -- train_step(batch)"
        )
    model = models[0]
    args, kwargs = inputs_of(request.inputs)
    if args is None:
        place = registry.current().degrees.coordinate(rank())
        index = place.dp_replicate * registry.current().degrees.dp_shard + place.dp_shard
        args, kwargs = random_tokens(model.base, request.batch, request.sequence, seed=index)

    def step() -> None:
        optimizer = optimizer_of(model.base, model)
        loss = loss_of(model.outer(*args, **kwargs))
        loss.backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


@contextlib.contextmanager
def _everything_put_back(models: list[Prepared]) -> Iterator[None]:
    """Restore all that a step and a switch change, gradients too, however the block ends."""
    gradients = [
        {
            name: (parameter.grad, local_of(parameter.grad).clone())
            for name, parameter in model.parameters.items()
            if parameter.grad is not None
        }
        for model in models
    ]
    saved_state.save_training_state()
    try:
        yield
    finally:
        saved_state.discard_training_state()
        for model, saved in zip(models, gradients, strict=True):
            for name, (gradient, local) in saved.items():
                model.parameters[name].grad = like(gradient, local)


class _InputDigests:
    """Digests of the inputs of a model's forwards on this rank, to compare two runs of a step."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    def __call__(self, _outer: Any, args: Any, kwargs: Any) -> None:
        """Note the arguments of a call."""
        values = list(tensors((args, kwargs)))
        self.digests.append(digest(values))


@contextlib.contextmanager
def _inputs_watched(model: Prepared) -> Iterator[_InputDigests]:
    watched = _InputDigests()
    handle = model.outer.register_forward_pre_hook(watched, with_kwargs=True, prepend=True)
    try:
        yield watched
    finally:
        handle.remove()


def _values(model: Prepared) -> dict[str, torch.Tensor]:
    """Copy this rank's parts of parameters and buffers to the host; collective under fsdp1."""
    if fsdp1_state.is_flat(model):
        return {name: t.to("cpu", copy=True) for name, t in fsdp1_state.values(model).items()}
    fsdp.settle(model.built.job.root)
    return {name: t.to("cpu", copy=True) for name, t in local_state(model).items()}


def _eps_of(choice: Strategy, models: list[Prepared]) -> float:
    """One unit in the last place of 1 in the dtype that forward computes in."""
    dtype = _EPS.get(choice.options.precision)
    parameters = [p.dtype for model in models for p in model.base.parameters()]
    floats = [kind for kind in parameters if kind.is_floating_point]
    return torch.finfo(dtype or max(floats, key=lambda kind: torch.finfo(kind).eps)).eps


def _prefix(models: list[Prepared], number: int) -> str:
    return f"model {number + 1}: " if len(models) > 1 else ""


def _side_of(sides: list[Sides], key: TensorKey) -> tuple[Sides, TensorKey]:
    for side in sides:
        if side.prefix and key.name.startswith(side.prefix):
            return side, replace(key, name=key.name.removeprefix(side.prefix))
    return sides[0], key


def _are_apart(here: _Pass, reference: _Pass) -> bool:
    """Whether a model got other inputs when the step was run again.

    One that was called around its wrapper has none to compare.
    """
    is_same_number = len(here.digests) == len(reference.digests)
    return is_same_number and here.digests != reference.digests


def _root_weight_of(run: StepRun) -> float:
    """The gradient that the loss got, where the model returns a loss: 0 where it does not."""
    keys = [k for k in run.captured.values if k.what == OUTPUT_GRADIENT and k.name == ROOT]
    values = [run.captured.values[k][0] for k in keys]
    scalars = [float(value) for value in values if not value.ndim]
    return scalars[0] if scalars else 0.0


def _place(sides: list[Sides], first: Row | None, varying: str | None) -> ModuleLine:
    """Module and line of the user's source at which the difference begins."""
    if varying is not None:  # with it all tolerances are as random
        captured = sides[0].reference.captured
        return ModuleLine(varying, captured.written.get(varying) or captured.lines.get(varying))
    if first is None:
        return ModuleLine()
    side, key = _side_of(sides, first.key)
    captured = side.reference.captured
    name = key.name
    if key.what in (GRADIENT, PARAMETER):
        name = name.rpartition(".")[0]
    if key.what in (INPUT, OUTPUT_GRADIENT) and name in captured.callers:
        # All that it took part in before is right: the code around it is what differs.
        return ModuleLine(captured.callers[name], captured.lines.get(name))
    line = captured.written.get(name) or captured.lines.get(name)
    return ModuleLine(name, line)
