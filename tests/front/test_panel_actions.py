"""What a button does with its verb's line, and where all goes that the verb shows."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable

import pytest

from nbdist.core.option import Option
from nbdist.core.view import View
from nbdist.errors import NbdistError
from nbdist.notebook.notebook import SHOWN, show
from nbdist.notebook.verb import Verb
from nbdist.panel.job_queue import PanelJob
from nbdist.panel.kernel import actions
from nbdist.panel.kernel.actions import Chosen, Shows
from nbdist.strategy.choose import choose

SAVE = PanelJob("save", "%dist_trace --save traces", "--save traces")
COMPARE = PanelJob("compare", "%dist_compare ddp -- (the last cell)", "ddp -- train(3)\nmore()")


class Page:
    """What the panel was told to show."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.details: list[tuple[str, str]] = []
        self.shows = Shows(self.steps.append, lambda *detail: self.details.append(detail))

    def act(self, job: PanelJob, run: Callable[[Namespace], View | None]) -> str:
        """Do a job with this in the place of its verb's function."""
        save = Option(("--save",), "a folder")
        strategies = Option(("strategies",), "some")
        verbs = {
            "dist_trace": Verb("dist_trace", "", "", run, (save,)),
            "dist_compare": Verb("dist_compare", "", "", run, (strategies,), takes_code=True),
        }
        return actions.act(job, verbs, self.shows)


@pytest.mark.parametrize("way", ["returned", "shown", "line"])
def test_the_verb_gets_its_line_and_its_text_is_logged(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """However the verb shows it; nothing of it stands in the notebook."""
    page = Page()

    def run(values: Namespace) -> View | None:
        view = View(f"written: {values.save}")
        if way == "returned":
            return view
        if way == "shown":
            show(view)
        else:
            line = SHOWN.line("saving")
            line("half of it")
            line.finish(view)
        return None

    assert page.act(SAVE, run) == "written: traces"
    assert page.steps == {"returned": [], "shown": ["written: traces"]}.get(
        way, ["half of it", "written: traces"]
    )
    assert page.details == []
    assert capsys.readouterr().out == ""


def test_what_is_long_stands_below_with_what_was_printed() -> None:
    """The result without the headings on the way to it; code goes along as it was typed."""
    page = Page()

    def run(values: Namespace) -> View:
        show(View("ddp:"))
        sys.stdout.write("<loss>")
        return View(f"{values.strategies}", f"<b>{values.rest}</b>")

    assert page.act(COMPARE, run) == "done, see below"
    assert page.steps == ["ddp"]
    assert page.details == [
        ("comparison", "<b>train(3)\nmore()</b><pre>&lt;loss&gt;</pre>"),
    ]


def test_what_a_verb_has_shown_before_it_fails_is_kept() -> None:
    """Of a comparison that breaks off: what there is; then the next verb shows in its cell."""
    page = Page()

    def run(_values: Namespace) -> View:
        show(View("ddp:"))
        raise NbdistError("rank 1 has ended")

    with pytest.raises(NbdistError, match="rank 1 has ended"):
        page.act(COMPARE, run)
    assert page.details == [("comparison", "<pre>ddp:</pre>")]
    assert not SHOWN.replace(View("of a cell"))


def test_what_is_asked_for_is_a_line_as_it_would_be_typed() -> None:
    """A strategy with options is one word of a comparison, and no line is longer than it has to."""
    chosen = Chosen("fsdp", {"precision": "bf16", "tp": ""}, 1, ("fsdp --bf16",))
    ddp = choose("ddp", {}, 2)

    def job(name: str) -> tuple[str, str]:
        made = actions.job(name, chosen, ddp, "train(3)")
        return made.typed, made.line

    assert job("apply") == ("%dist_strategy fsdp --bf16", "fsdp --bf16")
    assert job("restart") == ("%dist_restart 1", "1")
    assert job("save") == ("%dist_trace --save traces", "--save traces")
    assert job("compare") == (
        '%dist_compare ddp "fsdp --bf16" -- (the last cell)',
        'ddp "fsdp --bf16" -- train(3)',
    )
