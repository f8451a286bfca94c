"""What slows a recorded cell down, by rules: what was found, why it matters, what to do."""

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
from nbdist.trace.spans import Spans, spans
from nbdist.trace.trace import COMMUNICATION, COMPUTE, COPY, DATA, HOST, MARK, RankTrace, Trace

# A loss that is printed once in a step, and a check of its gradients' norm, are usual.
COPIES_PER_STEP = 2
# Below a tenth of a step a remedy cannot give back more than a tenth.
TENTH = 0.1
# What can be seen over the noise of a machine that does nothing else.
LATE = 0.05
HALF = 0.5
# To launch a kernel takes the host 5 us or so: of shorter ones it cannot keep up a stream.
SMALL_KERNEL_NS = 10_000
# A GPU that is idle for less is not waiting for launches.
LAUNCH_IDLE = 0.2
# Of a backward's collectives at least so much goes on under it, where it is cut into buckets.
OVERLAP = 0.2
# Collectives of activations, which the next operator needs, cannot go on under others.
_NEEDED_AT_ONCE = re.compile(r"\b(tp|pp|cp)\b")
_GRADIENTS = frozenset({"all-reduce", "reduce-scatter"})
_TO_HOST = re.compile(r"Memcpy DtoH")
_CASTS = re.compile(r"aten::_to_copy$|.*(?<!mem)copy_kernel", re.IGNORECASE)
_SPOTS = 3


@dataclass(frozen=True, slots=True)
class Scene:
    """One rank, and what is known of all.

    Attributes:
        trace: All of it.
        shares: Its numbers.
        rank: The rank's own trace.
        own: Its numbers.
        spans: When it did what.
    """

    trace: Trace
    shares: TimeBreakdown
    rank: RankTrace
    own: RankBreakdown
    spans: Spans

    @property
    def n_steps(self) -> int:
        """Steps that count; 1 where there are none."""
        return max(1, len(self.own.steps_ns))

    @property
    def per(self) -> str:
        """What numbers are per."""
        return "step" if self.own.steps_ns else "recording"

    def part(self, time_ns: float) -> float:
        """A time as a share of what is looked at."""
        return time_ns / max(1, self.own.window_ns)


def copies_to_host(scene: Scene) -> RuleHit | None:
    """A GPU's values are read by Python again and again, which waits for it each time."""
    chosen = _chosen(scene, (COPY,), _TO_HOST)
    count = int(chosen.sum()) / scene.n_steps
    if scene.rank.device == "cpu" or count <= COPIES_PER_STEP:
        return None
    # The wait before a copy is what it costs; the copy itself is short.
    waits = _merged(
        scene, _chosen(scene, (HOST,), re.compile(r"aten::(item|_local_scalar_dense)$"))
    )
    spent_ns = max(intervals.length(waits), intervals.length(_merged(scene, chosen)))
    return RuleHit(
        f"{count:.0f} copies from the GPU to the host per {scene.per} on rank {scene.rank.rank}",
        share=scene.part(spent_ns),
        spots=_spots(scene, chosen),
    )


def casts(scene: Scene) -> RuleHit | None:
    """Values are copied from one type to another."""
    chosen = _chosen(scene, (COMPUTE,), _CASTS)
    # The optimizer's own numbers (its count of steps) are none that a user casts.
    steps = _merged(scene, _chosen(scene, (MARK,), re.compile(r"Optimizer\.")))
    spent_ns = intervals.length(intervals.without(_merged(scene, chosen), steps))
    share = spent_ns / max(1, scene.own.compute_ns)
    if share <= TENTH:
        return None
    return RuleHit(
        f"copies from one type to another are {share:.0%} of what rank {scene.rank.rank} computes "
        f"({int(chosen.sum()) / scene.n_steps:.0f} per {scene.per})",
        share=scene.part(spent_ns),
        spots=_spots(scene, chosen),
    )


def data(scene: Scene) -> RuleHit | None:
    """The rank waits for its next batch."""
    own = scene.own
    if scene.part(own.data_ns) <= TENTH:
        return None
    return RuleHit(
        f"rank {own.rank} fetches data for {own.data_ns / scene.n_steps / 1e6:.1f} ms per "
        f"{scene.per} while nothing else goes on ({scene.part(own.data_ns):.0%})",
        share=scene.part(own.data_ns),
        spots=_spots(scene, _chosen(scene, (DATA,), re.compile("enumerate"))),
    )


def gaps(scene: Scene) -> RuleHit | None:
    """Nothing that is recorded runs for long at one stretch of a step."""
    own = scene.own
    if not own.steps_ns:
        return None
    longest = _longest_idle(scene)
    spent_ns = float(np.median(longest[:, 1] - longest[:, 0])) if len(longest) else 0.0
    share = spent_ns / max(1.0, float(np.median(own.steps_ns)))
    if share <= TENTH:
        return None
    return RuleHit(
        f"nothing runs on rank {own.rank} for {spent_ns / 1e6:.1f} ms at one stretch in each step "
        f"({share:.0%})",
        share=share,
        spots=_as_spots(scene, longest),
    )


def much_communication(scene: Scene) -> RuleHit | None:
    """Collectives take more than half of the time, beside the wait for other ranks."""
    own = scene.own
    spent_ns = own.exposed_ns - own.waited_ns
    if scene.part(spent_ns) <= HALF:
        return None
    chosen = _chosen(scene, (COMMUNICATION,), re.compile(""))
    name = _busiest(scene.rank, chosen)
    return RuleHit(
        f"collectives, most of them {name}, take {scene.part(spent_ns):.0%} of a {scene.per} on "
        f"rank {own.rank} with nothing computed meanwhile",
        share=scene.part(spent_ns),
        spots=_spots(scene, chosen),
    )


def small_kernels(scene: Scene) -> RuleHit | None:
    """A GPU is idle between kernels that are too short."""
    events = scene.rank.events
    chosen = _chosen(scene, (COMPUTE,), re.compile(""))
    count = int(chosen.sum())
    small = int((events.duration_ns[chosen] < SMALL_KERNEL_NS).sum())
    idle = scene.part(scene.own.idle_ns)
    is_many = scene.rank.device == "cuda" and small > HALF * count
    if not is_many or idle <= LAUNCH_IDLE:
        return None
    return RuleHit(
        f"{small / max(1, count):.0%} of {count / scene.n_steps:.0f} kernels per {scene.per} on "
        f"rank {scene.own.rank} are shorter than {SMALL_KERNEL_NS // 1000} us, and its GPU is idle "
        f"for {idle:.0%} of the time",
        share=idle,
        spots=_as_spots(scene, _longest_idle(scene)),
    )


def late_rank(scene: Scene) -> RuleHit | None:
    """The others wait for this rank, and for no other one."""
    slowest = scene.shares.slowest
    if slowest is None or slowest.rank != scene.own.rank:
        return None
    if not slowest.is_alone or slowest.share <= LATE:
        return None
    return RuleHit(
        f"the others wait for rank {slowest.rank}: without it a {scene.per} would be "
        f"{slowest.share:.0%} faster{_longer(scene)}",
        share=slowest.share,
    )


# What can make a rank late -> how it is told.
_DOES: Mapping[str, str] = {
    "compute_ns": "it computes",
    "data_ns": "it fetches data for",
    "copy_ns": "it copies for",
    "idle_ns": "it does nothing for",
}


def _longer(scene: Scene) -> str:
    """What the late rank does for longer than the others do."""
    others = [one for one in scene.shares.ranks if one.rank != scene.own.rank]
    more = {
        word: getattr(scene.own, word) - float(np.median([getattr(o, word) for o in others]))
        for word in _DOES
    }
    word = max(more, key=lambda one: more[one])
    if more[word] <= 0:
        return ""
    return f"; {_DOES[word]} {more[word] / scene.n_steps / 1e6:.1f} ms longer than they do"


def no_overlap(scene: Scene) -> RuleHit | None:
    """Gradients are sent when nothing is computed any more."""
    own = scene.own
    has_backward = any(name.startswith(AUTOGRAD) for name in scene.rank.names)
    if not has_backward or _NEEDED_AT_ONCE.search(scene.trace.strategy.split(",")[0]):
        return None
    names = [name in _GRADIENTS for name in scene.rank.names]
    events = scene.rank.events
    chosen = _chosen(scene, (COMMUNICATION,), re.compile("")) & np.array(names)[events.name]
    sent = _merged(scene, chosen)
    hidden_ns = intervals.length(intervals.both(sent, scene.spans.compute))
    whole_ns = intervals.length(sent)
    exposed_ns = whole_ns - hidden_ns - own.waited_ns
    if scene.part(exposed_ns) <= TENTH or hidden_ns >= OVERLAP * whole_ns:
        return None
    return RuleHit(
        f"{hidden_ns / whole_ns:.0%} of the time in which gradients are sent goes on under the "
        f"backward on rank {own.rank}, in {int(chosen.sum()) / scene.n_steps:.0f} calls per "
        f"{scene.per}",
        share=scene.part(exposed_ns),
        spots=_spots(scene, chosen),
    )


def _chosen(scene: Scene, kinds: Sequence[int], pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
    """Events in the window, of these kinds, whose names begin so."""
    events = scene.rank.events
    [[start, end]] = scene.spans.window.tolist()
    named = np.array([pattern.match(name) is not None for name in scene.rank.names], bool)
    chosen: npt.NDArray[np.bool_] = (
        np.isin(events.kind, kinds)
        & named[events.name]
        & (events.start_ns >= start)
        & (events.start_ns < end)
    )
    return chosen


def _merged(scene: Scene, chosen: npt.NDArray[np.bool_]) -> Integers:
    events = scene.rank.events
    starts = events.start_ns[chosen]
    return intervals.both(
        intervals.union(starts, starts + events.duration_ns[chosen]), scene.spans.window
    )


def _spots(scene: Scene, chosen: npt.NDArray[np.bool_]) -> tuple[Spot, ...]:
    """The longest of the chosen events."""
    events = scene.rank.events
    places = np.flatnonzero(chosen)
    longest = places[np.argsort(-events.duration_ns[places], kind="stable")[:_SPOTS]]
    start_ns = events.start_ns[longest]
    return _as_spots(scene, np.stack([start_ns, start_ns + events.duration_ns[longest]], axis=1))


def _as_spots(scene: Scene, longest: Integers) -> tuple[Spot, ...]:
    return tuple(Spot(scene.rank.rank, start, end) for start, end in longest[:_SPOTS].tolist())


def _longest_idle(scene: Scene) -> Integers:
    """(step, 2): in each step the longest stretch in which nothing runs, the longest first."""
    spans = scene.spans
    busy = intervals.joined([spans.compute, spans.communication, spans.copy, spans.data])
    steps = scene.rank.steps[: len(scene.own.steps_ns)]
    edges = np.array([(step.start_ns, step.end_ns) for step in steps], np.int64).reshape(-1, 2)
    cut, (is_idle, is_step) = intervals.pieces([intervals.without(spans.window, busy), edges])
    idle = cut[is_idle & is_step]
    longest_first = idle[np.argsort(idle[:, 0] - idle[:, 1], kind="stable")]
    step_of = np.searchsorted(edges[:, 0], longest_first[:, 0], side="right")
    _, firsts = np.unique(step_of, return_index=True)
    found: Integers = longest_first[np.sort(firsts)]
    return found


def _busiest(rank: RankTrace, chosen: npt.NDArray[np.bool_]) -> str:
    """The name of the chosen events that take longest together."""
    spent = np.bincount(
        rank.events.name[chosen], rank.events.duration_ns[chosen], minlength=len(rank.names)
    )
    return rank.names[int(np.argmax(spent))]


RULES = (
    Rule(
        "one late rank",
        late_rank,
        "a collective begins when the last rank has come, so the slowest sets the pace of all",
        "give it less to do (batches of equal size, the same data loading on all), and look "
        "whether something else runs on its GPU or its cores (%dist_status)",
    ),
    Rule(
        "much communication",
        much_communication,
        "no rank computes while it waits for bytes",
        "more work per byte: a larger batch per rank, gradients accumulated over several batches "
        "(accelerator.accumulate), or fewer ranks for a model this small",
    ),
    Rule(
        "buckets that do not overlap",
        no_overlap,
        "gradients that are ready can be sent while the backward goes on, and are not",
        "under ddp smaller buckets (bucket_cap_mb), so that the first is full early; under fsdp "
        "one group per block; and no operation that needs all gradients before the backward ends",
    ),
    Rule(
        "data",
        data,
        "nothing is computed until the next batch is there",
        "DataLoader(num_workers=2 or more, prefetch_factor=2, pin_memory=True on a GPU)",
    ),
    Rule(
        "nothing runs",
        gaps,
        "the rank is in code that the profiler does not see: Python between two operators, data "
        "that no DataLoader fetches, files, a sleep",
        "look at what stands there in the loop, and do it less often, or beside the computation; "
        "--stacks records Python's functions too",
    ),
    Rule(
        "device-to-host copies",
        copies_to_host,
        "each waits until the GPU has done all that was launched, and no kernel is launched then",
        "no .item(), .cpu(), print(loss) or `if tensor` in every step: keep sums on the GPU and "
        "read them every hundred steps",
    ),
    Rule(
        "dtype copies",
        casts,
        "they read and write everything once more and compute nothing",
        "one type throughout: autocast instead of .to() by hand (--bf16), parameters kept in the "
        "type that is computed in, inputs cast once in the DataLoader",
    ),
    Rule(
        "many small kernels",
        small_kernels,
        "the host needs longer to launch one than the GPU to run it",
        "larger batches, torch.compile, or fused optimizers (fused=True)",
    ),
)


def findings(trace: Trace, shares: TimeBreakdown) -> tuple[Finding, ...]:
    """What slows the cell down by `RULES`, the largest first; empty where nothing does."""
    traces = {rank.rank: rank for rank in trace.ranks}
    scenes = {}
    for own in shares.ranks:
        if own.window_ns:
            rank = traces[own.rank]
            scenes[own.rank] = Scene(trace, shares, rank, own, spans(rank, len(own.steps_ns)))
    return on_ranks(RULES, scenes)
