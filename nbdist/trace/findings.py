"""What each rule of `trace.finding_records` looks for on a rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbdist.trace import intervals
from nbdist.trace.breakdown import RankBreakdown, TimeBreakdown
from nbdist.trace.intervals import Integers
from nbdist.trace.names import AUTOGRAD
from nbdist.trace.spans import Spans
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


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule has found something on a rank.

    Attributes:
        found: What, with its numbers, as a clause.
        share: Of the time that is looked at.
        spots: (start, end) of the longest places.
    """

    found: str
    share: float
    spots: tuple[tuple[int, int], ...] = ()


Look = Callable[[Scene], Hit | None]


def copies_to_host(scene: Scene) -> Hit | None:
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
    return Hit(
        f"{count:.0f} copies from the GPU to the host per {scene.per} on rank {scene.rank.rank}",
        scene.part(spent_ns),
        _spots(scene, chosen),
    )


def casts(scene: Scene) -> Hit | None:
    """Values are copied from one type to another."""
    chosen = _chosen(scene, (COMPUTE,), _CASTS)
    # The optimizer's own numbers (its count of steps) are none that a user casts.
    steps = _merged(scene, _chosen(scene, (MARK,), re.compile(r"Optimizer\.")))
    spent_ns = intervals.length(intervals.without(_merged(scene, chosen), steps))
    share = spent_ns / max(1, scene.own.compute_ns)
    if share <= TENTH:
        return None
    return Hit(
        f"copies from one type to another are {share:.0%} of what rank {scene.rank.rank} computes "
        f"({int(chosen.sum()) / scene.n_steps:.0f} per {scene.per})",
        scene.part(spent_ns),
        _spots(scene, chosen),
    )


def data(scene: Scene) -> Hit | None:
    """The rank waits for its next batch."""
    own = scene.own
    if scene.part(own.data_ns) <= TENTH:
        return None
    return Hit(
        f"rank {own.rank} fetches data for {own.data_ns / scene.n_steps / 1e6:.1f} ms per "
        f"{scene.per} while nothing else goes on ({scene.part(own.data_ns):.0%})",
        scene.part(own.data_ns),
        _spots(scene, _chosen(scene, (DATA,), re.compile("enumerate"))),
    )


def gaps(scene: Scene) -> Hit | None:
    """Nothing that is recorded runs for long at one stretch of a step."""
    own = scene.own
    if not own.steps_ns:
        return None
    longest = _longest_idle(scene)
    spent_ns = float(np.median(longest[:, 1] - longest[:, 0])) if len(longest) else 0.0
    share = spent_ns / max(1.0, float(np.median(own.steps_ns)))
    if share <= TENTH:
        return None
    return Hit(
        f"nothing runs on rank {own.rank} for {spent_ns / 1e6:.1f} ms at one stretch in each step "
        f"({share:.0%})",
        share,
        tuple((int(start), int(end)) for start, end in longest[:_SPOTS]),
    )


def much_communication(scene: Scene) -> Hit | None:
    """Collectives take more than half of the time, beside the wait for other ranks."""
    own = scene.own
    spent_ns = own.exposed_ns - own.waited_ns
    if scene.part(spent_ns) <= HALF:
        return None
    chosen = _chosen(scene, (COMMUNICATION,), re.compile(""))
    name = _busiest(scene.rank, chosen)
    return Hit(
        f"collectives, most of them {name}, take {scene.part(spent_ns):.0%} of a {scene.per} on "
        f"rank {own.rank} with nothing computed meanwhile",
        scene.part(spent_ns),
        _spots(scene, chosen),
    )


def small_kernels(scene: Scene) -> Hit | None:
    """A GPU is idle between kernels that are too short."""
    events = scene.rank.events
    chosen = _chosen(scene, (COMPUTE,), re.compile(""))
    count = int(chosen.sum())
    small = int((events.duration_ns[chosen] < SMALL_KERNEL_NS).sum())
    idle = scene.part(scene.own.idle_ns)
    is_many = scene.rank.device == "cuda" and small > HALF * count
    if not is_many or idle <= LAUNCH_IDLE:
        return None
    return Hit(
        f"{small / max(1, count):.0%} of {count / scene.n_steps:.0f} kernels per {scene.per} on "
        f"rank {scene.own.rank} are shorter than {SMALL_KERNEL_NS // 1000} us, and its GPU is idle "
        f"for {idle:.0%} of the time",
        idle,
        tuple((int(a), int(b)) for a, b in _longest_idle(scene)[:_SPOTS]),
    )


def late_rank(scene: Scene) -> Hit | None:
    """The others wait for this rank, and for no other one."""
    slowest = scene.shares.slowest
    if slowest is None or slowest.rank != scene.own.rank:
        return None
    if not slowest.is_alone or slowest.share <= LATE:
        return None
    return Hit(
        f"the others wait for rank {slowest.rank}: without it a {scene.per} would be "
        f"{slowest.share:.0%} faster{_longer(scene)}",
        slowest.share,
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


def no_overlap(scene: Scene) -> Hit | None:
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
    return Hit(
        f"{hidden_ns / whole_ns:.0%} of the time in which gradients are sent goes on under the "
        f"backward on rank {own.rank}, in {int(chosen.sum()) / scene.n_steps:.0f} calls per "
        f"{scene.per}",
        scene.part(exposed_ns),
        _spots(scene, chosen),
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


def _spots(scene: Scene, chosen: npt.NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    events = scene.rank.events
    places = np.flatnonzero(chosen)
    longest = places[np.argsort(-events.duration_ns[places], kind="stable")[:_SPOTS]]
    return tuple(
        (int(events.start_ns[one]), int(events.start_ns[one] + events.duration_ns[one]))
        for one in longest
    )


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
