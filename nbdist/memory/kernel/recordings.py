"""Recording the memory of a cell on ranks, and whose it is at this moment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core.failures import RankFailure, plain
from nbdist.errors import OptionError, SnapshotError
from nbdist.memory import file as memory_file
from nbdist.memory import oom_message, oom_text
from nbdist.memory.oom_remedies import OomReport
from nbdist.memory.snapshot import MemoryOptions, Snapshot, empty, shift
from nbdist.recording.kernel import Recordings
from nbdist.rpc.kernel.functions import RankFunction
from nbdist.trace import clock_sync, trace
from nbdist.trace.read import RecordedTrace
from nbdist.variables.kernel import Variables
from nbdist.variables.pack import PackedValue

COST = "Memory of the recording itself is not included: torch's allocators do not serve it."
# A rank has looked at its shortage already, before its reply: its report lies ready.
ASK_S = 10.0

begin_memory: RankFunction[[MemoryOptions, str], None] = RankFunction(
    "nbdist.memory.rank.record:begin"
)
finish_memory: RankFunction[[Sequence[str]], PackedValue] = RankFunction(
    "nbdist.memory.rank.record:finish"
)
memory_now: RankFunction[[Sequence[str]], PackedValue] = RankFunction(
    "nbdist.memory.rank.record:now"
)
last_shortage: RankFunction[[], OomReport | None] = RankFunction("nbdist.memory.rank.oom_hook:last")


class Memories(Recordings[MemoryOptions, Snapshot]):
    """The memory of a session's ranks: one recording at a time, and the last one is kept."""

    noun, nouns, magic = "memory", "memory records", "%%dist_memory"
    begin_rank, finish_rank = begin_memory, finish_memory
    nothing = (SnapshotError, "No memory has been recorded yet.")

    def __init__(self, ranks: Ranks, variables: Variables):
        super().__init__(ranks, variables)
        self._by_name: dict[str, Snapshot] = {}
        self._oom_ranks: tuple[int, ...] = ()  # ranks whose memory has run out since

    def now(self, ranks: str | Sequence[int] | None = None) -> Snapshot:
        """Take a snapshot of ranks' memory at this moment, without a history. It is not kept.

        A rank that cannot be asked has an empty entry, with the reason in its `problem`.

        Args:
            ranks: As in Session.run; None for all.

        Raises:
            OptionError: If a rank does not exist.
            Interrupted: If the user interrupted it.
        """
        return self._join(self._take(memory_now, self._ranks.chosen(ranks)))

    def finish(self) -> Snapshot:
        """Finish: a recording of the cell says more than what was left of it."""
        snapshot = super().finish()
        self._oom_ranks = ()
        return snapshot

    def advice(self, failure: RankFailure) -> str:
        """Advice on a shortage of memory; the memory in use then is shown next."""
        message = oom_message.parse_oom(failure.name, failure.message)
        if message is None and not oom_message.has_oom(plain("\n".join(failure.traceback))):
            return ""
        report, why = self._ask(failure.rank)
        if report is not None:
            self._oom_ranks = tuple(sorted({*self._oom_ranks, failure.rank}))
            return oom_text.block(report)
        return "" if message is None else oom_text.block_without_report(failure.rank, message, why)

    def _ask(self, rank: int) -> tuple[OomReport | None, str]:
        """A rank's report on its shortage, or the reason why there is none."""
        if not self._ranks.is_connected(rank):
            return None, "the rank has ended"
        if self._ranks.is_busy(rank):
            return None, "the rank is still running"
        try:
            return last_shortage(self._ranks.call, rank).result(ASK_S), "nothing was recorded"
        except TimeoutError:
            return None, f"the rank did not answer within {ASK_S:.0f} s"
        except Exception as error:  # noqa: BLE001  # the cell's own error is the one to be raised
            return None, str(getattr(error, "evalue", error))

    def last_or_now(self) -> Snapshot:
        """Return the last recording; without one the same as `now` of all ranks.

        If memory has run out since, it is the memory in use then on those ranks.
        """
        if self._oom_ranks:
            short, self._oom_ranks = self._oom_ranks, ()
            self._last = self._join(self._take(finish_memory, short))
        return self.now() if self._last is None else self._last

    def keep(self, name: str, snapshot: Snapshot) -> None:
        """Keep a snapshot under a name until the ranks are stopped; one of that name is replaced.

        Raises:
            OptionError: If it is no name.
        """
        if not name.isidentifier():
            raise OptionError(
                f"{name!r} is not a valid name: use letters, digits and _, and no digit first."
            )
        self._by_name[name] = snapshot

    def find(self, name: str) -> Snapshot:
        """Find the recording under a name, or else the one saved in a folder of that name.

        Raises:
            OptionError: If there is neither.
            SnapshotError: If the folder's files cannot be read.
        """
        if name in self._by_name:
            return self._by_name[name]
        folder = Path(name).expanduser()
        if folder.is_dir():
            return memory_file.read_folder(folder)
        names = ", ".join(sorted(self._by_name)) or "nothing yet (%dist_memory --keep NAME)"
        raise OptionError(
            f"Nothing is kept as {name!r}, and there is no folder of that name. Kept: {names}."
        )

    def _join(self, replies: dict[int, dict[str, Any]]) -> Snapshot:
        memories = {rank: reply["memory"] for rank, reply in replies.items() if "memory" in reply}
        with_zero = [memory for memory in memories.values() if memory.zero_ns]
        shifts_ns, clock_notes = clock_sync.shifts(
            [RecordedTrace(trace.empty(m.rank, m.host, ""), m.zero_ns) for m in with_zero]
        )
        for memory, by_ns in zip(with_zero, shifts_ns, strict=True):
            memories[memory.rank] = shift(memory, by_ns)
        ranks = tuple(
            memories.get(rank) or empty(rank, self._host(rank), reply["problem"])
            for rank, reply in sorted(replies.items())
        )
        strategies = [reply.get("strategy") for _, reply in sorted(replies.items())]
        has_history = any(memory.duration_ns for memory in ranks)
        notes = (COST, *clock_notes) if has_history else ()
        return Snapshot(ranks, next(filter(None, strategies), ""), notes)
