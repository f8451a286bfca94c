"""The ranks of one notebook: run cells on them, call them, interrupt them.

Only here do rank and engine meet: outside, everything is a rank.
"""

from __future__ import annotations

import functools
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from nbdist.client import remote, run
from nbdist.client.channel import failure_of
from nbdist.client.cluster import Cluster, Exit
from nbdist.client.run import CellRequest, CellRun, Sink
from nbdist.core import hints
from nbdist.core.cells import CellResult
from nbdist.core.failures import RankFailure, ranks_are, ranks_phrase
from nbdist.core.ranks import parse_ranks, rank_label
from nbdist.core.shown import is_stored
from nbdist.core.status import RankStatus
from nbdist.core.topology import Topology
from nbdist.core.wire import CELL_NUMBER
from nbdist.errors import Interrupted, NbdistError, NotRunning, RankBusy, RankGone

BUSY_GRACE_S = 1.0
CALL_DEADLINE_S = 30.0
STATUS_DEADLINE_S = 2.0
# The controller may tell of a death some milliseconds before the process has been reaped.
EXIT_KNOWN_S = 0.5


class Session:
    """Running ranks, and the way to them."""

    def __init__(self, cluster: Cluster, topology: Topology, sink: Callable[[CellRequest], Sink]):
        """Use a started cluster.

        Args:
            cluster: Started, its groups formed.
            topology: Which engine has which rank.
            sink: Makes the place where a cell's output goes.
        """
        self.topology = topology
        self.started_s = time.time()
        # The number of the notebook's cell that is running, for tracebacks of `run`.
        self.cell_number: Callable[[], int | None] = lambda: None
        # Whether the notebook itself has a variable of a name, for hints.
        self.has_name: Callable[[str], bool] = lambda _name: False
        self._cluster = cluster
        self._sink = sink
        self._busy: dict[int, tuple[CellRun, float]] = {}
        self._is_stopped = False
        cluster.on_exit = self._note_exit

    def __repr__(self) -> str:
        state = "stopped" if self._is_stopped else self.topology.backend
        return f"<nbdist.Session ranks {rank_label(self.ranks)}, {state}>"

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, dead ones too."""
        return tuple(place.rank for place in self.topology.ranks)

    @property
    def cluster(self) -> Cluster:
        """The cluster under the ranks."""
        return self._cluster

    def run(
        self,
        code: str,
        *,
        ranks: str | Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> CellResult:
        """Run source on ranks as a distributed cell and wait for it.

        Args:
            code: Source as in a cell, magics included.
            ranks: "0,2-3", numbers, or None for all.
            timeout_s: Interrupt the ranks after this long.

        Raises:
            DistributedError: If it failed on a rank; see also `begin`.
        """
        request = CellRequest(
            code,
            self.chosen(ranks),
            number=self.cell_number(),
            timeout_s=timeout_s,
            is_patient=is_stored(),
        )
        return run.wait(lambda: self.begin(request))

    def begin(self, request: CellRequest) -> CellRun:
        """Send a cell to its ranks; `run.wait` or `run.wait_async` see it through.

        Raises:
            NotRunning: After the cluster was stopped.
            RankGone: If a chosen rank has ended.
            RankBusy: If a chosen rank still runs an earlier cell.
        """
        self._check_alive(request.ranks)
        self._check_idle(request.ranks)
        one = CellRun(self, request, self._sink(request))
        assert self._cluster.channel is not None
        metadata = {} if request.number is None else {CELL_NUMBER: request.number}
        for rank in request.ranks:
            self._busy[rank] = (one, time.monotonic())
        for number, rank in enumerate(request.ranks):
            try:
                self._cluster.channel.execute(
                    self.topology.engine_of_rank(rank),
                    request.code,
                    metadata,
                    on_message=functools.partial(one.message, rank),
                    on_done=functools.partial(self._end, rank, one),
                )
            except BaseException:
                for unsent in request.ranks[number:]:  # they would count as busy for ever
                    self._busy.pop(unsent, None)
                raise
        return one

    def chosen(self, ranks: str | Sequence[int] | None) -> tuple[int, ...]:
        """The ranks that are meant, checked.

        Raises:
            OptionError: If one does not exist.
        """
        if ranks is None:
            return self.ranks
        text = ranks if isinstance(ranks, str) else ",".join(map(str, ranks))
        return parse_ranks(text, self.topology.world_size)

    def call_all(
        self, function: Callable[..., Future[Any]], *args: Any, deadline_s: float
    ) -> list[Any]:
        """Call one of remote's functions on every rank at once; results in rank order.

        Raises:
            RankGone, RankBusy: As for a cell.
            NbdistError: What a rank raised, or who has not answered by the deadline.
            Interrupted: If the user interrupted it; the ranks have been interrupted too.
        """
        self._check_alive(self.ranks)
        self._check_idle(self.ranks)
        futures = [function(self._call, rank, *args) for rank in self.ranks]
        try:
            return self._results(futures, deadline_s)
        except KeyboardInterrupt as error:
            late = [r for r, f in zip(self.ranks, futures, strict=True) if not f.done()]
            for rank in late:
                self.interrupt(rank)
            raise Interrupted(f"{ranks_phrase(late)} had not answered") from error

    def _results(self, futures: Sequence[Future[Any]], deadline_s: float) -> list[Any]:
        end_s = time.monotonic() + deadline_s
        results = []
        for rank, future in zip(self.ranks, futures, strict=True):
            try:
                results.append(future.result(max(0.0, end_s - time.monotonic())))
            except TimeoutError as error:
                late = [r for r, f in zip(self.ranks, futures, strict=True) if not f.done()]
                raise NbdistError(
                    f"{ranks_phrase(late)} did not answer within {deadline_s:g} s"
                ) from error
            except Exception as error:
                raise NbdistError(f"rank {rank}: {getattr(error, 'evalue', error)}") from error
        return results

    def status(self) -> list[RankStatus]:
        """What every rank does now, within STATUS_DEADLINE_S. A busy rank is not asked."""
        asked = {}
        if not self._is_stopped:
            idle = [r for r in self.ranks if r not in self._busy and self._is_connected(r)]
            asked = {r: remote.memory_bytes(self._call, r) for r in idle}
        end_s = time.monotonic() + STATUS_DEADLINE_S
        return [self._rank_status(rank, asked.get(rank), end_s) for rank in self.ranks]

    def sync(self, deadline_s: float = CALL_DEADLINE_S) -> list[float]:
        """Wait until all ranks are idle and together; how long each waited, in seconds.

        Raises:
            NbdistError: Naming the ranks that did not come.
        """
        key = uuid.uuid4().hex
        return self.call_all(remote.barrier, key, deadline_s, deadline_s=deadline_s + 5)

    def interrupt(self, rank: int) -> None:
        """Send SIGINT to a rank; its variables stay."""
        self._cluster.interrupt(self.topology.engine_of_rank(rank))

    def stop(self) -> None:
        """End all ranks and remove what they left. Twice is harmless."""
        self._is_stopped = True
        self._cut_off("The ranks were stopped")
        self._cluster.stop()

    def death(self, rank: int) -> str:
        """How a rank ended, as a sentence."""
        end = self._cluster.exit_of(self.topology.engine_of_rank(rank), EXIT_KNOWN_S)
        how = f" ({end.how})" if end is not None else ""
        return f"ended{how} while it ran this cell; its variables are lost"

    def explained(self, failure: RankFailure) -> RankFailure:
        """The failure, with what to do where the reason is how ranks and notebook differ."""
        return hints.explained(failure, hints.Surroundings(sys.executable, self.has_name))

    def _call(self, rank: int, name: str, *args: Any) -> Future[Any]:
        assert self._cluster.channel is not None
        return self._cluster.channel.call(self.topology.engine_of_rank(rank), name, *args)

    def _exit(self, rank: int) -> Exit | None:
        return self._cluster.exits.get(self.topology.engine_of_rank(rank))

    def _is_connected(self, rank: int) -> bool:
        """Whether the rank can be reached; of ranks on other hosts no exit may be known."""
        channel = self._cluster.channel
        engine = self.topology.engine_of_rank(rank)
        return self._exit(rank) is None and channel is not None and engine in channel.engine_ids

    def _running(self) -> list[CellRun]:
        return list({id(one): one for one, _ in list(self._busy.values())}.values())

    def _cut_off(self, why: str) -> None:
        for one in self._running():
            one.cut_off(why)

    def _note_exit(self, end: Exit) -> None:
        if end.engine is None:
            self._cut_off(f"The cluster's controller ended ({end.how})")
            return
        for place in self.topology.ranks:  # an engine beyond the ranks concerns nobody
            if place.engine_id == end.engine:
                for one in self._running():
                    one.exited(place.rank)

    def _end(self, rank: int, one: CellRun, reply: Any) -> None:
        busy = self._busy.get(rank)
        if busy is not None and busy[0] is one:
            del self._busy[rank]
        one.done(rank, reply)

    def _check_alive(self, ranks: Sequence[int]) -> None:
        if self._is_stopped:
            raise NotRunning("These ranks were stopped. %dist_init starts new ones.")
        controller = self._cluster.exits.get(None)
        if controller is not None:
            raise RankGone(
                f"The cluster's controller has ended ({controller.how}), so no rank can be "
                "reached. %dist_reset starts afresh."
            )
        gone = [(rank, self._exit(rank)) for rank in ranks if not self._is_connected(rank)]
        if gone:
            alive = [rank for rank in self.ranks if self._is_connected(rank)]
            others = f"%%rank [{rank_label(alive)}] runs on the others; " if alive else ""
            verb = "have" if len(gone) > 1 else "has"
            how = ", ".join(
                f"rank {rank}: {end.how if end is not None else 'its connection is lost'}"
                for rank, end in gone
            )
            raise RankGone(
                f"{ranks_phrase([rank for rank, _ in gone])} {verb} ended ({how}). {others}"
                "%dist_reset starts all afresh."
            )

    def _check_idle(self, ranks: Sequence[int]) -> None:
        """Give ranks that were interrupted a moment to come back before refusing."""
        end_s = time.monotonic() + BUSY_GRACE_S
        # A rank may end its cell at any moment, in the client's thread.
        while busy := {r: own for r in ranks if (own := self._busy.get(r)) is not None}:
            if time.monotonic() > end_s:
                one, since_s = next(iter(busy.values()))
                cell = (
                    "an earlier cell"
                    if one.request.number is None
                    else f"cell [{one.request.number}]"
                )
                raise RankBusy(
                    f"{ranks_are(tuple(busy))} still running {cell}, for "
                    f"{time.monotonic() - since_s:.0f} s. Wait for it to end, choose other ranks "
                    "with %%rank, or start afresh with %dist_reset."
                )
            time.sleep(0.01)

    def _rank_status(
        self, rank: int, asked: Future[dict[str, int]] | None, end_s: float
    ) -> RankStatus:
        end = self._exit(rank)
        if end is not None:
            return RankStatus(rank, f"ended ({end.how})", {})
        if not self._is_stopped and not self._is_connected(rank):
            return RankStatus(rank, "ended (its connection is lost)", {})
        busy = self._busy.get(rank)
        if busy is not None:
            number = busy[0].request.number
            state = "running a cell" if number is None else f"running cell [{number}]"
            return RankStatus(rank, state, {}, time.monotonic() - busy[1])
        return _idle_status(rank, asked, end_s)


def _idle_status(rank: int, asked: Future[dict[str, int]] | None, end_s: float) -> RankStatus:
    try:
        left_s = max(0.0, end_s - time.monotonic())
        memory = asked.result(left_s) if asked is not None else {}
    except TimeoutError:
        return RankStatus(rank, "does not answer", {})
    except Exception as error:  # noqa: BLE001  # it has just ended, or torch has failed there
        name, message, _ = failure_of(error) or ("", str(error), ())
        return RankStatus(rank, f"cannot answer ({name}: {message})", {})
    return RankStatus(rank, "idle", memory)
