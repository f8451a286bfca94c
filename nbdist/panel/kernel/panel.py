"""The panel of a notebook: what it knows, what it shows, and which button does what.

A button runs the line of its verb (actions). What changes the ranks runs between two cells
(scheduler); interrupts and questions run at once, in the thread of the click.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from IPython import get_ipython
from IPython.display import DisplayHandle, display

from nbdist.cells.kernel import progress
from nbdist.cells.view.live_cell import publish
from nbdist.cluster.view import ranks_and_hosts
from nbdist.core import units
from nbdist.core.progress import Progress
from nbdist.core.units import is_stored, shown
from nbdist.errors import NbdistError
from nbdist.notebook.notebook import NOTEBOOK, CellOptions
from nbdist.notebook.session import Session
from nbdist.notebook.verb import Verb
from nbdist.panel import plan, strategy_form
from nbdist.panel.job_queue import JobQueue, PanelJob
from nbdist.panel.kernel import actions
from nbdist.panel.kernel import ranks as ranks_panel
from nbdist.panel.kernel.actions import Chosen, Shows
from nbdist.panel.kernel.ranks import PreparedModels
from nbdist.panel.kernel.scheduler import JobScheduler
from nbdist.panel.state import BUTTONS, PanelPlan, PanelState, Question, missing
from nbdist.panel.strategy_form import OnRanks
from nbdist.panel.view import html as panel_view
from nbdist.strategy.choice import Strategy, described

if TYPE_CHECKING:  # which needs ipywidgets
    from nbdist.panel.view.widgets import PanelWidgets

TICK_S = 1.0
# A sample of every rank is there within a second; an idle rank answers at once.
LOOK_S = 3.0
NO_RANKS = "no ranks are running: %dist_init starts some"
NO_WIDGETS = "ipywidgets cannot be imported ({why}), so the panel is a static picture"
# Pictures that are kept up to date; those of cells that were run again are no more on the page.
KEPT_STILLS = 4


class Panel:
    """The panel of this notebook. There is one; a page may show it several times."""

    def __init__(self) -> None:
        # Those that the buttons run; nbdist.commands hands them over with the table.
        self.verbs: Mapping[str, Verb] = {}
        self.job_queue = JobQueue()
        self.scheduler = JobScheduler(self.job_queue, self._act, self._changed)
        self._lock = threading.RLock()
        self._widgets: PanelWidgets | None = None
        self._stills: list[DisplayHandle] = []
        self._essence: object = None
        self._session: Session | None = None
        # What was chosen last when a rank was asked, and what it answered.
        self._answer: tuple[Strategy, Strategy] | None = None
        self._followed: Strategy | None = None
        self._prepared = PreparedModels()
        # Why the models do not go with a strategy; and for which it was asked since they were.
        self._refusals: dict[Strategy, str] = {}
        self._asked: set[Strategy] = set()
        self._question: Question | None = None
        self._bar = self._doing = ""
        self._ticker: threading.Event | None = None  # set to end the thread

    def _ipython_display_(self) -> None:
        self.show()

    def show(self) -> None:
        """Show the panel below the running cell: widgets where there are any, else a picture."""
        self.scheduler.watch()
        NOTEBOOK.before_cell, NOTEBOOK.on_bar = self.before_cell, self._take_bar
        if self._take_progress not in progress.listeners:
            progress.listeners.append(self._take_progress)
        session = self._now()
        if session is not None and not self.job_queue.acting:
            # What is shown first, and stored, is complete.
            ended = self._ask(session)
            session.monitor.wait(time.monotonic(), LOOK_S)
            ended(LOOK_S)
        if is_stored() or not hasattr(get_ipython(), "kernel"):
            publish(panel_view.still(self.state())._repr_mimebundle_())
            return
        try:
            widgets = self._make_widgets()
        except ImportError as error:
            self.job_queue.note(NO_WIDGETS.format(why=error), "failed")
        else:
            self.refresh()
            self._tick()
            # A still text: nbval compares it, and frontends without widgets show it.
            publish({**widgets.root._repr_mimebundle_(), "text/plain": "nbdist panel"})
        handle = display(panel_view.still(self.state()), display_id=True)
        assert isinstance(handle, DisplayHandle)
        self._stills = [*self._stills, handle][-KEPT_STILLS:]

    def press(self, name: str) -> None:
        """Press one of BUTTONS, from any thread. Returns at once; what goes wrong is in the log."""
        with self._logged(name):
            why = missing(name, self._facts())
            if why:
                self.job_queue.note(f"{BUTTONS[name].label}: {why}", "failed")
            elif BUTTONS[name].when == "arms":
                self.job_queue.arm(name)
            elif BUTTONS[name].when == "now":
                _NOW[name](self)
            elif name in _ASKS and (asking := _ASKS[name](self)) is not None:
                self._question = asking
            else:
                self.scheduler.ask(self._job(name))
        self.refresh()

    def close(self) -> None:
        """Take the panel off every page; what is queued is taken back."""
        self.job_queue.drop("the panel was closed")
        self.scheduler.unwatch()
        NOTEBOOK.before_cell = lambda _code, options: options
        NOTEBOOK.on_bar = lambda _text: None
        if self._take_progress in progress.listeners:
            progress.listeners.remove(self._take_progress)
        with self._lock:
            ticker, self._ticker = self._ticker, None
            widgets, self._widgets = self._widgets, None
            self._stills = []
        if ticker is not None:
            ticker.set()
        if widgets is not None:
            widgets.close()

    def refresh(self) -> None:
        """Show how everything is now; from any thread."""
        with self._lock, self._logged("refresh"):
            state = self.state()
            if self._widgets is not None:
                self._follow(self._widgets)
                facts = self._facts()
                why_not = {name: missing(name, facts) for name in BUTTONS}
                self._widgets.draw(state, why_not, self._plan())
            # The pictures below, where more has changed than times and numbers.
            kinds = tuple((row.rank, row.kind) for row in state.ranks)
            lasting = replace(state, ranks=(), waits=(), cell="", bar="", doing="", acting="")
            if self._stills and (lasting, kinds) != self._essence:
                self._essence = (lasting, kinds)
                view = panel_view.still(state)
                for handle in self._stills:
                    handle.update(view)

    def state(self) -> PanelState:
        """All that the panel shows at this moment; a rank is not asked."""
        session = self._now()
        state = PanelState(
            NO_RANKS,
            cell=self.scheduler.cell,
            bar=self._bar,
            doing=self._doing,
            acting=self.job_queue.acting,
            queued=self.job_queue.queued,
            armed=tuple(BUTTONS[name].magic for name in self.job_queue.armed),
            question=self._question,
            log=self.job_queue.log,
        )
        if session is None:
            return state
        rows, waits = ranks_panel.rows_and_waits(session)
        models, current = self._prepared, self._current(session)
        shapes = [model.inputs_shape for model in models.sketches if model.inputs_shape]
        return replace(
            state,
            title=f"{ranks_and_hosts(session.topology)}, {shown(session.topology.backend)}",
            is_running=True,
            ranks=rows,
            waits=waits,
            strategy=described(current),
            models=tuple(map(strategy_form.model_text, models.models)),
            batch=strategy_form.batch_text(current, shapes[0][0]) if shapes else "",
        )

    def before_cell(self, _code: str, options: CellOptions) -> CellOptions:
        """The options of a cell that begins on ranks, with what the buttons have asked for."""
        name = "" if options.record is not None else self.job_queue.disarm()
        if not name:
            return options
        self.job_queue.note(f"{BUTTONS[name].magic} for cell [{NOTEBOOK.cell_number}]")
        line = f"--ranks {options.ranks}" if options.ranks else ""
        return replace(options, record=actions.answer(name, line, self.verbs).record)

    # The ranks that there are.

    def _now(self) -> Session | None:
        """The running ranks. With others nothing counts that was known of those before."""
        session = NOTEBOOK.current
        if session is not None and session.is_stopped:
            session = None
        with self._lock:
            if session is not self._session:
                if self._session is not None:
                    self.job_queue.drop("its ranks were stopped")
                self._session, self._answer, self._question = session, None, None
                self._prepared = PreparedModels()
                self._refusals.clear()
                if session is not None and self._widgets is not None:
                    self._widgets.set_ranks(session.topology.world_size)
                self._ask_prepared()
        return session

    def _current(self, session: Session) -> Strategy:
        """The strategy that counts: a rank's own answer, unless something was chosen since."""
        last = ranks_panel.last_choice(session)
        return self._answer[1] if self._answer is not None and self._answer[0] == last else last

    def _ask_prepared(self) -> None:
        if self._session is not None and not self.job_queue.acting and not self.scheduler.cell:
            self._ask(self._session)

    def _ask(self, session: Session) -> Callable[[float], object]:
        last = ranks_panel.last_choice(session)

        def take(choice: Strategy, prepared: PreparedModels) -> None:
            self._answer, self._prepared, self._asked = (last, choice), prepared, set()
            if not prepared.models:
                self._refusals.clear()
            self.refresh()

        return ranks_panel.prepared(session, take)

    def _take_bar(self, text: str) -> None:
        self._bar = text  # ten times a second: it is drawn with the next picture

    def _take_progress(self, now: Progress | None) -> None:
        self._doing = "" if now is None else str(now)
        self.refresh()

    def _changed(self) -> None:
        """A job has begun or ended, or a cell has ended."""
        with self._logged("refresh"):
            self._now()
            self._ask_prepared()
        self.refresh()

    # The chosen strategy.

    def _pick(self) -> Strategy | str:
        session, widgets = self._session, self._widgets
        if session is None or widgets is None:
            return ""
        return strategy_form.pick(widgets.strategy.value, widgets.values, *_ranks_of(session))

    def _plan(self) -> PanelPlan:
        strategy, session = self._pick(), self._session
        if isinstance(strategy, str) or session is None:
            return PanelPlan(str(strategy), is_possible=not strategy)
        prepared, current = self._prepared, self._current(session)
        if refusal := self._refusal(session, strategy):
            return PanelPlan(refusal, is_possible=False)
        if prepared.models and prepared.sketches:
            limit = ranks_panel.limit(session)
            return plan.plan_of_models(strategy, prepared.sketches, limit, current)
        text = strategy_form.describe_held(strategy, prepared.models, current)
        if prepared.problem:
            text += f"; states only: the ranks could not describe the models ({prepared.problem})"
        return PanelPlan(text, is_possible=True)

    def _refusal(self, session: Session, strategy: Strategy) -> str:
        """Why the models do not go with it, as far as it is known.

        After each cell an idle rank is asked anew: the answer may need a trial of the model.
        """
        is_free = not self.job_queue.acting and strategy != self._current(session)
        if is_free and self._prepared.models and strategy not in self._asked:
            self._asked.add(strategy)

            def take(refusal: str) -> None:
                self._refusals[strategy] = refusal
                self.refresh()

            if not ranks_panel.ask_refusal(session, strategy, take):
                self._asked.discard(strategy)
        return self._refusals.get(strategy, "")

    def _follow(self, widgets: PanelWidgets) -> None:
        """Choose the strategy that counts, once when it has changed."""
        if self._session is None:
            return
        current = self._current(self._session)
        if current != self._followed:
            self._followed = current
            widgets.set_values(current.name, strategy_form.values_of(current))

    def _facts(self) -> set[str]:
        session = self._now()
        if session is None:
            return {"none"}
        picked = self._pick()
        facts = {
            "ranks": True,
            "trace": session.traces.count,
            "code": NOTEBOOK.last_cell,
            "choice": isinstance(picked, Strategy) and not self._refusals.get(picked),
            "other": picked != self._current(session),
            "queue": self.job_queue.queued,
            "question": self._question,
        }
        return {fact for fact, is_so in facts.items() if is_so}

    # What the buttons do.

    def _job(self, name: str) -> PanelJob:
        session, widgets, last = self._session, self._widgets, NOTEBOOK.last_cell
        # What was asked about counts, whatever was chosen or run since.
        asked = self._question if self._question and self._question.name == name else None
        chosen = Chosen("", {}, None, self._compared())
        if widgets is not None:
            strategy, values = widgets.strategy.value, widgets.values
            rank = widgets.restarted if asked is None else asked.rank
            chosen = Chosen(strategy, values, rank, self._compared())
        current = None if session is None else self._current(session)
        code = last.code if last is not None else ""
        return actions.job(name, chosen, current, code if asked is None else asked.code)

    def _compared(self) -> tuple[str, ...]:
        """Strategies chosen in the question to be compared; none without a question."""
        if self._question is None:
            return ()
        return self._question.preset if self._widgets is None else self._widgets.compared.value

    # What is asked first.

    def confirm(self) -> None:
        """Do what was asked about."""
        question = self._question
        if question is None:
            return
        if question.choices and not self._compared():
            self.job_queue.note("Compare: choose at least one strategy to compare with", "failed")
            return
        self.scheduler.ask(self._job(question.name))
        self._question = None

    def dismiss(self) -> None:
        """Do nothing of what was asked about."""
        self._question = None

    def _ask_restart(self) -> Question | None:
        """Ask whether to restart a rank that lives; None where nothing is lost by that."""
        rank = None if self._widgets is None else self._widgets.restarted
        row = next((row for row in self.state().ranks if row.rank == rank), None)
        if row is None or row.kind == "dead":
            return None
        return Question(
            "restart",
            f"Rank {rank} is alive ({row.doing}). A restart ends its process, and all its "
            "variables are lost, its part of the models too.",
            rank=rank,
        )

    def _ask_compare(self) -> Question:
        """Which strategies, and what that costs; see `missing` for what there is by then.

        Raises:
            NbdistError: No strategy is left to compare with.
        """
        session, last = self._session, NOTEBOOK.last_cell
        assert session is not None
        assert last is not None
        current, picked = self._current(session), self._pick()
        limit, models = ranks_panel.limit(session), self._prepared.sketches
        others = plan.fitting(models, limit, current, _ranks_of(session))
        preset = others
        if isinstance(picked, Strategy) and picked != current:
            preset = (strategy_form.typed(picked.name, strategy_form.values_of(picked)),)
            others = tuple(dict.fromkeys([*preset, *others]))
        if not others:
            raise NbdistError("no other strategy fits these ranks and the prepared models")
        cell = "the last cell" if last.number is None else f"cell [{last.number}]"
        return Question(
            "compare",
            f"Compare runs {cell} twice under {described(current)} and under each strategy chosen "
            f"here, and restores the state. It took {units.seconds(last.took_s)}: expect "
            f"{units.seconds(2 * last.took_s)} or more for each, and the switches. No other cell "
            "runs on the ranks meanwhile.",
            others,
            preset,
            code=last.code,
        )

    def _act(self, job: PanelJob) -> str:
        return actions.act(job, self.verbs, Shows(self._progress, self._detail))

    def interrupt(self) -> None:
        """Interrupt the cells on the ranks, else what the notebook itself does."""
        self.scheduler.drop()
        session = self._now()
        interrupted, not_back = ("", "") if session is None else ranks_panel.interrupt(session)
        interrupted = interrupted or self.scheduler.interrupt()
        parts = [f"interrupting {interrupted}"] if interrupted else []
        parts += [f"{not_back}: sent SIGINT again"] if not_back else []
        self.job_queue.note("; ".join(parts) or "nothing is running to interrupt")

    def ask_status(self) -> None:
        """Show what every rank does; in a thread of its own, as answers may take two seconds."""
        self.job_queue.note(f"{BUTTONS['status'].magic}: asking the ranks")
        threading.Thread(target=self._show_status, name="nbdist-status", daemon=True).start()

    def _show_status(self) -> None:
        with self._logged("status"):
            line = BUTTONS["status"].magic.partition(" ")[2]
            view = actions.answer("status", line, self.verbs)
            if view is not None:
                title = f"{BUTTONS['status'].below} at {time.strftime('%H:%M:%S')}"
                self._detail(title, view.html or view.text)
            self.job_queue.note("status: see below", "done")
        self.refresh()

    def _progress(self, text: str) -> None:
        self.job_queue.progress(text)
        self.refresh()

    def _detail(self, title: str, body: str) -> None:
        if self._widgets is not None:
            self._widgets.show_detail(title, body)

    # What is on the page.

    def _make_widgets(self) -> PanelWidgets:
        from nbdist.panel.view.widgets import PanelWidgets  # which needs ipywidgets

        with self._lock:
            if self._widgets is None:
                self._widgets, self._followed = PanelWidgets(self), None
                session = self._now()
                if session is not None:
                    self._widgets.set_ranks(session.topology.world_size)
            return self._widgets

    def _tick(self) -> None:
        """Refresh every second, in a thread of its own, until the panel is closed."""
        if self._ticker is not None:
            return
        self._ticker = ended = threading.Event()

        def ticking() -> None:
            while not ended.wait(TICK_S):
                self.refresh()

        threading.Thread(target=ticking, name="nbdist-panel", daemon=True).start()

    @contextlib.contextmanager
    def _logged(self, action: str) -> Iterator[None]:
        """Errors into the log: those of a callback or a thread would be seen nowhere."""
        try:
            yield
        except NbdistError as error:
            self.job_queue.note(f"{action}: {error}", "failed")
        except Exception:  # noqa: BLE001
            self.job_queue.note(f"{action}: {traceback.format_exc().rstrip()}", "failed")


_NOW: Mapping[str, Callable[[Panel], object]] = {
    "interrupt": Panel.interrupt,
    "status": Panel.ask_status,
    "cancel": lambda panel: panel.job_queue.drop("cancelled"),
    "confirm": Panel.confirm,
    "dismiss": Panel.dismiss,
}
_ASKS: Mapping[str, Callable[[Panel], Question | None]] = {
    "restart": Panel._ask_restart,  # noqa: SLF001
    "compare": Panel._ask_compare,  # noqa: SLF001
}


def _ranks_of(session: Session) -> OnRanks:
    """Facts on ranks for a strategy's rules: how many, on what, their backend, and their hosts."""
    topology = session.topology
    device_type = topology.ranks[0].device.split(":")[0]
    return topology.world_size, device_type, topology.backend, topology.hosts
