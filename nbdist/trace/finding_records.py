"""What slows a recorded cell down, by rules: what was found, why it matters, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.trace import findings as rules
from nbdist.trace.breakdown import TimeBreakdown
from nbdist.trace.findings import Look, Scene
from nbdist.trace.spans import spans
from nbdist.trace.trace import Trace

# Places that a finding shows.
SPOTS = 5


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in the trace that shows a finding.

    Attributes:
        rank: Whose lanes.
        start_ns: Since the beginning of the recording.
        end_ns: Likewise.
    """

    rank: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class TraceFinding:
    """Something that slows the cell down.

    Attributes:
        rule: Name in RULES, as people read it: "device-to-host copies".
        found: What is there, with its numbers, as a clause.
        why: Why that costs time, as a clause.
        what: What to do, as a clause.
        ranks: Where it was found.
        share: Of a step's time (of the recording's, without steps), the worst rank's; the largest
            finding comes first.
        spots: A few places to look at, the longest first.
    """

    rule: str
    found: str
    why: str
    what: str
    ranks: tuple[int, ...]
    share: float
    spots: tuple[Spot, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """What is looked for.

    Attributes:
        name: As people read it.
        look: Looks for it on one rank.
        why: Why it costs time, as a clause.
        what: What to do, as a clause.
    """

    name: str
    look: Look
    why: str
    what: str


RULES = (
    Rule(
        "one late rank",
        rules.late_rank,
        "a collective begins when the last rank has come, so the slowest sets the pace of all",
        "give it less to do (batches of equal size, the same data loading on all), and look "
        "whether something else runs on its GPU or its cores (%dist_status)",
    ),
    Rule(
        "much communication",
        rules.much_communication,
        "no rank computes while it waits for bytes",
        "more work per byte: a larger batch per rank, gradients accumulated over several batches "
        "(accelerator.accumulate), or fewer ranks for a model this small",
    ),
    Rule(
        "buckets that do not overlap",
        rules.no_overlap,
        "gradients that are ready can be sent while the backward goes on, and are not",
        "under ddp smaller buckets (bucket_cap_mb), so that the first is full early; under fsdp "
        "one group per block; and no operation that needs all gradients before the backward ends",
    ),
    Rule(
        "data",
        rules.data,
        "nothing is computed until the next batch is there",
        "DataLoader(num_workers=2 or more, prefetch_factor=2, pin_memory=True on a GPU)",
    ),
    Rule(
        "nothing runs",
        rules.gaps,
        "the rank is in code that the profiler does not see: Python between two operators, data "
        "that no DataLoader fetches, files, a sleep",
        "look at what stands there in the loop, and do it less often, or beside the computation; "
        "--stacks records Python's functions too",
    ),
    Rule(
        "device-to-host copies",
        rules.copies_to_host,
        "each waits until the GPU has done all that was launched, and no kernel is launched then",
        "no .item(), .cpu(), print(loss) or `if tensor` in every step: keep sums on the GPU and "
        "read them every hundred steps",
    ),
    Rule(
        "dtype copies",
        rules.casts,
        "they read and write everything once more and compute nothing",
        "one type throughout: autocast instead of .to() by hand (--bf16), parameters kept in the "
        "type that is computed in, inputs cast once in the DataLoader",
    ),
    Rule(
        "many small kernels",
        rules.small_kernels,
        "the host needs longer to launch one than the GPU to run it",
        "larger batches, torch.compile, or fused optimizers (fused=True)",
    ),
)


def findings(trace: Trace, shares: TimeBreakdown) -> tuple[TraceFinding, ...]:
    """What slows the cell down by `RULES`, the largest first; empty where nothing does."""
    known = {one.rank: one for one in trace.ranks}
    scenes = [
        Scene(trace, shares, known[own.rank], own, spans(known[own.rank], len(own.steps_ns)))
        for own in shares.ranks
        if own.window_ns
    ]
    found = [one for rule in RULES if (one := _applied(rule, scenes)) is not None]
    return tuple(sorted(found, key=lambda one: -one.share))


def _applied(rule: Rule, scenes: Sequence[Scene]) -> TraceFinding | None:
    """What a rule finds; its numbers are those of the rank where it is worst."""
    hits = {scene.own.rank: hit for scene in scenes if (hit := rule.look(scene)) is not None}
    if not hits:
        return None
    worst = max(hits, key=lambda rank: hits[rank].share)
    spots = (Spot(rank, *spot) for rank, hit in hits.items() for spot in hit.spots)
    longest = sorted(spots, key=lambda one: one.start_ns - one.end_ns)
    return TraceFinding(
        rule.name, hits[worst].found, rule.why, rule.what, tuple(sorted(hits)), hits[worst].share,
        tuple(longest[:SPOTS]),
    )  # fmt: skip
