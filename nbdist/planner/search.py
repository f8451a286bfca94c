"""Every configuration that nbdist can run, and of those that fit the fastest.

The memory formulas come first: what does not fit is not timed. Nor is what cannot be on the Pareto
front or near the fastest, even at the rate of large products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbdist.errors import OptionError
from nbdist.planner.advice import (
    COPIES_MARGIN,
    MOST_RANKS,
    Advice,
    choose_row,
    first_safe,
    more_ranks,
    percent,
)
from nbdist.planner.devices import SAFE_SHARE
from nbdist.planner.plan import (
    RISKY,
    SAFE,
    Candidate,
    Case,
    Plan,
    PlanRow,
    SearchSpace,
    asked,
    count,
    row_of,
)
from nbdist.planner.step_time import flops_each
from nbdist.planner.workload import check_load
from nbdist.strategy import options as strategy_options
from nbdist.strategy import validate
from nbdist.strategy.choice import Strategy, rows_of
from nbdist.strategy.choose import choose, typed_line
from nbdist.strategy.degrees import divisors, ranks
from nbdist.strategy.options import listed
from nbdist.strategy.table import ROWS

# Of these the best are shown.
BEST = 10
CHECKPOINTS = ("", *strategy_options.OPTIONS["checkpoint"].choices)
SCHEDULES = strategy_options.OPTIONS["schedule"].choices
OFFLOADS = strategy_options.OPTIONS["offload"].choices


@dataclass(frozen=True, slots=True)
class Search(Plan):
    """Result of a search.

    Its rows are those whose time was estimated: first the safe ones (the risky ones where none is
    safe), the fastest first, then the smallest of each mesh on which nothing is safe.

    Attributes:
        counted: All configurations.
        safe, risky: So many of them are.
        timed: Of these, so many were timed; the others are slower at best than one that needs
            less memory.
        nearest: Of what is not offloaded, that which needs least; None where all is.
    """

    counted: int = 0
    safe: int = 0
    risky: int = 0
    timed: int = 0
    nearest: PlanRow | None = None

    @property
    def ranked(self) -> tuple[PlanRow, ...]:
        """The rows that fit, the fastest first."""
        wanted = SAFE if self.safe else RISKY
        return tuple(sorted((row for row in self.rows if row.verdict == wanted), key=step_s))

    @property
    def front(self) -> tuple[PlanRow, ...]:
        """Rows that no other beats in memory and time at once, the fastest first."""
        front: list[PlanRow] = []
        for row in self.ranked:
            if not front or row.share < front[-1].share:
                front.append(row)
        return tuple(front)


def step_s(row: PlanRow) -> float:
    """Seconds of a step of a row that was timed."""
    assert row.time is not None
    return row.time.step_s


def search(space: SearchSpace) -> Search:
    """Count all configurations and time those that fit.

    Offloading is searched only where it was typed or nothing is safe without: its transfers are in
    no time. The effective batch is `load.samples` in each.

    Raises:
        OptionError: A word does not exist, nobody knows the model's shape or the device's speed, or
            no configuration goes with what was typed.
    """
    _check(space)
    counted = list(candidates(space, [""]))
    if space.load.has_gpu and not any(candidate.verdict == SAFE for candidate in counted):
        counted += candidates(space, OFFLOADS)
    if not counted:
        raise OptionError(_why_none(space))
    safe, risky = (
        [candidate for candidate in counted if candidate.verdict == word] for word in (SAFE, RISKY)
    )
    timed = _timed(space, safe or risky)
    meshes = {candidate.mesh for candidate in safe or risky}
    others = _smallest(candidate for candidate in counted if candidate.mesh not in meshes)
    rows = (*timed, *(_row(space, candidate) for candidate in others))
    here = [candidate for candidate in counted if not candidate.choice.options.offload]
    nearest = _row(space, min(here, key=lambda candidate: candidate.share)) if here else None
    return Search(
        **asked(space), rows=rows, counted=len(counted), safe=len(safe), risky=len(risky),
        timed=len(timed), nearest=nearest,
    )  # fmt: skip


def _check(space: SearchSpace) -> None:
    check_load(space.load)
    if space.strategy and space.strategy not in ROWS:
        choose(space.strategy, {}, space.world_size)  # says which there are
    if not space.model.has_shape:
        raise OptionError(
            f"--search ranks configurations by time, and for that the shape of {space.model.name} "
            "is not known: it is no language model with a config. Type a number of parameters, or "
            "leave --search out."
        )
    if not space.device.bandwidth or not space.device.half_flops:
        raise OptionError(
            f"--search ranks configurations by time, and the speed of {space.device.title} is not "
            "known, only its memory. Type --gpu with a device of the catalogue, or leave --search "
            "out to see what fits."
        )


def candidates(space: SearchSpace, offloads: Iterable[str]) -> Iterator[Candidate]:
    """All configurations that nbdist can run, with the effective batch that was asked for.

    Raises:
        OptionError: A word was typed that does not exist.
    """
    degrees, fixed = space.typed()
    precisions = [fixed["precision"]] if "precision" in fixed else list(space.precisions)
    checkpoints = [fixed["checkpoint"]] if "checkpoint" in fixed else list(CHECKPOINTS)
    moved = [fixed["offload"]] if "offload" in fixed else list(offloads)
    for name, settings in _cases(space.world_size, space.model.experts):
        if any(fixed.get(word, value) != value for word, value in settings.items()):
            continue
        for precision, checkpoint, offload in itertools.product(precisions, checkpoints, moved):
            more = {"precision": precision, "checkpoint": checkpoint, "offload": offload}
            used = {word: value for word, value in more.items() if value not in {"", "fp32"}}
            try:
                choice = choose(name, {**fixed, **settings, **used}, space.world_size)
            except OptionError:
                continue
            if _is_asked_for(space, choice, degrees):
                yield from _counted(space, choice)


def _cases(world_size: int, experts: int = 0) -> Iterator[Case]:
    """Every strategy with every degree, and the options that make another strategy of it.

    So many experts of a layer, 0 for none, lie on every number of ranks that divides both them and
    those that see different data.
    """
    yield from (("single", {}), ("ddp", {}), ("zero1", {}))
    yield from (("deepspeed", {"stage": stage}) for stage in (1, 2, 3))
    yield from (("fsdp1", settings) for settings in _shards(world_size))
    for pp, tp in itertools.product(divisors(world_size), repeat=2):
        if world_size % (pp * tp) == 0:
            yield from _meshes(pp, dp := world_size // (pp * tp), tp)
            shares = divisors(math.gcd(dp, experts))[1:] if experts and pp == 1 else []
            for ep, (name, settings) in itertools.product(shares, list(_meshes(1, dp, tp))):
                if settings.get("shard") != "hybrid":
                    yield name, {**settings, "ep": ep}
    for ep in divisors(math.gcd(world_size, experts))[1:] if experts else []:
        yield "ep", {"ep": ep}
    for cp in divisors(world_size)[1:]:
        yield from (("cp", {"cp": cp}), ("ulysses", {"cp": cp}))


def _meshes(pp: int, dp: int, tp: int) -> Iterator[Case]:
    """A mesh of a pipeline, shards and tensor parallelism."""
    name = "pp" if pp > 1 else "tp" if dp == 1 and tp > 1 else "fsdp"
    sizes: dict[str, object] = {"pp": pp} if pp > 1 else {}
    sizes |= {"tp": tp} if tp > 1 else {}
    shards = _shards(dp) if pp == 1 and dp > 1 else _SHARDS[: 1 + (dp > 1)]
    schedules = [{"schedule": word} for word in SCHEDULES] if pp > 1 else [{}]
    splits: list[dict[str, object]] = [{}, {"has_sequence_parallel": True}] if tp > 1 else [{}]
    for shard, schedule, split in itertools.product(shards, schedules, splits):
        yield name, {**sizes, **shard, **schedule, **split}


_SHARDS: list[dict[str, object]] = [{}, {"shard": "grad-op"}]


def _shards(dp: int) -> list[dict[str, object]]:
    """How so many data-parallel ranks may split what they hold alike."""
    copies = [n for n in divisors(dp) if 1 < n < dp]
    return [*_SHARDS, *({"shard": "hybrid", "replicas": n} for n in copies)]


def _is_asked_for(space: SearchSpace, choice: Strategy, degrees: Mapping[str, int]) -> bool:
    """Whether it is among what was typed, and is no other one under another name."""
    names = {choice.name, *(row.name for row in rows_of(choice))}
    if space.strategy:
        if space.strategy not in names:
            return False
    elif choice.name == "fsdp1" or (choice.name == "single" and space.world_size > 1):
        return False  # the older fsdp has fsdp's numbers; `single` trains the same on each rank
    elif space.world_size == 1 and choice.name != "single" and not choice.options.offload:
        return False
    sizes = choice.degrees
    counts = {**sizes.by_word, "replicas": sizes.dp_replicate}
    return all(counts.get(word, 1) == count for word, count in degrees.items())


def _counted(space: SearchSpace, choice: Strategy) -> Iterator[Candidate]:
    """The choice with every micro-batch; none where it does not go with the model or the batch.

    Of micro-batches that are too large, larger ones have the memory of the first: they need more.
    """
    too_large: Candidate | None = None
    for batch, options in _batches(space, choice):
        load = replace(space.load, batch=batch)
        more: dict[str, Any] = dict(options)
        candidate = replace(choice, options=replace(choice.options, **more))
        # A single backward adds up no gradients, and may need less than two of half the batch.
        try:
            _check_pieces(space, candidate)
            if too_large is not None and max(options.values()) > 1:
                yield replace(too_large, choice=candidate, load=load)
                continue
            counted = count(space, candidate, load)
        except OptionError:
            continue
        too_large = counted if counted.share > 1 else None
        yield counted


def _check_pieces(space: SearchSpace, choice: Strategy) -> None:
    """Refuse micro-batches and schedules that no pipeline of nbdist's runs."""
    options = choice.options
    if options.microbatches and options.microbatches < choice.degrees.pp:
        validate.check(choice, {"microbatches"}, "", "")
    if choice.degrees.pp > 1 and options.schedule in validate.LOOPED:
        validate.check_pipeline(choice, space.model.shape.layers)


def _batches(space: SearchSpace, choice: Strategy) -> Iterator[tuple[int, dict[str, int]]]:
    """List micro-batches of a data-parallel rank, and the options with which each makes the batch.

    Without a pipeline as many backwards are accumulated; a pipeline has as many micro-batches, and
    accumulates only where that was typed: with more micro-batches it idles less.
    """
    _, fixed = space.typed()
    dp = 1 if choice.name == "single" else choice.degrees.dp
    each, rest = divmod(space.load.samples, dp)
    if rest:
        return
    accumulate = choice.options.accumulate
    if choice.degrees.pp > 1:
        if each % accumulate == 0:
            for pieces in reversed(divisors(each // accumulate)):
                if fixed.get("microbatches", pieces) == pieces:
                    yield each // accumulate, {"microbatches": pieces}
        return
    for batch in divisors(each):
        if fixed.get("accumulate", each // batch) == each // batch:
            yield batch, {"accumulate": each // batch}


def _row(space: SearchSpace, candidate: Candidate) -> PlanRow:
    return row_of(space, candidate, typed_line(candidate.choice))


def _timed(space: SearchSpace, fitting: Sequence[Candidate]) -> list[PlanRow]:
    """Rows of those that fit, the fastest first, but for what cannot be near the fastest.

    That is what takes longer at the rate of large products than one that needs less memory, by
    the widest margin by which a slower one may be chosen.
    """
    rows: list[PlanRow] = []
    fastest_s = math.inf
    for candidate in sorted(fitting, key=lambda candidate: candidate.share):
        least_s = _least_s(space, candidate.choice)
        if len(rows) >= BEST and least_s > (1 + COPIES_MARGIN) * fastest_s:
            continue
        rows.append(_row(space, candidate))
        fastest_s = min(fastest_s, step_s(rows[-1]))
    return sorted(rows, key=step_s)


def _least_s(space: SearchSpace, choice: Strategy) -> float:
    """Seconds of the products of all blocks alone, at the rate of large ones."""
    shape, device = space.model.shape, space.device
    tokens = space.load.samples * space.load.sequence
    rate = device.flops(choice.options.precision) * device.sustained
    if space.load.recipe and choice.options.precision == "fp32":
        rate = device.half_flops * device.sustained  # weights in bf16 compute in it
    blocks = shape.active_parameters - shape.embedding_parameters - shape.head_parameters
    each = flops_each(space.model, blocks, shape.layers * space.model.block_trained())
    return tokens * each / (rate * space.world_size)


def _smallest(counted: Iterable[Candidate]) -> list[Candidate]:
    """Return for each mesh the candidate that needs least memory."""
    least: dict[object, Candidate] = {}
    for candidate in counted:
        mesh = candidate.mesh
        if mesh not in least or candidate.share < least[mesh].share:
            least[mesh] = candidate
    return list(least.values())


def _why_none(space: SearchSpace) -> str:
    """No configuration goes with the ranks, the batch and what was typed."""
    words = " ".join(filter(None, [space.strategy, *map(str, space.given or {})]))
    fitting = [dp for dp in divisors(space.world_size) if space.load.samples % dp == 0]
    return (
        f"No configuration of {ranks(space.world_size)} trains {space.load.samples} samples in a "
        f"step{f' with {words}' if words else ''}: of {space.load.samples} samples "
        f"{listed(fitting, 'or')} data-parallel ranks get equally many, and the other degrees have "
        "to divide heads and blocks. Type another --samples, or fewer degrees and options."
    )


def advised(result: Search) -> Advice:
    """The row to choose, by the rules of every plan, and why; else what would make room."""
    row, sentences = choose_row(result, lambda: _room(result))
    least = result.nearest
    if least is not None and row is not None and row.choice and row.choice.options.offload:
        nearest = f"the smallest, {least.typed}, needs {percent(least)} of the device"
        first = f"Without offloading nothing is safe: {nearest}. {_room(result)}"
        sentences.insert(0, first)
    return Advice(row, tuple(sentences))


def _room(space: SearchSpace) -> str:
    """The smallest change by which something is safe, as a sentence."""
    change = first_safe(_roomier(space), _safe_row)
    if change is None:
        return f"Not even {MOST_RANKS} ranks make room: one block is too large."
    return f"{change.sentence}."


def _roomier(space: SearchSpace) -> Iterator[tuple[str, SearchSpace]]:
    """Word changes that could make room, the smallest first: given options, more ranks."""
    if space.device.safe_share < SAFE_SHARE:
        device = replace(space.device, safe_share=SAFE_SHARE)
        yield "Without --keep-free", replace(space, device=device)
    degrees, fixed = space.typed()
    for word in (*degrees, *fixed):
        rest = {name: value for name, value in {**degrees, **fixed}.items() if name != word}
        flag = strategy_options.OPTIONS[word].flag if word in fixed else f"--{word}"
        flag = f"--{fixed[word]}" if word == "precision" else flag
        yield f"Without {flag}", replace(space, given=rest)
    if space.strategy:
        yield f"Without --strategy {space.strategy}", replace(space, strategy=None)
    free = replace(space, given={}, strategy=None)
    others = ((space, ""), (free, " and no strategy, degrees and options typed"))
    for base, words in others if space.given or space.strategy else others[:1]:
        for more in more_ranks(base):
            load = replace(more.load, samples=more.each * more.world_size or more.load.samples)
            yield f"With {ranks(more.world_size)}{words}", replace(more, load=load)


def _safe_row(space: SearchSpace) -> PlanRow | None:
    """The row to choose where something is safe on the devices; None where nothing is.

    Looked for with --checkpoint full, where none was typed.
    """
    given = {**space.given, "checkpoint": space.typed()[1].get("checkpoint", "full")}
    least = replace(space, given=given, precisions=space.precisions[:1])
    if all(candidate.verdict != SAFE for candidate in candidates(least, [""])):
        return None
    return choose_row(search(space), str)[0]
