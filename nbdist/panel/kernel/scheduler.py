"""When the panel's jobs run: in the notebook's main thread, between two cells, as magics do.

So a job never meets a cell half-way: ranks that were given the two in different orders would wait
for each other. What is asked for while a cell runs waits for its end.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
from collections.abc import Callable, Iterator

from IPython import get_ipython
from IPython.core.interactiveshell import ExecutionResult

from nbdist.errors import NbdistError
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.panel.job_queue import JobQueue, PanelJob
from nbdist.rpc.kernel import sigint
from nbdist.rpc.kernel.sigint import PendingInterrupts


class JobScheduler:
    """The turns of cells and jobs in one notebook."""

    def __init__(
        self, job_queue: JobQueue, act: Callable[[PanelJob], str], changed: Callable[[], None]
    ):
        """Watch no cells yet; `watch` begins.

        Args:
            job_queue: Where jobs are queued, and where it is written what they came to.
            act: Does a job and says what it came to; in the main thread.
            changed: Called when a job begins or ends, or a cell ends; must not raise.
        """
        self._job_queue = job_queue
        self._act = act
        self._changed = changed
        self._cells = 0
        self._is_watching = False
        self._is_dropped = False  # what waited for the running cell, whose interrupt was pressed

    @property
    def cell(self) -> str:
        """The notebook's cell that runs, such as `cell [4]`; "" between cells."""
        return f"cell [{NOTEBOOK.cell_number}]" if self._cells else ""

    def ask(self, job: PanelJob) -> None:
        """Do a job as soon as no cell runs. From any thread; returns at once."""
        if not self._job_queue.ask(job, self.cell):
            return
        kernel = getattr(get_ipython(), "kernel", None)
        if kernel is not None:
            kernel.io_loop.add_callback(self._work)

    def drop(self) -> None:
        """Take back what waits for the end of a cell that is interrupted.

        It was asked for with a cell in mind that ends well. What is asked for from now on stays,
        and so does the restart of a rank, which is for what goes wrong.
        """
        self._is_dropped = bool(self._cells)
        self._job_queue.drop("what it waited for was interrupted", keep=("restart",))

    def interrupt(self) -> str:
        """Interrupt what the main thread does, as the stop button; what that is, or ""."""
        doing = self._job_queue.acting or self.cell
        ident = threading.main_thread().ident
        if doing and ident is not None:
            # Of that thread, or its loop would not wake up.
            signal.pthread_kill(ident, signal.SIGINT)
        return doing

    def watch(self) -> None:
        """Hear of cells from now on; called in one. Twice is harmless."""
        shell = get_ipython()
        if not self._is_watching and shell is not None:
            self._is_watching, self._cells = True, 1
            shell.events.register("pre_run_cell", self._began)
            shell.events.register("post_run_cell", self._ended)

    def unwatch(self) -> None:
        """Hear of no cell any more."""
        shell = get_ipython()
        if self._is_watching and shell is not None:
            shell.events.unregister("pre_run_cell", self._began)
            shell.events.unregister("post_run_cell", self._ended)
        self._is_watching, self._cells = False, 0

    def _began(self, *_: object) -> None:
        self._cells += 1  # a cell can run another one

    def _ended(self, result: ExecutionResult | None = None) -> None:
        self._cells = max(0, self._cells - 1)  # a silent one has no end
        if not self._cells:
            # Between two statements an interrupt is one "before" the cell, by IPython's names.
            error = None if result is None else result.error_in_exec or result.error_before_exec
            if isinstance(error, KeyboardInterrupt) and not self._is_dropped:
                self.drop()  # by the notebook's own stop button
            self._is_dropped = False
            self._changed()  # of a cell that stopped the ranks: nothing is done for them any more
            self._work()

    def _work(self) -> None:
        """Do what is queued, unless a cell runs: then its end does."""
        while not self._cells and self._job_queue.queued:
            # One that is pressed once the job counts as begun, is for it, and not lost.
            with sigint.deferred_sigint() as pressed:
                job = self._job_queue.take()
                if job is None:
                    return
                self._changed()
                self._job_queue.finish(*self._outcome(job, pressed))
            self._changed()

    def _outcome(self, job: PanelJob, pressed: PendingInterrupts) -> tuple[str, str]:
        try:
            with _interruptible():
                pressed.check()
                return self._act(job), "done"
        except KeyboardInterrupt as error:
            return f"interrupted: {error}" if str(error) else "interrupted", "failed"
        except NbdistError as error:
            return f"{type(error).__name__}: {error}", "failed"
        except Exception:  # noqa: BLE001  # a callback's error would be seen nowhere
            return traceback.format_exc().rstrip(), "failed"


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt: between cells ipykernel ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        # None stands for a handler that was not set from Python and cannot be set again.
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
