"""Records of what ranks do in torch.distributed: calls, groups, call logs, findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's code.

    Attributes:
        cell: The notebook's cell number; None in a file.
        file: Base name of the file; empty in a cell.
        line: From 1.
        source: The line's text, stripped and cut; empty where it is not known.
    """

    cell: int | None
    file: str
    line: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a rank that other ranks have a part in.

    Attributes:
        op: torch.distributed's name: "all_reduce", "send", "barrier", "new_group".
        detail: "float32[3]", "float32[3], src=0"; empty where there is nothing to say.
        group: torch's name of the process group.
        number: The call's position in its channel since the last recovery, from 1. A channel is
            the group for collectives, and (group, source, destination) for send and recv.
        peer: The other rank of a send or recv, by its global rank; None otherwise, and for a
            recv from any rank.
        place: The line of the user's code.
        run: The cell run in which it was made.
        began_s: The host's monotonic clock.
        ended_s: By the same clock; None while the call has not ended.
        state: "waiting" (inside the call, or inside wait() of an asynchronous one), "issued"
            (asynchronous, not waited for), "done" or "raised".
    """

    op: str
    detail: str
    group: str
    number: int
    peer: int | None
    place: SourceLine | None
    run: int
    began_s: float
    ended_s: float | None
    state: str


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A process group of which a rank is a member.

    Attributes:
        name: torch's name; the same on every member.
        ranks: Global ranks, in order.
        calls: Collectives that this rank has made in it since the last recovery.
        description: The maker's name for it (`group_desc`), else torch's name.
    """

    name: str
    ranks: tuple[int, ...]
    calls: int
    description: str = ""


@dataclass(frozen=True, slots=True)
class CallLog:
    """A rank's call log at one moment.

    Attributes:
        generation: How often its groups have been recovered.
        run: The cell run that it runs, or ran last; 0 before the first.
        state: "running", "finished" or "raised", of that run.
        since_s: When the state began; the host's monotonic clock.
        transfers: (group, source, destination) -> sends and recvs of this rank so far; by
            global ranks.
        calls: The newest calls, oldest first.
        waits: The calls in which the rank is now, oldest first.
    """

    rank: int
    pid: int
    generation: int
    run: int
    state: str
    since_s: float
    groups: Mapping[str, GroupRecord]
    transfers: Mapping[tuple[str, int, int], int]
    calls: Sequence[Call]
    waits: tuple[Call, ...]

    @property
    def waiting(self) -> Call | None:
        """The newest call that the rank is inside now."""
        return self.waits[-1] if self.waits else None


@dataclass(frozen=True, slots=True)
class FlightRecorderEntry:
    """A call in one of torch's flight recorders, C++ callers included.

    Attributes:
        number: torch's sequence number within the group, since the last recovery.
        is_pending: Whether the recorder has not seen its end (which Gloo's never sees for some).
        group: torch's name of the process group.
        is_transfer: A send or a recv, numbered apart.
    """

    op: str
    detail: str
    number: int
    is_pending: bool
    group: str = ""
    is_transfer: bool = False


@dataclass(frozen=True, slots=True)
class ThreadSnapshot:
    """A rank's answer while its main thread is busy or blocked.

    Attributes:
        place: The innermost line of the user's code that the main thread is in.
        stack: The main thread's Python stack, innermost last.
        is_in_torch: The innermost frame is torch's own code.
        is_asleep: The main thread used no processor time while this was looked at.
        newest: Group name -> newest collective in Gloo's flight recorder; empty without one.
        device_calls: The newest calls in NCCL's, which a GPU executes later than the rank makes
            them, in the order in which they were made.
        is_held: Some of these are not done, and the main thread has stood at one instruction for
            as long as it was looked at, whether it sleeps or uses a core: that is how CUDA waits.
        is_free: The main thread is neither in a call itself, nor joins a thread that is.
        free_threads: Names of other threads and of tasks of the user that are in no call.
    """

    place: SourceLine | None
    stack: tuple[str, ...]
    is_in_torch: bool
    is_asleep: bool
    newest: Mapping[str, FlightRecorderEntry] = field(default_factory=dict)
    device_calls: tuple[FlightRecorderEntry, ...] = ()
    is_held: bool = False
    is_free: bool = False
    free_threads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankView:
    """All that the notebook knows of one rank while a cell runs.

    Attributes:
        state: "running", "finished", "raised", "ended" (its process), "stopped" (SIGSTOP),
            "absent" (idle, the cell was not sent to it) or "busy" (with an earlier cell).
        how: The exception's class if it raised, the way it ended if it did ("signal SIGKILL").
        log: The rank's call log; None where it cannot be read.
        snapshot: The rank's newest answer; None where it was not asked.
        looked_s: When the rank was asked for that answer; the host's monotonic clock.
    """

    rank: int
    state: str
    how: str = ""
    log: CallLog | None = None
    snapshot: ThreadSnapshot | None = None
    looked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class UnmatchedCall:
    """A call of a cell that not all members of its group have made.

    Attributes:
        text: A sentence that names the ranks that made it and those that did not.
        group: torch's name of the process group.
        number: The call's number in the group: the next call of a loop has the same text.
    """

    text: str
    group: str
    number: int


@dataclass(frozen=True, slots=True)
class WaitFinding:
    """Why ranks wait.

    Attributes:
        text: One line that a person understands.
        is_certain: A deadlock: it cannot end by itself. Otherwise a rank is only late.
        waiting: The ranks that wait.
        blamed: The ranks for which they wait.
        marks: Which calls they wait in, by number: the same line can be another call.
        is_doomed: Not certain, as a rank is only late, but the call can never be made whole.
    """

    text: str
    is_certain: bool
    waiting: tuple[int, ...]
    blamed: tuple[int, ...]
    marks: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    is_doomed: bool = field(default=False, compare=False)
