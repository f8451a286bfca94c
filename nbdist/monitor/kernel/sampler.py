"""Takes one sample of every rank at a time: what can be read is read, the rest is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import psutil

from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core.gpus import GpuReading, GpuReadings, GpuWatch
from nbdist.core.topology import RankPlace
from nbdist.hang.kernel.health import Health
from nbdist.monitor.kernel.activity import ActivityReader
from nbdist.monitor.process_usage import Usage, Usages
from nbdist.monitor.samples import Allocator, Answer, Sample
from nbdist.rpc.kernel.functions import RankFunction

PERIOD_S = 1.0
# Ranks of this host are asked for torch's allocator alone, which changes slowly.
ALLOCATOR_PERIOD_S = 2.0
# A question costs a millisecond or two of processor time: of many ranks each is asked less often.
MOST_ASKED = 2.0  # in a second
# An answer that is late is asked for again, seldom: what is asked piles up at a rank that is busy.
ANSWER_S = 15.0
# An allocator's numbers that are older than so many periods are not told any more.
OLD_PERIODS = 3

usage: RankFunction[[bool], Answer] = RankFunction("usage")


@dataclass(frozen=True, slots=True)
class _Spent:
    """A process's time at its newest sample, and its use since the one before."""

    pid: int
    when_s: float
    cpu_s: float
    percent: float | None


Samples = tuple[Sample, ...]


class Sampler:
    """Takes one sample of every rank at a time, and waits for nobody. For one thread."""

    def __init__(self, ranks: Ranks, health: Health, note: Callable[[str], None], period_s: float):
        """Read nothing yet; `take` does. `note` is told what could not be read, again and again."""
        self._ranks = ranks
        self._health = health
        self._note = note
        self._doings = ActivityReader(ranks, health)
        self._usages = Usages(psutil)
        self._gpus = GpuWatch(period_s)
        self._has_gpus = any(place.device != "cpu" for place in ranks.topology.ranks)
        self._answers = _Answers(ranks, note)
        self._spent: dict[int, _Spent] = {}

    def close(self) -> None:
        """Let go of the GPUs' driver; the next sample opens it again."""
        self._gpus.close()

    def take(self) -> Samples:
        """A sample of every rank, in rank order."""
        now_s = time.monotonic()
        pids, stopped = self._health.pids(), self._health.stopped()
        usages = self._usages.read(pids.values())
        newest = self._gpus.newest() if self._has_gpus and pids else None
        for problem in newest[0].problems if newest else ():
            self._note(problem)
        return tuple(
            self._sample(place, now_s, pids.get(place.rank, 0), stopped, usages, newest)
            for place in self._ranks.topology.ranks
        )

    def _sample(
        self,
        place: RankPlace,
        now_s: float,
        pid: int,
        stopped: Collection[int],
        usages: Mapping[int, Usage],
        newest: tuple[GpuReadings, float] | None,
    ) -> Sample:
        """Sample a rank by its process id, which is 0 for a process on another host."""
        rank, is_here = place.rank, bool(pid)
        doing = self._doings.of(rank, now_s, stopped, is_here=is_here)
        is_alive = doing.state not in {"dead", "stopped"}
        asked = self._answers.of(place, now_s, is_remote=not is_here) if is_alive else None
        answer, answered_s = asked or (None, now_s)
        usage, when_s = usages.get(pid), now_s
        gpu = self._gpu_of(place, newest[0]) if newest is not None and is_here else None
        age_s = 0.0 if newest is None or gpu is None else now_s - newest[1]
        if answer is not None and not is_here:
            usage, gpu, when_s = answer.usage, answer.gpu, answer.now_s
            age_s = now_s - answered_s + answer.gpu_age_s
        cpu_percent = self._cpu_percent(place, pid, usage, when_s)
        allocator = self._answers.allocator(answer, now_s - answered_s)
        load = None if answer is None else answer.expert_load
        return Sample(rank, now_s, doing, usage, cpu_percent, gpu, allocator, age_s, load)

    def _gpu_of(self, place: RankPlace, readings: GpuReadings) -> GpuReading | None:
        reading = readings.of(place.device_uuid)
        if reading is None and not readings.problems and place.device != "cpu":
            self._note(
                f"rank {place.rank}: the driver reports nothing for its GPU {place.device_uuid} "
                "(nvidia-smi, used where NVML fails, does not report MIG slices)"
            )
        return reading

    def _cpu_percent(
        self, place: RankPlace, pid: int, usage: Usage | None, when_s: float
    ) -> float | None:
        """Since the sample before of the same process; None for its first."""
        before = self._spent.get(place.rank)
        if usage is None:
            self._spent.pop(place.rank, None)
            return None
        percent = None
        if before is not None and before.pid == pid:
            if when_s <= before.when_s:
                return before.percent  # the same answer again
            spent_s = max(0.0, usage.cpu_s - before.cpu_s)
            percent = 100 * spent_s / (when_s - before.when_s) / max(1, place.threads)
        self._spent[place.rank] = _Spent(pid, when_s, usage.cpu_s, percent)
        return percent


class _Answers:
    """Answers of ranks' control threads on their use, asked for and not waited for."""

    def __init__(self, ranks: Ranks, note: Callable[[str], None]):
        self._ranks = ranks
        self._note = note
        self._least_s = len(ranks.topology.ranks) / MOST_ASKED
        self._pending: dict[int, tuple[Future[Answer], float]] = {}
        self._newest: dict[int, tuple[Answer, float]] = {}

    def of(self, place: RankPlace, now_s: float, *, is_remote: bool) -> tuple[Answer | None, float]:
        """(the rank's newest answer, when it was asked for); None before the first."""
        rank = place.rank
        if not is_remote and place.device == "cpu":
            return None, now_s  # nothing that is not read here
        self._take(rank)
        period_s = max(PERIOD_S if is_remote else ALLOCATOR_PERIOD_S, self._least_s)
        _, known_s = self._newest.get(rank, (None, 0.0))
        pending = self._pending.get(rank)
        # Answers take some time: half a sample early is on time.
        is_due = now_s > known_s + period_s - PERIOD_S / 2
        if is_due and (pending is None or now_s > pending[1] + ANSWER_S):
            sent = self._ranks.ask(lambda ask, who: usage(ask, who, is_remote), rank)
            if sent is not None:
                self._pending[rank] = sent, now_s
        return self._newest.get(rank, (None, now_s))

    def allocator(self, answer: Answer | None, age_s: float) -> Allocator | None:
        """The allocator's numbers in an answer, unless they are too old."""
        period_s = max(ALLOCATOR_PERIOD_S, self._least_s)
        if answer is None or age_s + answer.allocator_age_s > OLD_PERIODS * period_s:
            return None
        return answer.allocator

    def _take(self, rank: int) -> None:
        pending = self._pending.get(rank)
        if pending is None or not pending[0].done():
            return
        del self._pending[rank]
        sent, asked_s = pending
        error = sent.exception()
        if error is not None:
            if self._ranks.is_connected(rank):  # else how it ended is told
                self._note(f"rank {rank} could not report its use: {error}")
            return
        self._newest[rank] = sent.result(), asked_s
        for problem in self._newest[rank][0].problems:
            self._note(f"rank {rank}: {problem}")
