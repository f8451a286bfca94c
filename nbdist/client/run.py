"""One cell on its ranks: from sending it to the last word of every rank."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from nbdist.client import presses
from nbdist.client.channel import Message, failure_of
from nbdist.client.ending import Ending
from nbdist.core import failures as failing
from nbdist.core.cells import CellFeed, CellResult, Event, RankResult, elapsed_line
from nbdist.core.failures import RankFailure, ranks_phrase
from nbdist.core.lines import Line

if TYPE_CHECKING:
    from nbdist.client.session import Session

# After an interrupt (or a timeout) ranks get this long; then the notebook is given back.
GIVE_BACK_S = 4.5
# After a second press; a rank in Python code is back by then, however fast the presses came.
GIVE_BACK_AGAIN_S = 0.5
# The hub tells of a dead engine a little after its launcher; its last output comes between.
LAST_WORDS_S = 1.0
# A rank tells that its cell begins this long before it takes interrupts (at most).
BEGIN_S = 0.1
# A rank that has failed is told of when others still run after this long.
TELL_S = 1.0
LONGEST_PAUSE_S = 3600.0
SHORTEST_PAUSE_S = 0.02
INTERRUPT_NAMES = frozenset({"KeyboardInterrupt", "CancelledError"})


class Sink(Protocol):
    """Where a cell's output goes."""

    def draw(self, events: Sequence[Event]) -> None:
        """Show these, in order."""

    def close(self, result: CellResult) -> None:
        """Everything has been drawn."""


@dataclass(frozen=True, slots=True)
class CellRequest:
    """A cell to run.

    Attributes:
        code: Source, as IPython takes it.
        ranks: Where, in rank order.
        number: The notebook's cell number, for tracebacks; None where there is none.
        timeout_s: Interrupt the ranks after this long; None for never.
        is_patient: See LineMerger.
        keeps_outputs: Whether results carry each rank's outputs (for tabs).
    """

    code: str
    ranks: tuple[int, ...]
    number: int | None = None
    timeout_s: float | None = None
    is_patient: bool = False
    keeps_outputs: bool = False


@dataclass(slots=True)
class _RankState:
    status: str = ""
    elapsed_s: float = 0.0
    reply: Any = None
    exit_seen_s: float | None = None
    begun_s: float | None = None
    is_interrupted: bool = False
    is_told: bool = False


class CellRun:
    """The state of one running cell.

    Messages arrive in the client's thread and are put into an inbox; `step` takes them out
    in the thread that waits. Nothing here blocks.
    """

    def __init__(self, session: Session, request: CellRequest, sink: Sink):
        self.request = request
        self.on_item: Callable[[], None] = lambda: None
        self._session = session
        self._sink = sink
        self._feed = CellFeed(
            request.ranks, is_patient=request.is_patient, keeps_outputs=request.keeps_outputs
        )
        self._states = {rank: _RankState() for rank in request.ranks}
        # SimpleQueue, because its put() may be called from a signal handler.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._taken: deque[Callable[[], None]] = deque()
        self._began_s = time.monotonic()
        self._presses = 0
        self._interrupted_s: float | None = None
        self._has_timed_out = False
        self._lost = ""
        self._is_over = False
        self._now_s = self._began_s

    # Called from any thread.

    def message(self, rank: int, message: Message) -> None:
        """A raw iopub message of a rank."""
        self._put(lambda: self._hear(rank, message))

    def done(self, rank: int, reply: Any) -> None:
        """The rank's reply, after all its output."""
        arrived_s = time.monotonic()
        self._put(lambda: self._end(rank, reply, arrived_s))

    def exited(self, rank: int) -> None:
        """The process of a rank has ended."""
        self._put(lambda: self._note_exit(rank))

    def cut_off(self, why: str) -> None:
        """Nothing more can be heard from any rank; `why` is a sentence without its full stop."""
        self._put(lambda: self._note_lost(why))

    def press(self) -> None:
        """The user has pressed interrupt."""
        self._put(self._count_press)

    def _put(self, item: Callable[[], None]) -> None:
        if self._is_over:
            return  # a rank that was given up on goes on writing: nobody would take it out
        self._inbox.put(item)
        self.on_item()

    # Called from the thread that waits.

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not ended."""
        return tuple(rank for rank, state in self._states.items() if not state.status)

    def step(self, now_s: float) -> float | None:
        """Take in what has arrived and draw what is due.

        Returns:
            How long nothing more can happen unless something arrives, in seconds; None when
            the cell has ended.
        """
        self._now_s = now_s
        self._take_in()
        self._apply_deadlines(now_s)
        self._draw(self._feed.due(now_s))
        if not self.missing:
            return None
        self._tell_failures(now_s)
        pause_s = min(self._deadlines_s(now_s)) - now_s
        return min(max(pause_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)

    def block(self, pause_s: float) -> None:
        """Wait until something arrives, or for this long."""
        with contextlib.suppress(Empty):
            self._taken.append(self._inbox.get(timeout=pause_s))

    def close(self) -> None:
        """Take nothing in any more: what the ranks still send is dropped.

        Ranks that still run are interrupted: drawing has failed, and nobody hears them.
        """
        self._is_over = True
        self.on_item = lambda: None
        for rank in self.missing:
            self._session.interrupt(rank)

    def finish(self) -> CellResult:
        """Draw the rest, close the sink, and return or raise what the cell came to.

        A sink that fails does not hide that the code has failed.

        Raises:
            DistributedError: If the code failed on a rank, or a rank died.
            RankGone: If the controller ended, or the ranks were stopped meanwhile.
            CellTimeout: If the cell ran past its timeout.
            Interrupted: If the user interrupted it.
        """
        self.close()
        now_s = time.monotonic()
        for rank in self.request.ranks:
            self._feed.end(rank, now_s)
        result = CellResult(tuple(self._rank_result(rank) for rank in self.request.ranks))
        try:
            self._draw(self._feed.due(now_s))
            self._draw([Line("stdout", f"{note}\n") for note in self._notes() if note])
            self._sink.close(result)
        finally:
            self._ending().raise_for(result, self._session.explained)
        return result

    def _ending(self) -> Ending:
        return Ending(
            lost=self._lost,
            is_interrupted=self._interrupted_s is not None,
            timeout_s=self.request.timeout_s if self._has_timed_out else None,
        )

    def _take_in(self) -> None:
        while self._taken:
            self._taken.popleft()()
        # What is there now and no more: ranks that never stop writing must not keep this
        # from drawing, or from the deadlines.
        for _ in range(self._inbox.qsize()):
            self._inbox.get_nowait()()

    def _draw(self, events: Sequence[Event]) -> None:
        if events:
            self._sink.draw(events)

    def _hear(self, rank: int, message: Message) -> None:
        if message["header"]["msg_type"] == "execute_input":
            self._states[rank].begun_s = self._now_s
        self._feed.feed(rank, message, self._now_s)

    def _end(self, rank: int, reply: Any, arrived_s: float) -> None:
        state = self._states[rank]
        if state.status:
            return
        state.reply = reply
        state.elapsed_s = arrived_s - self._began_s
        failure = failure_of(reply)
        if failure is None:
            # %run shows its script's error and replies ok: the cell has failed all the same.
            state.status = "ok" if self._feed.failure(rank) is None else "error"
        elif failure[0] == "RankDied":
            state.status = "died"
        elif self._interrupted_s is not None and failure[0] in INTERRUPT_NAMES:
            state.status = "interrupted"
        else:
            state.status = "error"
        self._feed.end(rank, self._now_s)

    def _note_exit(self, rank: int) -> None:
        if rank in self._states:
            self._states[rank].exit_seen_s = self._now_s

    def _note_lost(self, why: str) -> None:
        self._lost = self._lost or why

    def _count_press(self) -> None:
        self._presses += 1
        if self._presses == 1 and self._interrupted_s is None:
            self._interrupted_s = self._now_s

    def _give_back_s(self) -> float:
        """When the notebook is given back, whatever the ranks do."""
        if self._interrupted_s is None:
            return float("inf")
        return self._interrupted_s + (GIVE_BACK_AGAIN_S if self._presses > 1 else GIVE_BACK_S)

    def _interrupt_s(self, rank: int) -> float:
        """When to interrupt a rank: an engine ignores it until its cell has begun."""
        state = self._states[rank]
        if self._interrupted_s is None or state.is_interrupted or state.status:
            return float("inf")
        begun_s = float("inf") if state.begun_s is None else state.begun_s
        return min(begun_s + BEGIN_S, self._give_back_s())

    def _apply_deadlines(self, now_s: float) -> None:
        timeout_s = self.request.timeout_s
        if timeout_s is not None and self._interrupted_s is None:
            self._interrupt_after(timeout_s, now_s)
        for rank in self.missing:
            seen_s = self._states[rank].exit_seen_s
            if seen_s is not None and now_s >= seen_s + LAST_WORDS_S:
                self._give_up(rank, "died", now_s)
            elif now_s >= self._interrupt_s(rank):
                self._states[rank].is_interrupted = True
                self._session.interrupt(rank)
        if now_s >= self._give_back_s() or self._lost:
            for rank in self.missing:
                self._give_up(rank, "unfinished", now_s)

    def _interrupt_after(self, timeout_s: float, now_s: float) -> None:
        if now_s >= self._began_s + timeout_s:
            self._has_timed_out = True
            self._interrupted_s = now_s

    def _give_up(self, rank: int, status: str, now_s: float) -> None:
        self._states[rank].status = status
        self._states[rank].elapsed_s = now_s - self._began_s
        self._feed.end(rank, now_s)

    def _deadlines_s(self, now_s: float) -> list[float]:
        times = [now_s + LONGEST_PAUSE_S, self._give_back_s()]
        due_s = self._feed.next_due_s()
        if due_s is not None:
            times.append(due_s)
        if self._interrupted_s is None and self.request.timeout_s is not None:
            times.append(self._began_s + self.request.timeout_s)
        times.extend(self._tell_s(rank) for rank in self._states)
        for rank in self.missing:
            seen_s = self._states[rank].exit_seen_s
            times.append(self._interrupt_s(rank))
            times.append(float("inf") if seen_s is None else seen_s + LAST_WORDS_S)
        return times

    def _tell_s(self, rank: int) -> float:
        """When to tell of a rank's failure; never after an interrupt, or for stored outputs."""
        state = self._states[rank]
        is_due = state.status == "error" and not state.is_told
        if not is_due or self.request.is_patient or self._interrupted_s is not None:
            return float("inf")
        return self._began_s + state.elapsed_s + TELL_S

    def _tell_failures(self, now_s: float) -> None:
        """Say that a rank has failed while others run on, who may be waiting for it in vain."""
        failed = [rank for rank in self._states if now_s >= self._tell_s(rank)]
        for rank in failed:
            self._states[rank].is_told = True
        if failed:
            told = failing.summary([self._failure(rank) for rank in failed])
            running = f"{ranks_phrase(self.missing)} still running (the stop button interrupts)"
            self._draw([Line("stderr", f"{told}; {running}\n")])

    def _failure(self, rank: int) -> RankFailure:
        """What the rank displayed as its error, or what its reply says where it displayed none."""
        shown = self._feed.failure(rank)
        if shown is not None:
            return shown
        name, message, lines = failure_of(self._states[rank].reply) or ("Error", "", ())
        return RankFailure(rank, name, message, lines)

    def _rank_result(self, rank: int) -> RankResult:
        state = self._states[rank]
        failure = None
        if state.status == "died":
            failure = RankFailure(rank, "RankDied", self._session.death(rank))
        elif state.status in {"error", "interrupted"}:
            failure = self._failure(rank)
        return RankResult(
            rank=rank,
            status=state.status,
            elapsed_s=state.elapsed_s,
            text=self._feed.text(rank),
            failure=failure,
            outputs=self._feed.outputs(rank),
        )

    def _notes(self) -> list[str]:
        times = {rank: state.elapsed_s for rank, state in self._states.items()}
        if any(state.status != "ok" for state in self._states.values()):
            times = {}  # what a failure took says nothing about the ranks
        # Whether this line comes depends on measured times: stored outputs do without it.
        return [
            "" if self.request.keeps_outputs else self._feed.hidden(),
            "" if self.request.is_patient else elapsed_line(times),
        ]


def wait(begin: Callable[[], CellRun]) -> CellResult:
    """Begin a cell and run it to the end in this thread; interrupts are counted by it."""
    with presses.counted() as pressed, contextlib.closing(begin()) as run:
        pressed.send_to(run.press)
        while (pause_s := run.step(time.monotonic())) is not None:
            run.block(pause_s)
        return run.finish()


async def wait_async(begin: Callable[[], CellRun]) -> CellResult:
    """Begin a cell and run it to the end without blocking the event loop.

    Every message wakes the loop, an interrupt too, so there is no polling.
    """
    loop = asyncio.get_running_loop()
    has_item = asyncio.Event()
    with presses.counted() as pressed, contextlib.closing(begin()) as run:

        def wake() -> None:
            loop.call_soon_threadsafe(has_item.set)

        run.on_item = wake
        pressed.send_to(run.press)
        while True:
            has_item.clear()
            pause_s = run.step(time.monotonic())
            if pause_s is None:
                return run.finish()
            try:
                await asyncio.wait_for(has_item.wait(), pause_s)
            except TimeoutError:
                continue
            except asyncio.CancelledError:
                run.press()  # a frontend that cancels the cell's task means an interrupt
