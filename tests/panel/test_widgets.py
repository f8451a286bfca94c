"""The panel's widgets without a kernel: what they show of a state, what they tell of presses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from nbdist.panel.state import BUTTONS, PanelPlan, PanelState, Question
from nbdist.panel.strategy_form import fields
from nbdist.panel.view.widgets import PanelWidgets, answer_in_subshell
from nbdist.strategy.table import ROWS


class Owner:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def press(self, name: str) -> None:
        self.told.append(name)

    def refresh(self) -> None:
        self.told.append("refresh")


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def widgets(owner: Owner) -> PanelWidgets:
    made = PanelWidgets(owner)
    made.set_ranks(4)
    return made


def test_each_button_tells_its_name(widgets: PanelWidgets, owner: Owner) -> None:
    """And nothing else."""
    for button in widgets.buttons.values():
        button.click()

    assert owner.told == list(BUTTONS)


@pytest.mark.parametrize("name", ROWS)
def test_the_fields_shown_are_those_of_the_strategy(widgets: PanelWidgets, name: str) -> None:
    """Its own beside it, the others behind More options."""
    widgets.set_values(name, {})
    widgets.more.value = True
    shown = fields(name, 4)

    beside = [widget.description for widget in widgets._strategy.children]
    behind = [widget.description for widget in widgets._common.children]
    assert beside == ["strategy", *(field.label for field in shown if field.is_own)]
    assert behind == [field.label for field in shown if not field.is_own]
    assert set(widgets.values) == {field.word for field in shown}


def test_a_choice_is_told_once_and_a_strategy_that_is_set_is_not(
    widgets: PanelWidgets, owner: Owner
) -> None:
    """What the panel itself fills in is no choice of the user's."""
    widgets.set_values("fsdp", {"tp": "2", "precision": "bf16"})
    before = list(owner.told)
    widgets.strategy.value = "ddp"
    widgets._fields["find_unused"].value = True

    assert before == []
    assert owner.told == ["refresh", "refresh"]
    assert {word: value for word, value in widgets.values.items() if value} == {"find_unused": True}


def test_degrees_are_those_of_the_ranks_that_there_are(widgets: PanelWidgets) -> None:
    """With other ranks than before they are made anew, and the numbers of ranks too."""
    before = [value for _, value in widgets._fields["tp"].options]
    widgets.set_ranks(3)

    assert before == ["", "1", "2", "4"]
    assert [value for _, value in widgets._fields["tp"].options] == ["", "1", "3"]
    assert [value for _, value in widgets.rank.options] == ["", 0, 1, 2]


def test_what_can_do_nothing_is_disabled_with_the_reason(widgets: PanelWidgets) -> None:
    """And enabled again, with what it does."""
    why_not = dict.fromkeys(BUTTONS, "")
    state = PanelState("2 ranks", is_running=True, armed=("%%dist_profile",))
    widgets.draw(
        state, why_not | {"apply": "not so"}, PanelPlan("because <that>", is_possible=False)
    )
    apply = widgets.buttons["apply"]
    first = apply.disabled, apply.tooltip
    armed = widgets.buttons["profile"].button_style
    plan = widgets._plan.value
    widgets.draw(PanelState("none"), why_not, PanelPlan("", is_possible=True))

    assert first == (True, "not so")
    assert (apply.disabled, "%dist_strategy" in apply.tooltip) == (False, True)
    assert (armed, widgets.buttons["profile"].button_style) == ("success", "")
    assert "because &lt;that&gt;" in plan
    assert widgets._with_ranks.layout.display == "none"
    assert widgets._none.layout.display is None


def test_what_is_asked_is_shown_until_it_is_answered(widgets: PanelWidgets) -> None:
    """What is offered can be chosen from, and a choice stays when the panel is drawn again."""
    why_not, plan = dict.fromkeys(BUTTONS, ""), PanelPlan("", is_possible=True)
    question = Question("compare", "It <costs>.", ("zero1", "fsdp"), ("zero1", "fsdp"))
    state = PanelState("2 ranks", is_running=True, question=question)
    widgets.draw(replace(state, question=None), why_not, plan)
    hidden = widgets._ask.layout.display
    widgets.draw(state, why_not, plan)
    first = widgets._ask.layout.display, widgets.compared.value
    widgets.compared.value = ("fsdp",)
    widgets.draw(state, why_not, plan)

    assert hidden == "none"
    assert first == (None, ("zero1", "fsdp"))
    assert widgets.compared.value == ("fsdp",)
    assert "It &lt;costs&gt;." in widgets._question.value
    widgets.draw(replace(state, question=Question("restart", "Sure?")), why_not, plan)
    assert widgets.compared.layout.display == "none"


def test_interrupt_stands_out_while_something_runs(widgets: PanelWidgets) -> None:
    """And not between cells."""
    why_not, plan = dict.fromkeys(BUTTONS, ""), PanelPlan("", is_possible=True)
    styles = []
    for cell in ("cell [3]", ""):
        widgets.draw(PanelState("2 ranks", is_running=True, cell=cell), why_not, plan)
        styles.append(widgets.buttons["interrupt"].button_style)

    assert styles == ["primary", ""]


def test_clicks_go_where_the_frontend_sends_them() -> None:
    """Over ipykernel 7.4's own choice of a shell; other versions are left alone."""
    routed = SimpleNamespace(_reply_subshell_for=lambda _data, _default: "the cell's shell")
    plain = SimpleNamespace()
    for comm in (routed, plain):
        answer_in_subshell(SimpleNamespace(comm=comm))

    assert routed._reply_subshell_for({}, "a subshell") == "a subshell"
    assert vars(plain) == {}
