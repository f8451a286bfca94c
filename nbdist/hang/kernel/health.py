"""Watches ranks without their main threads' help, and frees them."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from nbdist.cluster.kernel import postmortem, run_dir
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core import procfs
from nbdist.errors import NbdistError
from nbdist.hang import call_log, diagnose
from nbdist.hang.records import CallLog, RankView, ThreadSnapshot, UnmatchedCall
from nbdist.hang.recovery import RecoveryResult
from nbdist.hang.text import place_text
from nbdist.rpc.kernel.functions import RankFunction

# A rank that has not answered by then is asked again.
ANSWER_S = 1.0
# A rank that has answered is left alone for this long, and for longer where there are many: a
# question costs each side a millisecond or more of processor time.
LOOK_PAUSE_S = 0.5
MOST_LOOKS = 32.0  # in a second
# Signals that end a process whose memory was written over: which one depends on what lay there.
_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)

take_snapshot: RankFunction[[], ThreadSnapshot] = RankFunction("look")
abort: RankFunction[[int], int] = RankFunction("abort")
snapshot: RankFunction[[], tuple[float, bytes | None]] = RankFunction("snapshot")
recover: RankFunction[[int, tuple[int, ...]], RecoveryResult] = RankFunction(
    "nbdist.hang.rank.process_groups:recover"
)


class Health:
    """Call logs, states and thread snapshots of all ranks; abort and recovery of their groups.

    Attributes:
        generation: How often the groups have been made anew.
        needs_recovery: They are broken, and could not be made anew yet.
    """

    def __init__(self, ranks: Ranks):
        self.generation = 0
        self.needs_recovery = False
        self._ranks = ranks
        self._logs = CallLogFiles(ranks.cluster.run_dir / "boxes")
        self._snapshots: dict[int, ThreadSnapshot] = {}
        self._asked: dict[int, tuple[Future[Any], float]] = {}
        self._looked_s: dict[int, float] = {}
        self._log_requests: dict[int, tuple[threading.Event, float]] = {}  # (answered, asked_s)
        self._remote: dict[int, CallLog] = {}
        self._ahead_s: dict[int, float] = {}  # our clock, of those of other hosts' ranks
        self._arrived: dict[int, tuple[float, tuple[float, bytes | None]]] = {}
        self._watched: dict[int, tuple[int, postmortem.Postmortem]] = {}
        self._causes: dict[int, str] = {}
        self._last_words: dict[int, str] = {}
        self.watch_processes()

    def log(self, rank: int) -> CallLog | None:
        """The rank's call log; of a rank on another host as it was at its last answer."""
        # The file of a rank that has ended on another host has its times by that host's clock.
        log = self._logs.read(rank, self._ahead_s.get(rank, 0.0))
        return self._remote_log(rank) if log is None else log

    def close(self) -> None:
        """Let go of the ranks' files; a map keeps its descriptor open."""
        self._logs.close()

    def has_ended(self, rank: int, run: int, since_s: float) -> bool:
        """Whether the rank's call log says that it ended a cell at least `since_s` ago."""
        log = self.log(rank)
        return (
            log is not None
            and log.run == run
            and log.state != "running"
            and time.monotonic() > log.since_s + since_s
        )

    def refresh(self, wait_s: float) -> None:
        """Wait up to `wait_s` for a new answer of every rank on another host."""
        self.logs()  # which asks
        end_s = time.monotonic() + wait_s
        for answered, _ in list(self._log_requests.values()):
            answered.wait(max(0.0, end_s - time.monotonic()))

    def logs(self) -> dict[int, CallLog]:
        """The logs of all ranks that have one."""
        return {rank: log for rank in self._ranks.ranks if (log := self.log(rank)) is not None}

    def stopped(self) -> frozenset[int]:
        """The ranks whose processes a signal has stopped (seen on this host only)."""
        return frozenset(rank for rank, pid in self.pids().items() if procfs.state(pid) == "T")

    def watch_processes(self) -> None:
        """Open each new process's records now: a later report of how it ended needs them."""
        for rank, pid in self.pids().items():
            watched = self._watched.get(rank)
            if watched is None or watched[0] != pid:
                new = postmortem.Postmortem(self._ranks.cluster.run_dir, rank, pid)
                self._watched[rank] = pid, new
                self._causes.pop(rank, None)

    def note_exit(self, rank: int, code: int | None, *, is_ours: bool) -> None:
        """Find out how a rank ended, at once: another process may take its place and its files."""
        remote = postmortem.Postmortem(self._ranks.cluster.run_dir, rank, None)
        pid, remains = self._watched.get(rank, (None, remote))
        # The exit itself names a host that cannot be reached, and an end of all ranks at once.
        end = self._ranks.exit_of(rank)
        is_told = end is not None and bool(end.unreachable or end.starter)
        is_known = (pid is not None or code is not None) and not is_told
        self._causes[rank] = remains.cause(code, is_ours=is_ours) if is_known else ""
        last_words = diagnose.last_words(
            list(self.logs().values()), rank, is_crash=code in _CRASHES
        )
        snapshot = self._snapshots.get(rank)
        seen = place_text(snapshot.place) if snapshot is not None else ""
        self._last_words[rank] = last_words or (f"last seen at {seen}" if seen else "")

    def end_of(self, rank: int) -> str:
        """How the rank's process ended; empty while it lives."""
        end = self._ranks.exit_of(rank)
        return "" if end is None else self._causes.get(rank) or end.how

    def last_words_of(self, rank: int) -> str:
        """An ended rank's last act in its cell: its call, else its line where that is known."""
        return self._last_words.get(rank, "")

    def pids(self) -> dict[int, int]:
        """Rank -> process of the living ranks that this kernel has started on its own host."""
        pids = self._ranks.cluster.processes.pids()
        ranks = {place.engine_id: place.rank for place in self._ranks.topology.ranks}
        return {ranks[engine]: pid for engine, pid in pids.items() if engine in ranks}

    def ask(self, ranks: Iterable[int], now_s: float, *, newer_than_s: float = 0.0) -> None:
        """Ask ranks what they are doing, those that have been asked and are late aside.

        An answer to a question older than `newer_than_s` will not do, however new it is.
        """
        pause_s = max(LOOK_PAUSE_S, len(self._ranks.ranks) / MOST_LOOKS)
        for rank in ranks:
            asked = self._asked.get(rank)
            if asked is not None and not asked[0].done() and now_s < asked[1] + ANSWER_S:
                continue
            looked_s = self._looked_s.get(rank, 0.0)
            is_new = newer_than_s <= looked_s and now_s < looked_s + pause_s
            if rank in self._snapshots and is_new:
                continue
            future = self._ranks.ask(take_snapshot, rank)
            if future is not None:
                self._asked[rank] = (future, now_s)

    def newest_snapshot(self, rank: int) -> tuple[ThreadSnapshot | None, float]:
        """(the rank's newest answer that was taken in, when it was asked for). From any thread."""
        return self._snapshots.get(rank), self._looked_s.get(rank, 0.0)

    def forget_snapshot(self, rank: int) -> None:
        """Drop a rank's answer, and the one that it may be about to give."""
        self._snapshots.pop(rank, None)
        self._asked.pop(rank, None)

    def forget_snapshots(self) -> None:
        """Drop the answers: they are about an earlier cell."""
        self._snapshots.clear()
        self._asked.clear()

    @property
    def dead(self) -> tuple[int, ...]:
        """The ranks whose processes have ended."""
        return tuple(rank for rank in self._ranks.ranks if self.end_of(rank))

    def abort(self) -> None:
        """Break off every collective of every rank; their groups are of no use afterwards.

        The kernel awaits no answers: a rank that cannot answer is released by its peers' abort.
        """
        self.needs_recovery = True
        self._ranks.ask_all(lambda ask, rank: abort(ask, rank, self.generation))

    def begin_recovery(self) -> dict[int, Future[Any]]:
        """Make all groups anew, those with a dead rank aside, on all living ranks at once.

        All of them have to be idle.
        """
        self.generation += 1
        ranks = self._ranks
        run_dir.release_reserve(ranks.cluster.run_dir)
        living = [rank for rank in ranks.ranks if ranks.is_connected(rank)]
        dead = tuple(rank for rank in ranks.ranks if rank not in living)
        return {rank: recover(ranks.call, rank, self.generation, dead) for rank in living}

    def stack(self, rank: int, asked: Future[str] | None, end_s: float) -> str:
        """A rank's Python stacks: its own answer, or faulthandler's where C code holds the GIL."""
        if asked is not None:
            with contextlib.suppress(TimeoutError, NbdistError):
                return asked.result(max(0.0, min(end_s - time.monotonic(), ANSWER_S)))
        pid = self.pids().get(rank)
        if pid is None or self.end_of(rank):
            return ""
        deadline_s = max(0.1, end_s - time.monotonic())
        return postmortem.dump_stack(self._ranks.cluster.run_dir, rank, pid, deadline_s)

    def mismatches(self, run: int) -> tuple[str, ...]:
        """Calls of a cell that did not fit together, but ended, as sentences."""
        if not any(self._logs.may_have_called(rank, run) for rank in self._ranks.ranks):
            return ()  # most cells call nothing, and every cell asks
        return diagnose.mismatches(list(self.logs().values()), run)

    def unmatched(self, run: int, ranks: Sequence[int]) -> UnmatchedCall | None:
        """A call of a cell that only some ranks have made."""
        if not any(self._logs.may_have_called(rank, run) for rank in ranks):
            return None
        return diagnose.unmatched(list(self.logs().values()), run, ranks)

    def views(self, states: Mapping[int, tuple[str, str]]) -> list[RankView]:
        """All ranks as the diagnosis wants them, with the answers that have come.

        The states are what their cells know of them: rank -> (state, how) of RankView.
        """
        for rank, (future, asked_s) in list(self._asked.items()):
            if future.done():
                del self._asked[rank]
                self._looked_s[rank] = asked_s
                if future.exception() is None:
                    self._snapshots[rank] = future.result()
                else:  # an older answer would be about something else
                    self._snapshots.pop(rank, None)
        stopped = self.stopped()
        return [self._view(rank, *states[rank], stopped) for rank in self._ranks.ranks]

    def views_now(self) -> dict[int, RankView]:
        """View all ranks as in a running cell; idle ones have ended the newest, or had no part."""
        logs = self.logs()
        busy = self._ranks.busy_ranks
        newest = max((logs[rank].run for rank in busy if rank in logs), default=0)
        states = {rank: ("busy" if rank in busy else "absent", "") for rank in self._ranks.ranks}
        for rank, log in logs.items():
            if log.run == newest:
                states[rank] = "running" if rank in busy else log.state, ""
        return {view.rank: view for view in self.views(states)}

    def _view(self, rank: int, state: str, how: str, stopped: Collection[int]) -> RankView:
        end = self.end_of(rank)
        if end:
            state, how = "ended", end
        elif state in {"running", "busy"} and rank in stopped:
            state = "stopped"
        # The log after the answer: what has happened meanwhile is in it.
        snapshot, looked_s = self._snapshots.get(rank), self._looked_s.get(rank, 0.0)
        return RankView(rank, state, how, self.log(rank), snapshot, looked_s)

    def _remote_log(self, rank: int) -> CallLog | None:
        """Return the rank's last answer, and ask again."""
        came_s, (their_now_s, content) = self._arrived.pop(rank, (0.0, (0.0, None)))
        if content is not None:
            self._ahead_s[rank] = came_s - their_now_s
            self._remote[rank] = call_log.read(content, self._ahead_s[rank])

        answered = threading.Event()

        def note_arrival(sent: Future[tuple[float, bytes | None]]) -> None:
            if sent.exception() is None:
                # To our clock: the log has its host's times. In one step: this is the client's
                # thread, and the main thread takes it.
                self._arrived[rank] = time.monotonic(), sent.result()
            answered.set()

        now_s = time.monotonic()
        newest = self._log_requests.get(rank)
        if newest is None or newest[0].is_set() or now_s >= newest[1] + ANSWER_S:
            sent = self._ranks.ask(snapshot, rank)
            if sent is not None:
                self._log_requests[rank] = (answered, now_s)
                sent.add_done_callback(note_arrival)
        return self._remote.get(rank)


class CallLogFiles:
    """The logs that lie in this host's run folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._maps: dict[int, tuple[int, mmap.mmap]] = {}
        self._read: dict[int, tuple[bytes, float, CallLog]] = {}

    def close(self) -> None:
        """Unmap all; reading maps them again."""
        self._maps.clear()
        self._read.clear()

    def read(self, rank: int, ahead_s: float = 0.0) -> CallLog | None:
        """The rank's log, by a clock that is so much ahead; None where it has none here.

        Read anew only where a byte has changed: a rank that waits, or is idle, writes nothing.
        """
        memory = self._memory(rank)
        if memory is None:
            return None
        written = bytes(memory)
        newest = self._read.get(rank)
        if newest is None or newest[:2] != (written, ahead_s):
            try:
                newest = self._read[rank] = written, ahead_s, call_log.read(memory, ahead_s)
            except ValueError:  # it is just being made
                return None
        return newest[2]

    def may_have_called(self, rank: int, run: int) -> bool:
        """Whether the rank has recorded a call in a cell run; also where that cannot be known."""
        memory = self._memory(rank)
        return memory is None or call_log.newest_run(memory) == run

    def _memory(self, rank: int) -> mmap.mmap | None:
        """The rank's log as it is mapped here; None where it has none."""
        path = self._folder / str(rank)
        try:
            inode = path.stat().st_ino
        except OSError:
            return None
        mapped = self._maps.get(rank)
        if mapped is None or mapped[0] != inode:  # a rank that replaces another has a new one
            descriptor = os.open(path, os.O_RDONLY)
            try:
                mapped = inode, mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
            self._maps[rank] = mapped
        return mapped[1]
