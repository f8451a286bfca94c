"""Rules that find what slows a recorded cell down: the finding, its effect, and a remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbdist.core.finding import Finding, Rule, RuleHit, Spot, on_ranks
from nbdist.trace import intervals
from nbdist.trace.breakdown import RankBreakdown, TimeBreakdown
from nbdist.trace.intervals import Integers
from nbdist.trace.names import AUTOGRAD
from nbdist.trace.spans import Spans, is_inside, spans
from nbdist.trace.trace import COMMUNICATION, COMPUTE, COPY, DATA, HOST, MARK, RankTrace, Trace

# A loss that is printed once in a step, and a check of its gradients' norm, are usual.
COPIES_PER_STEP = 2
# Below a tenth of a step a remedy cannot give back more than a tenth.
TENTH = 0.1
# The smallest share that stands out from the noise of a machine that does nothing else.
LATE = 0.05
HALF = 0.5
# To launch a kernel takes the host 5 us or so: of shorter ones it cannot keep up a stream.
SMALL_KERNEL_NS = 10_000
# A GPU that is idle for less is not waiting for launches.
LAUNCH_IDLE = 0.2
# At least this share of a backward's collectives goes on under it, if it is cut into buckets.
OVERLAP = 0.2
# Collectives of activations, which the next operator needs, cannot go on under others.
_NEEDED_AT_ONCE = re.compile(r"\b(tp|pp|cp)\b")
_GRADIENTS = frozenset({"all-reduce", "reduce-scatter"})
# The same excess of tokens as the lint uneven-experts reports.
UNEVEN = 1.5
_EXPERTS = re.compile(r"\bep\b")
_EXCHANGE = re.compile("all-to-all")
_TO_HOST = re.compile(r"Memcpy DtoH")
_CASTS = re.compile(r"aten::_to_copy$|.*(?<!mem)copy_kernel", re.IGNORECASE)
_SPOTS = 3


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The input of a rule: one rank's trace, and the numbers of all.

    Attributes:
        trace, shares: The trace of all ranks, and its numbers.
        rank, breakdown: The rank's own trace, and its numbers.
        spans: When it did what.
    """

    trace: Trace
    shares: TimeBreakdown
    rank: RankTrace
    breakdown: RankBreakdown
    spans: Spans

    @property
    def n_steps(self) -> int:
        """Steps that count; 1 where there are none."""
        return max(1, len(self.breakdown.steps_ns))

    @property
    def per(self) -> str:
        """The unit that numbers are per: a step, or the recording."""
        return "step" if self.breakdown.steps_ns else "recording"

    def part(self, time_ns: float) -> float:
        """A time as a share of the observed time."""
        return time_ns / max(1, self.breakdown.window_ns)


def copies_to_host(context: TraceContext) -> RuleHit | None:
    """A GPU's values are read by Python again and again, which waits for it each time."""
    chosen = _select(context, (COPY,), _TO_HOST)
    count = int(chosen.sum()) / context.n_steps
    if context.rank.device == "cpu" or count <= COPIES_PER_STEP:
        return None
    # The wait before a copy is what it costs; the copy itself is short.
    waits = _union(context, _select(context, (HOST,), r"aten::(item|_local_scalar_dense)$"))
    spent_ns = max(intervals.length(waits), intervals.length(_union(context, chosen)))
    return RuleHit(
        f"{count:.0f} copies from the GPU to the host per {context.per} "
        f"on rank {context.rank.rank}",
        share=context.part(spent_ns),
        spots=_spots(context, chosen),
    )


def casts(context: TraceContext) -> RuleHit | None:
    """Values are copied from one type to another."""
    chosen = _select(context, (COMPUTE,), _CASTS)
    # The optimizer's own numbers (its count of steps) are not cast by the user.
    steps = _union(context, _select(context, (MARK,), r"Optimizer\."))
    spent_ns = intervals.length(intervals.difference(_union(context, chosen), steps))
    share = spent_ns / max(1, context.breakdown.compute_ns)
    if share <= TENTH:
        return None
    return RuleHit(
        f"dtype conversions take {share:.0%} of the compute time of rank {context.rank.rank} "
        f"({int(chosen.sum()) / context.n_steps:.0f} per {context.per})",
        share=context.part(spent_ns),
        spots=_spots(context, chosen),
    )


def data(context: TraceContext) -> RuleHit | None:
    """The rank waits for its next batch."""
    breakdown = context.breakdown
    if context.part(breakdown.data_ns) <= TENTH:
        return None
    return RuleHit(
        f"rank {breakdown.rank} waits {breakdown.data_ns / context.n_steps / 1e6:.1f} ms per "
        f"{context.per} for data ({context.part(breakdown.data_ns):.0%})",
        share=context.part(breakdown.data_ns),
        spots=_spots(context, _select(context, (DATA,), "enumerate")),
    )


def gaps(context: TraceContext) -> RuleHit | None:
    """Nothing that is recorded runs for long at one stretch of a step."""
    breakdown = context.breakdown
    if not breakdown.steps_ns:
        return None
    longest = _longest_idle(context)
    spent_ns = float(np.median(longest[:, 1] - longest[:, 0])) if len(longest) else 0.0
    share = spent_ns / max(1.0, float(np.median(breakdown.steps_ns)))
    if share <= TENTH:
        return None
    return RuleHit(
        f"rank {breakdown.rank} is idle for {spent_ns / 1e6:.1f} ms in a row in each step "
        f"({share:.0%})",
        share=share,
        spots=_as_spots(context, longest),
    )


def much_communication(context: TraceContext) -> RuleHit | None:
    """Collectives take more than half of the time, beside the wait for other ranks."""
    breakdown = context.breakdown
    spent_ns = breakdown.exposed_ns - breakdown.waited_ns
    if context.part(spent_ns) <= HALF:
        return None
    chosen = _select(context, (COMMUNICATION,))
    events, names = context.rank.events, context.rank.names
    spent = np.bincount(events.name[chosen], events.duration_ns[chosen], minlength=len(names))
    name = names[int(np.argmax(spent))]
    return RuleHit(
        f"collectives that compute does not overlap, mostly {name}, take "
        f"{context.part(spent_ns):.0%} of a {context.per} on rank {breakdown.rank}",
        share=context.part(spent_ns),
        spots=_spots(context, chosen),
    )


def expert_exchange(context: TraceContext) -> RuleHit | None:
    """Tokens are on their way to experts on other ranks, and nothing is computed."""
    chosen = _select(context, (COMMUNICATION,), _EXCHANGE)
    exposed_ns = intervals.length(
        intervals.difference(_union(context, chosen), context.spans.compute)
    )
    share = context.part(exposed_ns)
    if not _EXPERTS.search(context.trace.strategy) or share <= TENTH:
        return None
    return RuleHit(
        f"sending tokens to experts and back (all-to-all) takes {share:.0%} of a {context.per} on "
        f"rank {context.breakdown.rank} beside compute{_busiest(context.trace)}",
        share=share,
        spots=_spots(context, chosen),
    )


def _busiest(trace: Trace) -> str:
    """Which rank gets many more tokens than another one; "" where none does.

    A rank's messages are as large as what it sends or gets, and all send as many tokens.
    """
    sizes = {}
    for rank in trace.ranks:
        names = np.array([bool(_EXCHANGE.match(name)) for name in rank.names], bool)
        sent = (rank.events.kind == COMMUNICATION) & names[rank.events.name]
        sizes[rank.rank] = int(rank.events.size_bytes[sent].sum())
    busiest = max(sizes, key=lambda rank: sizes[rank])
    times = sizes[busiest] / max(1, min(sizes.values()))
    return f"; rank {busiest} gets {times:.1f} times as many as it sends" if times >= UNEVEN else ""


def small_kernels(context: TraceContext) -> RuleHit | None:
    """A GPU is idle between kernels that are too short."""
    events = context.rank.events
    chosen = _select(context, (COMPUTE,))
    count = int(chosen.sum())
    small = int((events.duration_ns[chosen] < SMALL_KERNEL_NS).sum())
    idle = context.part(context.breakdown.idle_ns)
    is_many = context.rank.device == "cuda" and small > HALF * count
    if not is_many or idle <= LAUNCH_IDLE:
        return None
    return RuleHit(
        f"{small / max(1, count):.0%} of {count / context.n_steps:.0f} kernels per {context.per} "
        f"on rank {context.breakdown.rank} are shorter than {SMALL_KERNEL_NS // 1000} us, and its "
        f"GPU is idle for {idle:.0%} of the time",
        share=idle,
        spots=_as_spots(context, _longest_idle(context)),
    )


def late_rank(context: TraceContext) -> RuleHit | None:
    """The others wait for this rank in most steps, and for no other one."""
    slowest = context.shares.slowest
    if slowest is None or slowest.rank != context.breakdown.rank:
        return None
    if slowest.doubt or slowest.share <= LATE:
        return None
    return RuleHit(
        f"the other ranks wait for rank {slowest.rank} in {slowest.late_steps} of "
        f"{context.n_steps} steps (spread {slowest.spread_ns / 1e6:.1f} ms): without it a step "
        f"would be {slowest.share:.0%} faster{_longer(context)}",
        share=slowest.share,
    )


# A reason why a rank is late -> the verb for it.
_DOES: Mapping[str, str] = {
    "compute_ns": "it computes",
    "data_ns": "it fetches data",
    "copy_ns": "it copies",
    "idle_ns": "it is idle",
}


def _longer(context: TraceContext) -> str:
    """The work that the late rank does for longer than the others do."""
    others = [rank for rank in context.shares.ranks if rank.rank != context.breakdown.rank]
    extra_ns = {
        field: getattr(context.breakdown, field)
        - float(np.median([getattr(other, field) for other in others]))
        for field in _DOES
    }
    largest = max(extra_ns, key=lambda field: extra_ns[field])
    if extra_ns[largest] <= 0:
        return ""
    extra_ms = extra_ns[largest] / context.n_steps / 1e6
    return f"; {_DOES[largest]} {extra_ms:.1f} ms longer than the others"


def no_overlap(context: TraceContext) -> RuleHit | None:
    """Gradients are sent when nothing is computed any more."""
    breakdown = context.breakdown
    has_backward = any(name.startswith(AUTOGRAD) for name in context.rank.names)
    if not has_backward or _NEEDED_AT_ONCE.search(context.trace.strategy.split(",")[0]):
        return None
    names = [name in _GRADIENTS for name in context.rank.names]
    events = context.rank.events
    chosen = _select(context, (COMMUNICATION,)) & np.array(names)[events.name]
    sent = _union(context, chosen)
    hidden_ns = intervals.length(intervals.intersection(sent, context.spans.compute))
    whole_ns = intervals.length(sent)
    exposed_ns = whole_ns - hidden_ns - breakdown.waited_ns
    if context.part(exposed_ns) <= TENTH or hidden_ns >= OVERLAP * whole_ns:
        return None
    return RuleHit(
        f"{hidden_ns / whole_ns:.0%} of gradient communication on rank {breakdown.rank} overlaps "
        f"the backward pass (calls per {context.per}: {int(chosen.sum()) / context.n_steps:.0f})",
        share=context.part(exposed_ns),
        spots=_spots(context, chosen),
    )


def _select(
    context: TraceContext, kinds: Sequence[int], pattern: str | re.Pattern[str] = ""
) -> npt.NDArray[np.bool_]:
    """Events in the window, of these kinds, whose names begin so."""
    events = context.rank.events
    named = np.array([bool(re.match(pattern, name)) for name in context.rank.names], bool)
    inside = is_inside(context.rank, context.spans)
    chosen: npt.NDArray[np.bool_] = np.isin(events.kind, kinds) & named[events.name] & inside
    return chosen


def _union(context: TraceContext, chosen: npt.NDArray[np.bool_]) -> Integers:
    events = context.rank.events
    starts = events.start_ns[chosen]
    return intervals.intersection(
        intervals.union(starts, starts + events.duration_ns[chosen]), context.spans.window
    )


def _spots(context: TraceContext, chosen: npt.NDArray[np.bool_]) -> tuple[Spot, ...]:
    events = context.rank.events
    places = np.flatnonzero(chosen)
    longest = places[np.argsort(-events.duration_ns[places], kind="stable")[:_SPOTS]]
    start_ns = events.start_ns[longest]
    return _as_spots(context, np.stack([start_ns, start_ns + events.duration_ns[longest]], axis=1))


def _as_spots(context: TraceContext, longest: Integers) -> tuple[Spot, ...]:
    return tuple(Spot(context.rank.rank, start, end) for start, end in longest[:_SPOTS].tolist())


def _longest_idle(context: TraceContext) -> Integers:
    """(step, 2): in each step the longest stretch in which nothing runs, the longest first."""
    spans = context.spans
    busy = intervals.union_of([spans.compute, spans.communication, spans.copy, spans.data])
    steps = context.rank.steps[: len(context.breakdown.steps_ns)]
    edges = np.array([(step.start_ns, step.end_ns) for step in steps], np.int64).reshape(-1, 2)
    cut, (is_idle, is_step) = intervals.pieces([intervals.difference(spans.window, busy), edges])
    idle = cut[is_idle & is_step]
    longest_first = idle[np.argsort(idle[:, 0] - idle[:, 1], kind="stable")]
    step_of = np.searchsorted(edges[:, 0], longest_first[:, 0], side="right")
    _, firsts = np.unique(step_of, return_index=True)
    longest_per_step: Integers = longest_first[np.sort(firsts)]
    return longest_per_step


RULES = (
    Rule(
        "one late rank",
        late_rank,
        "a collective ends only after the last rank has joined, so the slowest rank sets the pace",
        "give it less to do (batches of equal size, the same data loading on all), and check "
        "whether something else runs on its GPU or its cores (%dist_status)",
    ),
    Rule(
        "much communication",
        much_communication,
        "a rank computes nothing while it waits for the data of others",
        "more work per byte: a larger batch per rank, gradients accumulated over several batches "
        "(accelerator.accumulate), or fewer ranks for a model this small",
    ),
    Rule(
        "expert exchange",
        expert_exchange,
        "each layer needs its tokens back before the next one begins, so nothing hides it; a rank "
        "whose experts get more tokens keeps the others waiting",
        "share the experts over fewer ranks (--ep), of one host, or give a rank more tokens; where "
        "tokens go to one rank, train the router with its auxiliary loss",
    ),
    Rule(
        "buckets that do not overlap",
        no_overlap,
        "gradients that are ready could be sent during the backward pass, but are not",
        "under ddp use smaller buckets (bucket_cap_mb), so that the first one fills early; under "
        "fsdp use one group per block; avoid operations that need all gradients before the "
        "backward pass ends",
    ),
    Rule(
        "data",
        data,
        "nothing is computed until the next batch arrives",
        "DataLoader(num_workers=2 or more, prefetch_factor=2, pin_memory=True on a GPU)",
    ),
    Rule(
        "nothing runs",
        gaps,
        "the rank runs code that the profiler does not see: Python between two operators, data "
        "loading without a DataLoader, files, a sleep",
        "check what the loop does there, and do it less often or in the background; --stacks "
        "records Python functions too",
    ),
    Rule(
        "device-to-host copies",
        copies_to_host,
        "each waits until the GPU has finished all launched kernels, and none is launched then",
        "avoid .item(), .cpu(), print(loss) and `if tensor` in every step: keep sums on the GPU "
        "and read them every hundred steps",
    ),
    Rule(
        "dtype copies",
        casts,
        "they read and write every value once more and compute nothing",
        "use one dtype throughout: autocast instead of .to() by hand (--bf16), parameters in the "
        "dtype of the computation, inputs cast once in the DataLoader",
    ),
    Rule(
        "many small kernels",
        small_kernels,
        "launching such a kernel takes the host longer than running it takes the GPU",
        "larger batches, torch.compile, or fused optimizers (fused=True)",
    ),
)


def findings(trace: Trace, shares: TimeBreakdown) -> tuple[Finding, ...]:
    """Findings of `RULES`, the largest first; empty where no rule finds anything."""
    traces = {rank.rank: rank for rank in trace.ranks}
    contexts = {}
    for breakdown in shares.ranks:
        if breakdown.window_ns:
            rank = traces[breakdown.rank]
            contexts[breakdown.rank] = TraceContext(
                trace, shares, rank, breakdown, spans(rank, len(breakdown.steps_ns))
            )
    return on_ranks(RULES, contexts)
