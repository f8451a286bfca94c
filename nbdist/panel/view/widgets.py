"""The live panel: ipywidgets that show a PanelState and say what was pressed."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Protocol

import ipywidgets

from nbdist.panel.state import BUTTONS, PanelPlan, PanelState, Question
from nbdist.panel.strategy_form import UNSET, FormField, Value, fields
from nbdist.panel.view.html import LIVE_STYLE, log_html, plan_html, question_html, top_html
from nbdist.strategy.table import ROWS

# In the order of the rows of buttons; the table of buttons has the rest.
_CONTROL = ("interrupt", "cancel", "status", "restart")
_RECORD = ("profile", "memory", "save", "checkpoint")
_PRIMARY = frozenset({"apply", "start", "confirm"})
_MOST_CHOICES = 8  # rows of a list
_ENDED = ("ended", "")  # those that have
_NARROW = {"description_width": "initial"}


class PanelOwner(Protocol):
    """Owner that the widgets call, from whatever thread a click arrives in; it must be quick."""

    def press(self, name: str) -> None:
        """Do what the button of this name does."""

    def refresh(self) -> None:
        """The chosen strategy, or one of its fields, is another one now."""


class PanelWidgets:
    """The widgets of one panel. Every view of them on a page shows the same."""

    def __init__(self, owner: PanelOwner):
        """Make the widgets, which tell the owner of presses; nothing is shown yet."""
        self._owner = owner
        self._lock = threading.RLock()
        self._drawn = count(1)
        self._is_filling = False
        self._world_size = 0
        self._fields: dict[str, Any] = {}
        self.buttons: dict[str, Any] = {}
        for name, row in BUTTONS.items():
            self.buttons[name] = button = ipywidgets.Button(description=row.label)
            button.tooltip = _tip(name)
            button.layout.width = "auto"
            button.button_style = "primary" if name in _PRIMARY else ""
            button.on_click(lambda _button, name=name: self._owner.press(name))
        self.rank = _picker(
            ipywidgets.Dropdown, "130px", description="rank", options=[_ENDED], value="",
            tooltip="which rank Restart rank restarts",
        )  # fmt: skip
        self.compared = _picker(
            ipywidgets.SelectMultiple, "auto", description="compare with",
            tooltip="Ctrl-click or Shift-arrow chooses several",
        )  # fmt: skip
        self._asked: Question | None = None
        self.strategy = _picker(
            ipywidgets.Dropdown, "190px", description="strategy", options=list(ROWS), value="ddp"
        )
        self.strategy.observe(self._changed, "value")
        self.more = ipywidgets.ToggleButton(value=False, description="More options")
        self.more.tooltip = "options that most strategies have"
        self.more.layout.width = "auto"
        self.more.observe(self._fill, "value")
        self._strategy = _row(self.strategy)
        self._common = _row()
        self._top, self._plan, self._log, self._question = (ipywidgets.HTML() for _ in range(4))
        self._detail = ipywidgets.HTML()
        self.root = self._assembled()
        for widget in _below(self.root):
            answer_in_subshell(widget)

    def _assembled(self) -> Any:
        of = self.buttons
        control, record = [of[name] for name in _CONTROL], [of[name] for name in _RECORD]
        self._none = _row(of["start"])
        self._ask = ipywidgets.VBox(
            [self._question, _row(self.compared), _row(of["confirm"], of["dismiss"])]
        )
        self._with_ranks = ipywidgets.VBox(
            [
                _group("Control", _row(*control, self.rank)),
                _group("Record", _row(*record)),
                _group("Strategy", self._strategy, self._common, self._plan,
                       _row(of["apply"], of["compare"], self.more)),
                self._ask,
            ]
        )  # fmt: skip
        root = ipywidgets.VBox(
            [ipywidgets.HTML(LIVE_STYLE), self._top, self._none, self._with_ranks,
             self._log, self._detail]
        )  # fmt: skip
        root.add_class("nbdist-panel")
        root.layout.padding = "4px 2px"
        return root

    def _changed(self, change: Any) -> None:
        if not self._is_filling:
            if change.owner is self.strategy:
                self.set_values(self.strategy.value, {})
            self._owner.refresh()

    @property
    def restarted(self) -> int | None:
        """The rank that Restart rank is for; None for those that have ended."""
        return None if self.rank.value == "" else self.rank.value

    @property
    def values(self) -> dict[str, Value]:
        """Values of the fields of the chosen strategy, those left alone too."""
        words = [field.word for field in fields(self.strategy.value, max(1, self._world_size))]
        return {word: self._fields[word].value for word in words if word in self._fields}

    def set_values(self, name: str, values: Mapping[str, Value]) -> None:
        """Choose a strategy, with these fields and no others filled in."""
        with self._lock:
            self._is_filling = True
            try:
                self.strategy.value = name
                for word, widget in self._fields.items():
                    blank: Value = False if isinstance(widget, ipywidgets.Checkbox) else UNSET
                    widget.value = values.get(word, blank)
                self._fill(None)
            finally:
                self._is_filling = False

    def set_ranks(self, world_size: int) -> None:
        """There are so many ranks now: degrees and numbers of ranks are made for them."""
        with self._lock:
            if world_size == self._world_size:
                return
            self._world_size = world_size
            self._is_filling = True
            try:
                self.rank.options = [_ENDED, *((str(rank), rank) for rank in range(world_size))]
                # One widget for each field that any strategy has: a switch only shows others.
                for field in (field for name in ROWS for field in fields(name, world_size)):
                    old = self._fields.get(field.word)
                    if old is None:
                        self._fields[field.word] = widget = _field_widget(field)
                        widget.observe(self._changed, "value")
                        answer_in_subshell(widget)
                    elif isinstance(old, ipywidgets.Dropdown):
                        old.options = _options(field)
                self._fill(None)
            finally:
                self._is_filling = False

    def _fill(self, _change: object) -> None:
        """Show the fields that the chosen strategy has."""
        widgets: dict[bool, list[Any]] = {True: [], False: []}
        for field in fields(self.strategy.value, max(1, self._world_size)):
            if field.word in self._fields:
                widgets[field.is_own].append(self._fields[field.word])
        self._strategy.children = (self.strategy, *widgets[True])
        self._common.children = widgets[False] if self.more.value else ()

    def draw(self, state: PanelState, why_not: Mapping[str, str], plan: PanelPlan) -> None:
        """Show this; from any thread. `why_not`: button -> why it does nothing now, or ""."""
        with self._lock:
            self._top.value = _wrapped(top_html(state, drawn=next(self._drawn)))
            _set(self._log, "value", _wrapped(log_html(state.log)))
            _set(self._plan, "value", _wrapped(plan_html(plan)))
            for name, button in self.buttons.items():
                _set(button, "disabled", bool(why_not[name]))
                _set(button, "tooltip", why_not[name] or _tip(name))
            for name in ("profile", "memory"):
                is_armed = BUTTONS[name].magic in state.armed
                _set(self.buttons[name], "button_style", "success" if is_armed else "")
            _set(self.buttons["interrupt"], "button_style", "primary" if state.is_busy else "")
            self._draw_question(state.question)
            _show(self._with_ranks, is_shown=state.is_running)
            _show(self._none, is_shown=not state.is_running)
            _show(self.buttons["cancel"], is_shown=bool(state.queued))

    def _draw_question(self, question: Question | None) -> None:
        """Draw a question, and fill in its choices once: those chosen there stay."""
        if question is not self._asked:
            self._asked = question
            choices = () if question is None else question.choices
            self.compared.value = ()
            self.compared.options = choices
            self.compared.rows = max(2, min(_MOST_CHOICES, len(choices)))
            self.compared.value = () if question is None else question.preset
            self._question.value = _wrapped(question_html(question))
        _show(self.compared, is_shown=question is not None and bool(question.choices))
        _show(self._ask, is_shown=question is not None)

    def show_detail(self, title: str, body: str) -> None:
        """Show something long below the log, folded or not as the reader likes."""
        with self._lock:
            self._detail.value = _wrapped(
                f'<details open class="np-detail"><summary>{html.escape(title)}</summary>'
                f"{body}</details>"
            )

    def close(self) -> None:
        """Take the widgets off every page."""
        for widget in _below(self.root):
            widget.close()


def answer_in_subshell(widget: Any) -> None:
    """Let what a frontend sends of this widget run where the frontend asked for.

    ipykernel 7.4 sends it to the shell that last sent on the widget's comm: for a widget that a
    cell has made that is the main one, in which nothing runs before the cell has ended. Versions
    without that method need nothing.
    """
    comm = widget.comm
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda _data, default: default  # noqa: SLF001


def _field_widget(field: FormField) -> Any:
    widget = _KINDS[field.kind](field)
    widget.tooltip = f"{field.help} ({field.flag})"
    widget.style = _NARROW
    widget.layout.width = "auto"
    if field.kind in {"text", "suggest"}:
        widget.layout.width = "150px"
    return widget


def _options(field: FormField) -> list[tuple[str, str]]:
    return [(f"{field.default}", UNSET), *((choice, choice) for choice in field.choices)]


_KINDS: Mapping[str, Callable[[FormField], Any]] = {
    "choice": lambda field: ipywidgets.Dropdown(
        options=_options(field), value=UNSET, description=field.label
    ),
    "suggest": lambda field: ipywidgets.Combobox(
        options=list(field.choices), value=UNSET, description=field.label,
        placeholder=field.default, continuous_update=False,
    ),
    "text": lambda field: ipywidgets.Text(
        value=UNSET, description=field.label, placeholder=field.default, continuous_update=False
    ),
    "switch": lambda field: ipywidgets.Checkbox(
        value=False, description=field.label, indent=False
    ),
}  # fmt: skip


def _tip(name: str) -> str:
    row = BUTTONS[name]
    later = "; while a cell runs, this is queued until it ends" if row.when == "between" else ""
    return f"{row.help}{later}" + (f" ({row.magic})" if row.magic else "")


def _picker(kind: Any, width: str, **traits: object) -> Any:
    return kind(style=_NARROW, layout=ipywidgets.Layout(width=width), **traits)


def _row(*children: Any) -> Any:
    # grid_gap: the old name of gap, which ipywidgets lacks; it holds for flex boxes too.
    layout = ipywidgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 8px")
    return ipywidgets.HBox(list(children), layout=layout)


def _group(title: str, *rows: Any) -> Any:
    """Rows with what they are for beside them."""
    head = ipywidgets.HTML(_wrapped(f'<span class="np-group">{title}</span>'))
    head.layout.min_width = "80px"
    inner = ipywidgets.VBox(list(rows))
    inner.layout.flex = "1 1 0%"
    return ipywidgets.HBox([head, inner])


def _below(widget: Any) -> list[Any]:
    return [
        widget,
        *(descendant for child in getattr(widget, "children", ()) for descendant in _below(child)),
    ]


def _wrapped(body: str) -> str:
    return f'<div class="nbdist-panel">{body}</div>'


def _set(widget: Any, name: str, value: object) -> None:
    # Set only where it differs: a frontend redraws what it is told, and a focus would be lost.
    if getattr(widget, name) != value:
        setattr(widget, name, value)


def _show(widget: Any, *, is_shown: bool) -> None:
    _set(widget.layout, "display", None if is_shown else "none")
