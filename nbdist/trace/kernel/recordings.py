"""Recording a cell on ranks, and the traces that came of it."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbdist.cluster.kernel.ranks import Ranks
from nbdist.errors import TraceError
from nbdist.recording.kernel import FINISH_S, Recordings
from nbdist.rpc.kernel.functions import RankFunction
from nbdist.trace import chrome_writer, clock_sync, read
from nbdist.trace.kernel.perfetto import Page
from nbdist.trace.read import RecordedTrace
from nbdist.trace.trace import Trace, TraceOptions, empty
from nbdist.variables import unpack
from nbdist.variables.kernel import Variables
from nbdist.variables.pack import PackedValue

COPY_BYTES = 2**22
FOLDER = "traces"  # as nbdist.trace.rank has it
NAME = "rank{rank}.json"
MERGED = "all_ranks.json.gz"

begin_trace: RankFunction[[TraceOptions, str], None] = RankFunction("nbdist.trace.rank:begin")
finish_trace: RankFunction[[Sequence[str]], PackedValue] = RankFunction("nbdist.trace.rank:finish")
trace_text: RankFunction[[Sequence[str]], PackedValue] = RankFunction("nbdist.trace.rank:text")


class Traces(Recordings[TraceOptions, Trace]):
    """The traces of a session's ranks: one at a time, and the last one is kept."""

    noun, nouns, magic = "trace", "traces", "%%dist_profile"
    begin_rank, finish_rank = begin_trace, finish_trace
    nothing = (TraceError, "Nothing has been recorded yet.")

    def __init__(self, ranks: Ranks, variables: Variables):
        super().__init__(ranks, variables)
        self._page: Page | None = None

    def _join(self, answers: dict[int, dict[str, Any]]) -> Trace:
        recordings = [answer["recording"] for answer in answers.values() if "recording" in answer]
        missing = [
            empty(rank, self._host(rank), answer["problem"])
            for rank, answer in answers.items()
            if "recording" not in answer
        ]
        return clock_sync.align(recordings, missing)

    def page(self, trace: Trace) -> str:
        """The address of a page of Perfetto with this trace, for browsers of this host.

        It is served until another one is, or the ranks are stopped. Every user of
        this host can read it meanwhile.

        Raises:
            OptionError, TraceError: See trace.kernel.perfetto.Page.
        """
        self.close()
        run_dir = self._ranks.cluster.run_dir
        path = run_dir / MERGED
        try:
            chrome_writer.write_merged(trace, path)
        except OSError as error:
            raise TraceError(f"{path} cannot be written: {error.strerror or error}.") from error
        self._page = Page(path, run_dir, self._ranks.cluster.processes.guard)
        return self._page.url

    def close(self) -> None:
        """Stop serving the page."""
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
            paths = [path for rank in self._recorded if (path := self._save_rank(rank, folder))]
            paths.append(folder / MERGED)
            chrome_writer.write_merged(trace, paths[-1])
        except OSError as error:
            raise TraceError(
                f"The traces cannot be written to {folder}: {error.strerror or error}."
            ) from error
        return tuple(paths)

    def _save_rank(self, rank: int, folder: Path) -> Path | None:
        """The rank's own file, compressed; None where it is gone."""
        name = NAME.format(rank=rank)
        target = folder / f"{name}.gz"
        source = self._ranks.cluster.run_dir / FOLDER / name
        if source.exists():  # also where its rank has ended
            with source.open("rb") as file, gzip.open(target, "wb", chrome_writer.LEVEL) as packed:
                shutil.copyfileobj(file, packed, COPY_BYTES)
            return target
        if not self._ranks.is_connected(rank) or self._ranks.is_busy(rank):
            return None
        try:
            future = trace_text(self._ranks.call, rank, ())
            content = unpack.unpack(future.result(FINISH_S))["text"]
        except Exception:  # noqa: BLE001  # it recorded nothing, or ended: its trace says so
            return None
        with gzip.open(target, "wb", chrome_writer.LEVEL) as packed:
            packed.write(content)
        return target


def read_folder(folder: Path) -> Trace:
    """The traces of a folder: one file per rank, as `save` or torch's profiler writes them.

    Raises:
        TraceError: If there is none, or none can be read.
    """
    paths = sorted(path for path in folder.glob("*.json*") if path.name != MERGED)
    if not paths:
        raise TraceError(
            f"There are no traces in {folder.absolute()}. Save some there with %dist_trace --save: "
            "one file *.json.gz per rank."
        )
    recordings: dict[int, RecordedTrace] = {}
    problems: list[str] = []
    for number, path in enumerate(paths):
        try:
            recording = read.read(path, number)
        except TraceError as error:
            problems.append(str(error))
            continue
        if recording.trace.rank in recordings:
            raise TraceError(
                f"{folder.absolute()} contains two traces of rank {recording.trace.rank}, one of "
                f"them {path.name}. Put each recording into its own folder."
            )
        recordings[recording.trace.rank] = recording
    if not recordings:
        raise TraceError(" ".join(problems))
    trace = clock_sync.align(list(recordings.values()))
    return replace(trace, notes=(*problems, *trace.notes))
