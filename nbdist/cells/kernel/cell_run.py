"""One cell on its ranks: from sending it to the last word of every rank."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from nbdist.cells.kernel.cell_outcome import STOP, UNTOUCHED, CellOutcome, is_by_interrupt
from nbdist.cells.kernel.cell_ranks import CellRanks
from nbdist.cells.kernel.cell_request import (
    VIEWED,
    CellHook,
    CellRequest,
    RankState,
    Sink,
    failure_in,
    result_of,
)
from nbdist.cells.kernel.hang_policy import HangPolicy
from nbdist.cells.kernel.interrupt import NEVER_S, InterruptEscalation
from nbdist.cells.line_merger import Line
from nbdist.cells.outputs import CellResult, Event, OutputReducer, elapsed_line
from nbdist.core import failures as failing
from nbdist.core.failures import RankFailure, ranks_phrase
from nbdist.rpc.kernel.channel import Message, failure_of

# The hub reports a dead engine a little after its launcher; its last output comes between.
LAST_WORDS_S = 1.0
# A failed rank is reported when others still run after this long, unless a report on who
# waits for it comes before.
TELL_S = 2.0
# Jupyter's request to shut down follows its interrupt within milliseconds.
LEAVING_S = 0.25
GO_ON = "The ranks are kept and go on with it; %dist_attach in a new kernel brings both back."
# Output and replies of many ranks may wait this long for more, until the last has replied: each
# waking of the thread that waits takes the interpreter's lock from the one that receives.
TOGETHER_S = 0.01
LONGEST_PAUSE_S = 3600.0
SHORTEST_PAUSE_S = 0.02


class CellRun:
    """The state of one running cell.

    Messages arrive in the client's thread and are put into an inbox; `step` takes them out
    in the thread that waits. Nothing here blocks.
    """

    def __init__(self, ranks: CellRanks, request: CellRequest, sink: Sink, run_id: int = 0):
        self.request = request
        # Called, in any thread, when there is something to take out, within so many seconds.
        self.on_item: Callable[[float], object] = lambda _within_s: None
        self.on_finish: Callable[[], object] = lambda: None  # all of it has been shown
        self._ranks = ranks
        self._sink = sink
        self.run_id = run_id
        self._reducer = OutputReducer(
            request.ranks, is_patient=request.is_patient, keeps_outputs=request.keeps_outputs
        )
        self._states = {rank: RankState(begun_s=request.began_s) for rank in request.ranks}
        # SimpleQueue, because its put() may be called from a signal handler.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._unheard = {*request.ranks}
        self._received: deque[Callable[[], None]] = deque()
        self._began_s = time.monotonic() if request.began_s is None else request.began_s
        timeout_s = request.timeout_s
        self._timeout_at_s = NEVER_S if timeout_s is None else self._began_s + timeout_s
        self._escalation = InterruptEscalation()
        self._hang = HangPolicy(ranks, request, self._escalation, self._began_s, run_id)
        self._hang.on_answer = lambda: self._put(lambda: None)
        self._has_timed_out = False
        self._lost = ""
        self.is_over = False
        self._now_s = self._began_s

    @property
    def number(self) -> int | None:
        """The notebook's cell number; None where there is none."""
        return self.request.number

    # Called from any thread.

    def message(self, rank: int, message: Message) -> None:
        """A raw iopub message of a rank."""
        if self._is_output(rank, message):
            self._put(lambda: self._reducer.feed(rank, message, self._now_s), TOGETHER_S)

    def messages(self, batch: Sequence[tuple[int, Message]]) -> None:
        """Raw iopub messages of ranks that have come together, so that equal lines are merged."""
        outputs = [(rank, message) for rank, message in batch if self._is_output(rank, message)]

        def feed() -> None:
            for rank, message in outputs:
                self._reducer.feed(rank, message, self._now_s)

        self._put(feed, TOGETHER_S)

    def _is_output(self, rank: int, message: Message) -> bool:
        """Whether a message is to be shown; its other contents are noted."""
        for hook in self._ranks.hooks:
            if hook.message(self.run_id, rank, message):
                self._put(functools.partial(self._tell_during, hook), TOGETHER_S)
                return False
        kind = message["header"]["msg_type"]
        if kind == "execute_input":
            self._states[rank].begun_s = time.monotonic()
            if self.is_over:  # it was interrupted before it began, and nobody waits for it
                self._ranks.busy.interrupt_late(rank, self)
            if self._escalation.has_begun:  # an interrupt waits for this
                self._put(lambda: None)
            return False
        # The reply has the status as well: the waiting thread need not wake up.
        return bool(kind != "status")

    def done(self, rank: int, reply: Any, ended_s: float | None = None) -> None:
        """Note the rank's reply, after all its output; it may have come before an attach."""
        at_s = time.monotonic() if ended_s is None else ended_s
        self._unheard.discard(rank)
        within_s = TOGETHER_S if self._unheard else 0.0
        self._put(functools.partial(self._end, rank, reply, at_s), within_s)

    def exited(self, rank: int) -> None:
        """The process of a rank has ended."""
        self._put(lambda: self._note_exit(rank))

    def cut_off(self, why: str, what_now: str) -> None:
        """Nothing more can be heard from any rank.

        `why` is a sentence without its full stop, `what_now` a whole one.
        """

        def note() -> None:
            noun = "program" if self.request.is_program else "cell"
            self._lost = self._lost or f"{why} while this {noun} ran. {what_now}"

        self._put(note)

    def note(self, lines: Sequence[str]) -> None:
        """Lines of nbdist's own, shown in their turn."""
        self._put(lambda: self.tell(lines))

    def press(self) -> None:
        """The user has pressed interrupt; or ends the kernel, which Jupyter interrupts before."""
        is_leaving = self._ranks.is_leaving
        if is_leaving is None:
            self._put(lambda: self._escalation.press(self._now_s))
            return

        def judge() -> None:
            if is_leaving():
                self.cut_off("The kernel was ended", GO_ON)
            else:
                self._put(lambda: self._escalation.press(self._now_s))

        timer = threading.Timer(LEAVING_S, judge)
        timer.daemon = True
        timer.start()

    def _put(self, item: Callable[[], None], within_s: float = 0.0) -> None:
        if self.is_over:
            return  # a rank that was given up on goes on writing: nobody would take it out
        self._inbox.put(item)
        self.on_item(within_s)

    # Called from the thread that waits.

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not ended."""
        return tuple(rank for rank, state in self._states.items() if not state.status)

    def step(self, now_s: float) -> float | None:
        """Process messages that have arrived and draw the output that is due.

        Returns:
            Seconds in which nothing happens unless a message arrives; None when
            the cell has ended and the ranks' groups are in step.
        """
        self._now_s = now_s
        while self._received:
            self._received.popleft()()
        # Only the items that are there now: ranks that never stop writing must not keep this
        # from drawing, or from the deadlines.
        for _ in range(self._inbox.qsize()):
            self._inbox.get_nowait()()
        self._apply_deadlines(now_s)
        self._draw(self._reducer.due(now_s))
        if self.missing:
            self.tell(self._hang.watch(now_s, self.missing, self._rank_states))
            self._tell_failures(now_s)
            pause_s: float | None = min(self._deadlines_s(now_s)) - now_s
        else:
            pause_s = self._clean_up(now_s)
        if pause_s is None:
            return None
        return min(max(pause_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)

    def block(self, pause_s: float) -> None:
        """Wait until something arrives, or for this long."""
        with contextlib.suppress(Empty):
            self._received.append(self._inbox.get(timeout=pause_s))

    def close(self) -> None:
        """Accept no more messages: later ones of the ranks are dropped.

        Ranks that still run are interrupted: drawing has failed, and their output is lost.
        """
        self.is_over = True
        self.on_item = lambda _within_s: None
        for rank in self.missing:
            self._ranks.interrupt(rank)

    def finish(self) -> CellResult:
        """Draw the rest, close the sink, and return or raise what the cell came to.

        A sink that fails does not hide that the code has failed.

        Raises:
            Deadlock: If ranks waited for calls that could not come, and were aborted.
            DistributedError: If the code failed on a rank, or a rank died.
            RankGone: If the controller ended, or the ranks were stopped meanwhile.
            CellTimeout: If the cell ran past its timeout.
            Interrupted: If the user interrupted it.
        """
        self.close()
        now_s = time.monotonic()
        for rank in self.request.ranks:
            self._reducer.end(rank, now_s)
        result = CellResult(
            tuple(
                result_of(rank, state, self._reducer, self._death)
                for rank, state in self._states.items()
            )
        )
        try:
            self._draw(self._reducer.due(now_s))
            self._draw([Line("stdout", f"{note}\n") for note in self._notes() if note])
            self.tell(self._afterwards())
            self._sink.close(result)
            if not self._lost:
                self.on_finish()
        finally:
            hang = self._hang
            CellOutcome(
                lost=self._lost,
                is_interrupted=self._escalation.has_begun,
                timeout_s=self.request.timeout_s if self._has_timed_out else None,
                aborted=hang.abort_reason,
                is_deadlock=hang.is_deadlock,
                grace_s=self._ranks.grace_s,
                outcome=hang.outcome or UNTOUCHED,
                replaced=hang.replaced,
                stopped=hang.stopped,
                is_program=self.request.is_program,
                waiting=hang.aborted_ranks,
                places=hang.places,
                unmatched=hang.unmatched.text if hang.unmatched else "",
                can_restart=self._ranks.maintenance.can_replace,
            ).raise_for(result, self._ranks.explain)
        return result

    def _afterwards(self) -> tuple[str, ...]:
        """Lines on the ranks' calls and groups, and the notes of features."""
        is_ok = self._is_whole and not self._hang.unmatched
        noted = [line for h in self._ranks.hooks for line in h.after(self.run_id, is_ok=is_ok)]
        if self._hang.outcome is not None:
            return (*self._hang.outcome.lines, *noted)
        mismatches = self._ranks.health.mismatches(self.run_id) if is_ok and not self._lost else ()
        return (*mismatches, *noted)

    @property
    def _is_whole(self) -> bool:
        """Whether the code ended well on every rank, with nothing aborted."""
        return not self._hang.abort_reason and all(
            state.status == "ok" for state in self._states.values()
        )

    def _draw(self, events: Sequence[Event]) -> None:
        if events:
            self._sink.draw(events)

    def _tell_during(self, hook: CellHook) -> None:
        self.tell(hook.during(self.run_id))

    def tell(self, lines: Iterable[str]) -> None:
        """Show lines of nbdist's own among the cell's output."""
        self._draw([Line("stderr", f"{line}\n") for line in lines])

    def _end(self, rank: int, reply: Any, arrived_s: float) -> None:
        state = self._states[rank]
        if state.status:
            return
        state.reply = reply
        state.elapsed_s = arrived_s - self._began_s
        failure = failure_of(reply)
        if failure is None:
            # %run shows its script's error and replies ok: the cell has failed all the same.
            state.status = "ok" if self._reducer.failure(rank) is None else "error"
        elif failure[0] == "RankDied":
            state.status = "died"
            self._tell_death(rank)
        else:
            was_aborted = bool(self._hang.abort_reason)
            is_ours = self._escalation.has_begun and is_by_interrupt(
                failure, was_aborted=was_aborted
            )
            state.status = "interrupted" if is_ours else "error"
        self._reducer.end(rank, self._now_s)

    def _note_exit(self, rank: int) -> None:
        if rank in self._states:
            self._states[rank].exit_seen_s = self._now_s
            self._tell_death(rank)

    def _tell_death(self, rank: int) -> None:
        """Say that a rank is gone while others still run; at the end the error says it."""
        state = self._states[rank]
        others = [r for r in self.missing if r != rank]
        if others and not (state.is_told or self.request.is_patient):
            state.is_told = True
            self.tell([f"rank {rank} {self._death(rank)}"])

    def _death(self, rank: int) -> str:
        return self._ranks.death(rank, is_program=self.request.is_program)

    def _sigint_s(self, rank: int) -> float:
        """When to interrupt a rank."""
        state = self._states[rank]
        if state.status:
            return NEVER_S
        return self._escalation.sigint_s(state.begun_s, state.interrupted_s)

    def _apply_deadlines(self, now_s: float) -> None:
        self._interrupt_late(now_s)
        for rank in self.missing:
            seen_s = self._states[rank].exit_seen_s
            if seen_s is not None and now_s >= seen_s + LAST_WORDS_S:
                self._give_up(rank, "died", now_s)
            elif now_s >= self._sigint_s(rank):
                self._states[rank].interrupted_s = now_s
                self._ranks.interrupt(rank)
        if self._escalation.replace_s is not None:
            self._hang.replace(self.missing)
        if now_s >= self._escalation.give_back_s or self._lost:
            for rank in self.missing:
                self._give_up(rank, "unfinished", now_s)

    def _interrupt_late(self, now_s: float) -> None:
        """Begin an interrupt at the timeout; then, end ranks whose reply an interrupt has cost."""
        if self._escalation.has_begun:
            for rank in self._ranks.busy.free_silent() & {*self.missing}:
                self._give_up(rank, "interrupted", now_s)
        elif now_s >= self._timeout_at_s:
            self._has_timed_out = True
            self._escalation.time_out(now_s)

    def _give_up(self, rank: int, status: str, now_s: float) -> None:
        self._states[rank].status = status
        self._states[rank].elapsed_s = now_s - self._began_s
        self._reducer.end(rank, now_s)

    def _deadlines_s(self, now_s: float) -> list[float]:
        times = [
            now_s + LONGEST_PAUSE_S,
            self._hang.next_s,
            self._escalation.give_back_s,
            NEVER_S if self._escalation.has_begun else self._timeout_at_s,
        ]
        due_s = self._reducer.next_due_s()
        if due_s is not None:
            times.append(due_s)
        times.extend(self._tell_s(rank) for rank in self._states)
        for rank in self.missing:
            seen_s = self._states[rank].exit_seen_s
            times.append(self._sigint_s(rank))
            times.append(NEVER_S if seen_s is None else seen_s + LAST_WORDS_S)
        return times

    def _clean_up(self, now_s: float) -> float | None:
        """See to the groups once all ranks have ended; None when that is done."""
        if not self._hang.is_recovering:
            if self._lost or self.request.is_program:  # with which the ranks end
                return None
            if self._is_whole:
                settling_s = self._hang.find_unmatched(now_s)
                if not self._hang.unmatched or settling_s > 0:
                    return settling_s or None
        return self._hang.recover(now_s, is_broken=self._is_broken)

    @property
    def _is_broken(self) -> bool:
        """Whether a rank has died, or failed because another one did."""
        return any(
            state.status == "died" or (state.status == "error" and self._failure(rank).is_follower)
            for rank, state in self._states.items()
        )

    def _rank_states(self) -> dict[int, tuple[str, str]]:
        """The state of every rank, in the diagnosis's words."""
        states = self._ranks.rank_states()
        for rank, state in self._states.items():
            failure = self._reducer.failure(rank)
            states[rank] = VIEWED[state.status], failure.name if failure is not None else ""
        return states

    def _tell_s(self, rank: int) -> float:
        """When to report a rank's failure; never after an interrupt, or for stored outputs."""
        state = self._states[rank]
        is_due = state.status == "error" and not state.is_told
        if not is_due or self.request.is_patient or self._escalation.has_begun:
            return NEVER_S
        return self._began_s + state.elapsed_s + TELL_S

    def _tell_failures(self, now_s: float) -> None:
        """Say that a rank has failed while others run on, who may be waiting for it in vain."""
        failed = [rank for rank in self._states if now_s >= self._tell_s(rank)]
        for rank in failed:
            self._states[rank].is_told = True
        if failed and not self._hang.abort_reason and self._hang.deadlock is None:
            summary = failing.summary([self._failure(rank) for rank in failed])
            stop = STOP[self.request.is_program]
            running = f"{ranks_phrase(self.missing)} still running ({stop} interrupts)"
            self.tell([f"{summary}; {running}"])

    def _failure(self, rank: int) -> RankFailure:
        return failure_in(rank, self._states[rank], self._reducer)

    def _notes(self) -> list[str]:
        times = {rank: state.elapsed_s for rank, state in self._states.items()}
        if any(state.status != "ok" for state in self._states.values()):
            times = {}  # what a failure took says nothing about the ranks
        # Whether this line comes depends on measured times: stored outputs do without it.
        elsewhere = {"where": ""} if self.request.is_program else {}
        return [
            "" if self.request.keeps_outputs else self._reducer.hidden(**elsewhere),
            "" if self.request.is_patient else elapsed_line(times),
        ]
