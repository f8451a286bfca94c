"""State of one notebook: its ranks, how they were started, where plain cells run."""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

from IPython import get_ipython

from nbdist.cells.kernel import progress, wait
from nbdist.cells.kernel.cell_request import CellRequest
from nbdist.cells.kernel.cell_run import CellRun
from nbdist.cells.outputs import CellResult
from nbdist.cells.view.live_cell import LiveCell, publish
from nbdist.cluster.kernel.start import DEFAULT_KEEP_S, StartOptions
from nbdist.cluster.run_owner import Run
from nbdist.core.failures import ranks_are, ranks_phrase
from nbdist.core.ranks import rank_label
from nbdist.core.units import is_stored
from nbdist.core.view import View
from nbdist.errors import AlreadyRunning, Interrupted, NotRunning
from nbdist.notebook.progress_line import ShownProgress
from nbdist.notebook.session import Session, StartedSession, attach, start
from nbdist.recording.kernel import Recordings

LOCAL = "local"
EXIT_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Record:
    """How a cell is recorded.

    Attributes:
        ranks: Those that record, as typed; None for all.
        view: What to show of it, below the cell's output.
        where: The session's recordings of this kind.
    """

    options: Any
    ranks: str | None
    view: Callable[[Any], View]
    where: Callable[[Session], Recordings[Any, Any]]


@dataclass(frozen=True, slots=True)
class CellOptions:
    """The options of %%distributed, %%rank, %%dist_profile and %%dist_memory."""

    ranks: str | None = None
    has_tabs: bool = False
    timeout_s: float | None = None
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class LastCell:
    """The last cell that all ranks have run to its end.

    Attributes:
        number: Of the notebook's cell; None outside of one.
    """

    code: str
    number: int | None
    took_s: float


class Notebook:
    """One notebook's ranks and settings. There is one of these in a kernel."""

    def __init__(self) -> None:
        # The ranks, those too that were ended from outside; None for none. From any thread.
        self.current: Session | None = None
        self.options = StartOptions()  # of the last start
        self.mode = LOCAL  # where plain cells run: "local", or ranks; see set_mode
        self._why_none = ""  # why there are no ranks, where somebody else has ended them
        self.cell_number: int | None = None
        # Called with every cell on ranks before it is sent: its options may become others.
        self.before_cell: Callable[[str, CellOptions], CellOptions] = lambda _code, options: options
        # Told of the progress bar that the running cell draws, and of its end by "".
        self.on_bar: Callable[[str], object] = lambda _text: None
        self.last_cell: LastCell | None = None  # of the running ranks
        self.panel: object = None  # that of %dist_panel; nbdist.commands brings it
        self._file_numbers = count(1)
        self._live: LiveCell | None = None  # what draws the last cell on ranks

    @property
    def session(self) -> Session:
        """The running ranks.

        Raises:
            NotRunning: If there are none.
        """
        if not self.is_running:
            why = self._why_none or "No ranks are running in this notebook"
            raise NotRunning(f"{why}. Start some with %dist_init, for example: %dist_init -n 2")
        assert self.current is not None
        return self.current

    @property
    def is_running(self) -> bool:
        """Whether there are ranks; those that were ended from outside are let go of."""
        if self.current is None:
            return False
        if why_gone := self.current.cluster.why_gone:
            self._why_none = why_gone
            self._end(is_taken=bool(self.current.cluster.taken))
        return self.current is not None

    @property
    def mode_phrase(self) -> str:
        """The mode as the end of a sentence: `in the notebook`, `on ranks 0-1`."""
        if self.mode == LOCAL:
            return "in the notebook"
        return f"on {ranks_phrase(self.session.chosen(self.mode))}"

    def set_mode(self, mode: str) -> None:
        """Run plain cells from now on in the notebook ("local") or on ranks ("all", "0,1").

        Raises:
            OptionError: If a rank does not exist.
            NotRunning: If ranks are named and none are running.
        """
        if mode != LOCAL:
            mode = rank_label(self.session.chosen(mode))
        self.mode = mode

    def start(self, options: StartOptions, progress: Callable[[str], None]) -> StartedSession:
        """Bring ranks up, and remember with which options.

        Raises:
            AlreadyRunning: If ranks run already.
            OptionError, StartError: See cluster.kernel.start.
            Interrupted: If the user interrupted the start; nothing is left of it.
        """
        if self.is_running:
            raise AlreadyRunning(
                f"{ranks_are(self.session.ranks)} already running in this notebook. "
                "%dist_reset starts afresh; %dist_shutdown stops."
            )
        try:
            started = start(options, self._sink, progress)
        except KeyboardInterrupt as error:
            raise Interrupted(
                "the start was interrupted, and everything it began was ended"
            ) from error
        self._hold(started.session, options)
        return started

    def attach(self, find: Callable[[], Run], *, takes: bool) -> StartedSession:
        """Hold the kept ranks that are found, which a notebook, or this one, has let go of.

        Raises:
            AlreadyRunning: If this notebook has ranks, or another one holds those.
            StartError, NbdistError: See cluster.kernel.keep.
        """
        if self.is_running:
            raise AlreadyRunning(
                f"{ranks_are(self.session.ranks)} already running in this notebook. %dist_detach "
                "lets go of them; %dist_shutdown stops them."
            )
        attached, options = attach(find(), self._sink, takes=takes)
        self._hold(attached.session, options)
        return attached

    def _hold(self, session: Session, options: StartOptions) -> None:
        session.cell_number = lambda: self.cell_number
        if (shell := get_ipython()) is not None:
            session.has_name = lambda name: name in shell.user_ns
            if session.cluster.is_kept:
                session.is_leaving = lambda: bool(shell.exit_now)
        session.panel = lambda: self.panel
        self.current, self.options, self._why_none = session, options, ""
        self.last_cell = None
        atexit.register(self._stop_at_exit, session)

    def detach(self, keep_s: float | None, save: str) -> float:
        """Let go of the ranks: they go on for `keep_s`, or for as long as they are kept; so long.

        Raises:
            NotRunning: If there are none.
            StartError: If what an attach needs cannot be written down.
        """
        session, options = self.session, self.options
        seconds = keep_s or options.keep_s or DEFAULT_KEEP_S
        session.keep(options, seconds, save or options.save)
        self._end(is_taken=True)
        self._why_none = "This notebook has let go of its ranks, and %dist_attach holds them again"
        return seconds

    def stop(self) -> Session:
        """End the ranks; plain cells run in the notebook again.

        Raises:
            NotRunning: If there are none.
        """
        session = self.session
        self._end()
        return session

    def _end(self, *, is_taken: bool = False) -> None:
        session, self.current, self.mode = self.current, None, LOCAL
        assert session is not None
        session.leave() if is_taken else session.stop()
        atexit.unregister(self._stop_at_exit)

    def request(self, code: str, options: CellOptions) -> Callable[[], CellRun]:
        """A cell that is ready to be sent; `cells.kernel.wait` sends it and sees it through."""
        session = self.session
        request = CellRequest(
            code=code,
            ranks=session.chosen(options.ranks),
            number=self.cell_number,
            timeout_s=options.timeout_s,
            is_patient=is_stored(),
            keeps_outputs=options.has_tabs,
        )
        return lambda: session.begin(request)

    def run(self, code: str, options: CellOptions) -> CellResult:
        """Run a distributed cell and block until it ends."""
        options = self.before_cell(code, options)
        with self._remember_cell(code, options), self._record_cell(options.record):
            return wait.wait(self.request(code, options))

    async def run_async(self, code: str, options: CellOptions) -> CellResult:
        """Run a distributed cell and leave the kernel's loop free meanwhile."""
        options = self.before_cell(code, options)
        with self._remember_cell(code, options), self._record_cell(options.record):
            return await wait.wait_async(self.request(code, options))

    @contextlib.contextmanager
    def _remember_cell(self, code: str, options: CellOptions) -> Iterator[None]:
        """Keep the cell that runs inside as the last one, if it ends well and is for all ranks."""
        session, began_s = self.session, time.monotonic()
        yield
        if set(session.chosen(options.ranks)) == set(session.ranks):
            self.last_cell = LastCell(code, self.cell_number, time.monotonic() - began_s)

    @contextlib.contextmanager
    def _record_cell(self, record: Record | None) -> Iterator[None]:
        """Record the cell that runs inside; what there is is shown, however the cell ends."""
        if record is None:
            yield
            return
        recordings = record.where(self.session)
        before = recordings.count
        try:
            with contextlib.ExitStack() as stack:
                with SHOWN.silenced():  # a line of its own would stand above the cell's output
                    stack.enter_context(recordings.recording(record.options, record.ranks))
                SHOWN.note = lambda text: self._live.note(text) if self._live else None
                try:
                    yield
                finally:
                    SHOWN.note = None
        finally:
            if recordings.count > before:
                show(record.view(recordings.last))

    def differs(self, options: StartOptions) -> list[str]:
        """The options in which running ranks differ from what is asked for now.

        An option that was left at its default asks for nothing.
        """
        running = replace(self.options, world_size=self.session.topology.world_size)
        default = StartOptions()
        return [
            field.name
            for field in fields(StartOptions)
            if field.name != "deadline_s"
            and getattr(options, field.name)
            not in {getattr(default, field.name), getattr(running, field.name)}
        ]

    def _sink(self, request: CellRequest) -> LiveCell:
        self._live = LiveCell(
            self._output_file,
            has_tabs=request.keeps_outputs,
            is_clipped=not request.is_program,
            on_bar=self.on_bar,
        )
        return self._live

    def _output_file(self) -> Path:
        folder = self.session.cluster.run_dir / "output"
        folder.mkdir(mode=0o700, exist_ok=True)
        paths = (folder / f"cell-{self.cell_number or 0}-{n}.txt" for n in self._file_numbers)
        return next(
            path for path in paths if not path.exists()
        )  # another notebook's, of kept ranks

    def _stop_at_exit(self, session: Session) -> None:
        # The guardian would end everything in any case; this lets the ranks end by
        # themselves first, so that what their code registered for the end is run.
        if session.cluster.is_kept:
            session.cluster.leave()
        else:
            session.cluster.stop(grace_s=EXIT_GRACE_S)


NOTEBOOK = Notebook()
# The running cell's line of what takes long.
SHOWN = ShownProgress()
progress.listeners.append(SHOWN)


def show(view: View) -> None:
    """Show a view in the running cell, in the place of its line of progress if it has one."""
    if not SHOWN.replace(view):
        publish(view._repr_mimebundle_())
