"""Recording a cell on ranks, whatever of it: begin, run, and take in what each rank has."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Generic, TypeVar

from nbdist.cells.kernel import progress
from nbdist.cells.kernel.cell_request import CellHook
from nbdist.cells.kernel.progress import Tell
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.errors import Interrupted, NbdistError
from nbdist.rpc.kernel.functions import RankFunction
from nbdist.rpc.wire import CELL_RECORDING
from nbdist.variables import unpack
from nbdist.variables.kernel import Variables
from nbdist.variables.pack import PackedValue

# A rank's first profiler loads CUPTI.
BEGIN_S = 60.0
# Ranks read what they have recorded at the same time: 4 us per event of a trace.
FINISH_S = 300.0
POLL_S = 0.5
# How often ranks that record are asked how far they are: a question costs each a millisecond.
WATCH_S = 1.0

Options = TypeVar("Options")
Result = TypeVar("Result")


class Recordings(CellHook, Generic[Options, Result]):
    """The recordings of one subject: one at a time, and the last one is kept.

    Attributes:
        noun, nouns: What one rank's is called, and those of all: "trace", "traces".
        begin_rank: Lets a rank record the cell that brings a token.
        finish_rank: What a rank has recorded.
        nothing: The error where nothing has been recorded, and what it says before the remedy.
        magic: Of the cells that are recorded.
        count: Recordings that were taken in.
        token: What a cell brings that is to be recorded.
    """

    noun: ClassVar[str]
    nouns: ClassVar[str]
    begin_rank: ClassVar[RankFunction[[Any, str], None]]
    finish_rank: ClassVar[RankFunction[[Sequence[str]], PackedValue]]
    nothing: ClassVar[tuple[type[NbdistError], str]]
    magic: ClassVar[str]

    def __init__(self, ranks: Ranks, variables: Variables):
        self._ranks = ranks
        self._variables = variables
        self._last: Result | None = None
        self._recorded: tuple[int, ...] = ()
        self._tell: Tell = lambda *_args, **_kwargs: None
        self.count = 0
        self.token = ""

    @property
    def last(self) -> Result:
        """Newest recording.

        Raises:
            NbdistError: If nothing was: the subject's own.
        """
        if self._last is None:
            error, what = self.nothing
            raise error(
                f"{what} Begin a cell with {self.magic}, for example: {self.magic} --steps 3"
            )
        return self._last

    def begin(self, options: Options, ranks: str | Sequence[int] | None = None) -> None:
        """Let ranks record the cell that they get next.

        Args:
            options: What is recorded.
            ranks: As in Session.run; None for all.

        Raises:
            OptionError: If a rank does not exist.
            NbdistError: If a rank cannot record.
            RankGone, RankBusy, NotRunning: As for a cell.
        """
        chosen = self._ranks.chosen(ranks)
        token = uuid.uuid4().hex
        self._ranks.call_all(self.begin_rank, options, token, deadline_s=BEGIN_S, ranks=chosen)
        self._recorded, self.token = chosen, token

    def before(self, metadata: dict[str, Any]) -> Iterable[str]:
        """A cell that is to be recorded brings the token."""
        if self.token:
            metadata[CELL_RECORDING] = self.token
        return ()

    @contextlib.contextmanager
    def recording(
        self, options: Options, ranks: str | Sequence[int] | None = None
    ) -> Iterator[None]:
        """Record the cell that runs inside; what there is is taken in however it ends.

        Raises:
            As `begin` and `finish`; a failure of the cell goes first.
        """
        with progress.of_ranks(self._ranks, self.noun, period_s=WATCH_S) as self._tell:
            self._tell("preparing")
            self.begin(options, ranks)
            self._tell("recording")
            try:
                yield
            except BaseException:
                with contextlib.suppress(NbdistError):
                    self.finish()
                raise
            self.finish()

    def finish(self) -> Result:
        """Take in what the ranks have recorded, however their cell ended.

        A rank that gives nothing has an empty entry, with the reason in its `problem`. Cells that
        are sent after this are not recorded.

        Raises:
            Interrupted: If the user interrupted it; what the ranks hold is kept.
        """
        self.token = ""
        self._last = self._join(self._take(self.finish_rank, self._recorded))
        self.count += 1
        return self._last

    def _join(self, answers: dict[int, dict[str, Any]]) -> Result:
        """All ranks' parts, in rank order; one that gave nothing has a `problem`."""
        raise NotImplementedError

    def _take(
        self, ask: RankFunction[[Sequence[str]], PackedValue], ranks: Sequence[int]
    ) -> dict[int, dict[str, Any]]:
        """Ask each rank for its recording, opened, or {"problem": why it gives nothing}."""
        with self._variables.folders(ranks) as folders:
            reasons = {rank: self._reason_to_skip(rank) for rank in ranks}
            futures = {
                rank: ask(self._ranks.call, rank, folders) for rank in ranks if not reasons[rank]
            }
            answers = {rank: {"problem": reason} for rank, reason in reasons.items()}
            end_s = time.monotonic() + FINISH_S
            try:
                for number, (rank, future) in enumerate(futures.items()):
                    self._tell(f"reading the {self.noun} of", number, len(futures), "ranks")
                    answers[rank] = self._answer(rank, future, end_s)
            except KeyboardInterrupt:
                for rank, future in futures.items():
                    if not future.done():
                        self._ranks.interrupt(rank)
                raise Interrupted(f"the {self.nouns} of the ranks were not read") from None
            return answers

    def _reason_to_skip(self, rank: int) -> str:
        if not self._ranks.is_connected(rank):
            end = self._ranks.end_of(rank)
            return f"It ended{f' ({end})' if end else ''} before its {self.noun} was read."
        if self._ranks.is_busy(rank):
            return f"It is still running its cell, so its {self.noun} was not read."
        return ""

    def _answer(self, rank: int, future: Future[PackedValue], end_s: float) -> dict[str, Any]:
        while True:
            try:
                parcel = future.result(min(POLL_S, max(0.0, end_s - time.monotonic())))
            except TimeoutError:
                if not self._ranks.is_connected(rank):
                    return {"problem": f"It ended while its {self.noun} was read."}
                if time.monotonic() >= end_s:
                    return {"problem": f"Its {self.noun} did not arrive within {FINISH_S:.0f} s."}
            except Exception as error:  # noqa: BLE001  # whatever a rank raised is the reason
                return {"problem": str(getattr(error, "evalue", error))}
            else:
                try:
                    return unpack.unpack(parcel)
                except NbdistError as error:
                    return {"problem": f"Its {self.noun} did not arrive: {error}"}

    def _host(self, rank: int) -> str:
        return self._ranks.topology.ranks[rank].host
