"""Recording a cell on ranks, whatever of it: begin, run, and take in what each rank has."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nbdist.cells.kernel import progress
from nbdist.cells.kernel.cell_request import CellHook
from nbdist.cells.kernel.progress import Tell
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.errors import Interrupted, NbdistError
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


@dataclass(frozen=True, slots=True)
class RecordingKind:
    """What a recording is of: its names, and how ranks begin and finish it.

    Attributes:
        noun: Of one rank: "trace".
        nouns: Of all: "traces".
        begin: Lets a rank record the cell that brings a token.
        finish: What a rank has recorded.
        nothing: The error where nothing has been recorded.
    """

    noun: str
    nouns: str
    begin: Callable[..., Future[None]]
    finish: Callable[..., Future[PackedValue]]
    nothing: Callable[[], NbdistError]


class Recordings(CellHook, Generic[Options, Result]):
    """The recordings of one subject: one at a time, and the last one is kept."""

    def __init__(self, ranks: Ranks, variables: Variables, kind: RecordingKind):
        self._ranks = ranks
        self._variables = variables
        self._kind = kind
        self._last: Result | None = None
        self._recorded: tuple[int, ...] = ()
        self._tell: Tell = lambda *_args, **_kwargs: None
        self.count = 0  # recordings that were taken in
        self.token = ""  # what a cell brings that is to be recorded

    @property
    def last(self) -> Result:
        """What was recorded last.

        Raises:
            NbdistError: If nothing was: the subject's own.
        """
        if self._last is None:
            raise self._kind.nothing()
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
        self._ranks.call_all(self._kind.begin, options, token, deadline_s=BEGIN_S, ranks=chosen)
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
        with progress.of_ranks(self._ranks, self._kind.noun, period_s=WATCH_S) as self._tell:
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
        answers = self._taken(self._kind.finish, self._recorded)
        self._last = self._joined(answers)
        self.count += 1
        return self._last

    def _joined(self, answers: dict[int, dict[str, Any]]) -> Result:
        """All ranks' parts, in rank order; one that gave nothing has a `problem`."""
        raise NotImplementedError

    def _taken(
        self, ask: Callable[..., Future[PackedValue]], ranks: Sequence[int]
    ) -> dict[int, dict[str, Any]]:
        """What each rank gives, opened, or {"problem": why it gives nothing}."""
        with self._variables.folders(ranks) as folders:
            answers = self._ask_all(ask, ranks, folders)
            return {rank: self._open(answer) for rank, answer in answers.items()}

    def _ask_all(
        self, ask: Callable[..., Future[PackedValue]], ranks: Sequence[int], folders: Sequence[str]
    ) -> dict[int, PackedValue | str]:
        noun = self._kind.noun
        answers: dict[int, PackedValue | str] = {}
        futures: dict[int, Future[Any]] = {}
        for rank in ranks:
            if not self._ranks.is_connected(rank):
                end = self._ranks.end_of(rank)
                answers[rank] = f"It ended{f' ({end})' if end else ''} before its {noun} was read."
            elif self._ranks.is_busy(rank):
                answers[rank] = f"It is still running its cell, so its {noun} was not read."
            else:
                futures[rank] = ask(self._ranks.call, rank, folders)
        end_s = time.monotonic() + FINISH_S
        try:
            for number, (rank, future) in enumerate(futures.items()):
                self._tell(f"reading the {noun} of", number, len(futures), "ranks")
                answers[rank] = self._answer(rank, future, end_s)
        except KeyboardInterrupt:
            for rank, future in futures.items():
                if not future.done():
                    self._ranks.interrupt(rank)
            raise Interrupted(f"the {self._kind.nouns} of the ranks were not read") from None
        return {rank: answers[rank] for rank in ranks}

    def _answer(self, rank: int, future: Future[Any], end_s: float) -> PackedValue | str:
        noun = self._kind.noun
        while True:
            try:
                parcel: PackedValue = future.result(min(POLL_S, max(0.0, end_s - time.monotonic())))
            except TimeoutError:
                if not self._ranks.is_connected(rank):
                    return f"It ended while its {noun} was read."
                if time.monotonic() >= end_s:
                    return f"Its {noun} did not arrive within {FINISH_S:.0f} s."
            except Exception as error:  # noqa: BLE001  # whatever a rank raised is the reason
                return str(getattr(error, "evalue", error))
            else:
                return parcel

    def _open(self, answer: PackedValue | str) -> dict[str, Any]:
        if isinstance(answer, str):
            return {"problem": answer}
        try:
            return unpack.unpack(answer)
        except NbdistError as error:
            return {"problem": f"Its {self._kind.noun} did not arrive: {error}"}

    def _host(self, rank: int) -> str:
        return self._ranks.topology.ranks[rank].host
