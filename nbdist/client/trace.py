"""Recording a cell on ranks, and the traces that came of it."""

from __future__ import annotations

import contextlib
import gzip
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.client import remote
from nbdist.client.perfetto import Page
from nbdist.core import contents, trace_clocks, trace_merge, trace_read
from nbdist.core.parcels import Parcel
from nbdist.core.trace import Trace, TraceOptions, empty
from nbdist.core.trace_read import Recording
from nbdist.errors import Interrupted, NbdistError, TraceError

if TYPE_CHECKING:
    from nbdist.client.session import Session

# A rank's first profiler loads CUPTI.
BEGIN_S = 60.0
# Ranks write and read their own files, of 0.4 kB and 4 us per event, at the same time.
FINISH_S = 300.0
POLL_S = 0.5
COPY_BYTES = 2**22
FOLDER = "traces"  # as nbdist.engine.trace has it
NAME = "rank{rank}.json"
MERGED = "all_ranks.json.gz"


class Traces:
    """The recordings of a session's ranks: one at a time, and the last one is kept."""

    def __init__(self, session: Session):
        self._session = session
        self._last: Trace | None = None
        self._ranks: tuple[int, ...] = ()
        self._page: Page | None = None
        self.count = 0  # recordings that were taken in
        self.token = ""  # what a cell brings that is to be recorded

    @property
    def last(self) -> Trace:
        """What was recorded last.

        Raises:
            TraceError: If nothing was.
        """
        if self._last is None:
            raise TraceError(
                "Nothing has been recorded yet. Begin a cell with %%dist_profile, for example: "
                "%%dist_profile --steps 3"
            )
        return self._last

    def begin(self, options: TraceOptions, ranks: str | Sequence[int] | None = None) -> None:
        """Let ranks record the cell that they get next.

        Args:
            options: What is recorded.
            ranks: As in Session.run; None for all.

        Raises:
            OptionError: If a rank does not exist.
            TraceError: If a rank cannot record.
            RankGone, RankBusy, NotRunning: As for a cell.
        """
        chosen = self._session.chosen(ranks)
        token = uuid.uuid4().hex
        self._session.call_all(remote.begin_trace, options, token, deadline_s=BEGIN_S, ranks=chosen)
        self._ranks, self.token = chosen, token

    @contextlib.contextmanager
    def recording(
        self, options: TraceOptions, ranks: str | Sequence[int] | None = None
    ) -> Iterator[None]:
        """Record the cell that runs inside; what there is is taken in however it ends.

        Raises:
            As `begin` and `finish`; a failure of the cell goes first.
        """
        self.begin(options, ranks)
        try:
            yield
        except BaseException:
            with contextlib.suppress(NbdistError):
                self.finish()
            raise
        self.finish()

    def finish(self) -> Trace:
        """Take in what the ranks have recorded, however their cell ended.

        A rank that gives nothing has an empty trace, with the reason in its `problem`. Cells that
        are sent after this are not recorded.

        Raises:
            Interrupted: If the user interrupted it; what the ranks hold is kept.
        """
        self.token = ""
        with self._session.variables.folders(self._ranks) as folders:
            answers = self._asked(folders)
            found = {rank: _opened(answer) for rank, answer in answers.items()}
        recordings = {rank: one["recording"] for rank, one in found.items() if "recording" in one}
        missing = [
            empty(rank, self._host(rank), one["problem"])
            for rank, one in found.items()
            if "recording" not in one
        ]
        self._last = trace_clocks.joined(list(recordings.values()), missing)
        self.count += 1
        return self._last

    def page(self, trace: Trace) -> str:
        """The address of a page of Perfetto with this trace, for browsers of this host.

        It is served until another one is, or the ranks are stopped. Whoever has an account on
        this host can read it meanwhile.

        Raises:
            OptionError, TraceError: See client.perfetto.Page.
        """
        self.close()
        run_dir = self._session.cluster.run_dir
        path = run_dir / MERGED
        try:
            trace_merge.write_merged(trace, path)
        except OSError as error:
            raise TraceError(f"{path} cannot be written: {error.strerror or error}.") from error
        self._page = Page(path, run_dir, self._session.cluster.guard)
        return self._page.url

    def close(self) -> None:
        """End what is served."""
        page, self._page = self._page, None
        if page is not None:
            page.close()

    def save(self, folder: Path) -> tuple[Path, ...]:
        """Write a file per rank, as torch's profiler does, and one of all for Perfetto.

        Args:
            folder: Made where it is not there; files of the same names in it are replaced.

        Raises:
            TraceError: If nothing was recorded, or a file cannot be written.
        """
        trace = self.last
        try:
            folder.mkdir(parents=True, exist_ok=True)
            made = [path for rank in self._ranks if (path := self._save_rank(rank, folder))]
            made.append(folder / MERGED)
            trace_merge.write_merged(trace, made[-1])
        except OSError as error:
            raise TraceError(
                f"The traces cannot be written to {folder}: {error.strerror or error}."
            ) from error
        return tuple(made)

    def _save_rank(self, rank: int, folder: Path) -> Path | None:
        """The rank's own file, compressed; None where it is gone."""
        name = NAME.format(rank=rank)
        target = folder / f"{name}.gz"
        source = self._session.cluster.run_dir / FOLDER / name
        if source.exists():  # also where its rank has ended
            with source.open("rb") as file, gzip.open(target, "wb", trace_merge.LEVEL) as packed:
                shutil.copyfileobj(file, packed, COPY_BYTES)
            return target
        if not self._session.is_connected(rank) or self._session.readiness.is_busy(rank):
            return None
        try:
            future = remote.trace_text(self._session.call, rank, ())
            content = contents.opened(future.result(FINISH_S))["text"]
        except Exception:  # noqa: BLE001  # it recorded nothing, or ended: its trace says so
            return None
        with gzip.open(target, "wb", trace_merge.LEVEL) as packed:
            packed.write(content)
        return target

    def _asked(self, folders: Sequence[str]) -> dict[int, Parcel | str]:
        """What each rank gives, or why it gives nothing."""
        session = self._session
        found: dict[int, Parcel | str] = {}
        asked: dict[int, Future[Any]] = {}
        for rank in self._ranks:
            if not session.is_connected(rank):
                end = session.health.end_of(rank)
                found[rank] = f"It ended{f' ({end})' if end else ''} before its trace was read."
            elif session.readiness.is_busy(rank):
                found[rank] = "It still runs its cell, so its trace is not read."
            else:
                asked[rank] = remote.finish_trace(session.call, rank, folders)
        end_s = time.monotonic() + FINISH_S
        try:
            for rank, future in asked.items():
                found[rank] = self._answer(rank, future, end_s)
        except KeyboardInterrupt:
            for rank, future in asked.items():
                if not future.done():
                    session.interrupt(rank)
            raise Interrupted("the traces of the ranks were not read") from None
        return {rank: found[rank] for rank in self._ranks}

    def _answer(self, rank: int, future: Future[Any], end_s: float) -> Parcel | str:
        while True:
            try:
                parcel: Parcel = future.result(min(POLL_S, max(0.0, end_s - time.monotonic())))
            except TimeoutError:
                if not self._session.is_connected(rank):
                    return "It ended while its trace was read."
                if time.monotonic() >= end_s:
                    return f"Its trace was not there within {FINISH_S:.0f} s."
            except Exception as error:  # noqa: BLE001  # whatever a rank raised is told
                return str(getattr(error, "evalue", error))
            else:
                return parcel

    def _host(self, rank: int) -> str:
        return self._session.topology.ranks[rank].host


def _opened(answer: Parcel | str) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"problem": answer}
    try:
        return contents.opened(answer)
    except NbdistError as error:
        return {"problem": f"Its trace did not arrive: {error}"}


def read_folder(folder: Path) -> Trace:
    """The traces of a folder: one file per rank, as `save` or torch's profiler writes them.

    Raises:
        TraceError: If there is none, or none can be read.
    """
    paths = sorted(path for path in folder.glob("*.json*") if path.name != MERGED)
    if not paths:
        raise TraceError(
            f"There are no traces in {folder.absolute()}: files *.json or *.json.gz, one per rank, "
            "as %dist_trace --save writes them."
        )
    recordings: dict[int, Recording] = {}
    problems: list[str] = []
    for number, path in enumerate(paths):
        try:
            one = trace_read.read(path, number)
        except TraceError as error:
            problems.append(str(error))
            continue
        if one.trace.rank in recordings:
            raise TraceError(
                f"{folder.absolute()} holds two traces of rank {one.trace.rank} ({path.name} is "
                "one). Put each recording into a folder of its own."
            )
        recordings[one.trace.rank] = one
    if not recordings:
        raise TraceError(" ".join(problems))
    trace = trace_clocks.joined(list(recordings.values()))
    return replace(trace, notes=(*problems, *trace.notes))
