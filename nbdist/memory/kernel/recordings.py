"""Recording the memory of a cell on ranks, and whose it is at this moment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core.failures import RankFailure
from nbdist.errors import OptionError, SnapshotError
from nbdist.memory import file as memory_file
from nbdist.memory.kernel import oom_report
from nbdist.memory.snapshot import MemoryOptions, Snapshot, empty
from nbdist.recording.kernel import RecordingKind, Recordings
from nbdist.rpc.kernel.functions import RankFunction
from nbdist.variables.kernel import Variables
from nbdist.variables.pack import PackedValue

COST = "Memory of the recording itself is not included: torch's allocators do not serve it."

begin_memory: RankFunction[[MemoryOptions, str], None] = RankFunction(
    "nbdist.memory.rank.record:begin"
)
finish_memory: RankFunction[[Sequence[str]], PackedValue] = RankFunction(
    "nbdist.memory.rank.record:finish"
)
memory_now: RankFunction[[Sequence[str]], PackedValue] = RankFunction(
    "nbdist.memory.rank.record:now"
)


def _nothing() -> SnapshotError:
    return SnapshotError(
        "No memory has been recorded yet. Begin a cell with %%dist_memory, for example: "
        "%%dist_memory --steps 3"
    )


SUBJECT = RecordingKind("memory", "memory records", begin_memory, finish_memory, _nothing)


class Memories(Recordings[MemoryOptions, Snapshot]):
    """The memory of a session's ranks: one recording at a time, and the last one is kept."""

    def __init__(self, ranks: Ranks, variables: Variables):
        super().__init__(ranks, variables, SUBJECT)
        self._by_name: dict[str, Snapshot] = {}
        self._oom_ranks: tuple[int, ...] = ()  # ranks whose memory has run out since

    def now(self, ranks: str | Sequence[int] | None = None) -> Snapshot:
        """Whose the memory of ranks is at this moment, without a history. It is not kept.

        A rank that cannot be asked has an empty entry, with the reason in its `problem`.

        Args:
            ranks: As in Session.run; None for all.

        Raises:
            OptionError: If a rank does not exist.
            Interrupted: If the user interrupted it.
        """
        return self._joined(self._taken(memory_now, self._ranks.chosen(ranks)))

    def finish(self) -> Snapshot:
        """As Recordings.finish: a recording of the cell says more than what was left of it."""
        snapshot = super().finish()
        self._oom_ranks = ()
        return snapshot

    def note_shortage(self, rank: int) -> None:
        """The memory of a rank has run out: it has noted what was in use, and is asked for it."""
        self._oom_ranks = tuple(sorted({*self._oom_ranks, rank}))

    def advice(self, failure: RankFailure) -> str:
        """What to do about a shortage of memory; what was in use then is shown next."""
        return oom_report.advice(self._ranks, self.note_shortage, failure)

    def last_or_now(self) -> Snapshot:
        """What was recorded last; where nothing was, as `now` of all ranks.

        If memory has run out since, it is what was in use then on those ranks.
        """
        if self._oom_ranks:
            short, self._oom_ranks = self._oom_ranks, ()
            self._last = self._joined(self._taken(finish_memory, short))
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
        """What is kept under a name, or else saved in a folder of that name.

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

    def _joined(self, replies: dict[int, dict[str, Any]]) -> Snapshot:
        ranks = tuple(
            reply["memory"]
            if "memory" in reply
            else empty(rank, self._host(rank), reply["problem"])
            for rank, reply in sorted(replies.items())
        )
        strategies = [
            reply["strategy"] for _, reply in sorted(replies.items()) if reply.get("strategy")
        ]
        has_history = any(memory.duration_ns for memory in ranks)
        return Snapshot(ranks, strategies[0] if strategies else "", (COST,) if has_history else ())
