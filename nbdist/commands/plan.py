"""The verb that says whether a model will fit; it needs no ranks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from IPython import get_ipython

from nbdist.cells.kernel import progress
from nbdist.config.emit import Setting, run_line
from nbdist.config.launch import configured
from nbdist.core.option import Option, of_values, options_of
from nbdist.core.view import View
from nbdist.errors import OptionError
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.verb import ANYWHERE, Verb, strategy_given, strategy_options
from nbdist.planner.kernel import request as requests
from nbdist.planner.kernel.request import Running
from nbdist.planner.models import CONFIGS
from nbdist.planner.plan import PlanRow
from nbdist.planner.request import PlanRequest
from nbdist.planner.search import Search
from nbdist.planner.view.check_view import shown_check
from nbdist.planner.view.plan_view import PlanView, shown_plan
from nbdist.planner.view.search_view import shown_search

# Form of a configuration -> a name for its file; the first that a strategy has is offered.
_FILES = {"accelerate": "accelerate.yaml", "deepspeed": "ds_config.json"}


def make_plan(model: Any, request: PlanRequest, given: Mapping[str, object]) -> PlanView:
    """Plan for a model, on the ranks that run where nothing else was typed.

    planner.kernel.request.make_plan has the arguments and errors.
    """
    running = None
    if NOTEBOOK.is_running:
        session = NOTEBOOK.session
        running = Running(session, session.monitor, session.bandwidth)
    result, advice = requests.make_plan(model, request, given, running)
    if not isinstance(result, Search):
        return shown_plan(result, advice)
    lines = () if advice.row is None else _lines(advice.row, result)
    return shown_search(result, advice, lines)


def _lines(row: PlanRow, result: Search) -> tuple[str, ...]:
    """List the options that give a row: for these ranks in a notebook, and for a script.

    That is a configuration where Accelerate or DeepSpeed has the strategy, else nbdist's launcher.
    """
    assert row.choice is not None
    texts = configured(Setting(row.choice)).texts
    file = next((name for form, name in _FILES.items() if form in texts), "")
    nodes = f" --nodes {len(result.ranks_on)}" if len(result.ranks_on) > 1 else ""
    verb = "nbdist config" if get_ipython() is None else "%dist_config"
    config = f"{verb} --strategy {row.typed} --ranks {result.world_size}{nodes} --write {file}"
    return (f"%dist_strategy {row.typed}", config if file else run_line(row.choice))


def dist_plan(values: Namespace) -> View:
    """Plan for what was typed."""
    if len(values.model) != 1:
        raise OptionError(
            "%dist_plan: name one model: its number of parameters (7e9), the path of a "
            f"config.json, a model on the ranks, or one of {', '.join(CONFIGS)}."
        )
    [model], given = values.model, strategy_given(values)
    request = of_values(PlanRequest, values)
    if not request.is_check:
        return make_plan(_named(model), request, given)
    request.options(given)
    _check_alone(request, given)
    with progress.during("plan") as tell:
        return check_step(model, request, tell)


def check_step(
    name: str, request: PlanRequest, tell: Callable[[str], None] = lambda _text: None
) -> View:
    """Predict a step's memory under the strategy that counts, and measure it on the ranks.

    planner.kernel.request.check_step has the arguments and errors.
    """
    session = NOTEBOOK.session
    step = requests.check_step(name, request, session, session.strategy.current(), tell)
    return shown_check(step)


def _check_alone(request: PlanRequest, given: Mapping[str, object]) -> None:
    """Refuse what says under which strategy, on what, or counted by what: it runs as it is."""
    of_step = {"inputs", "is_check", "is_fp32", "checkpoints_all"}
    names = [row.name for row in fields(PlanRequest) if row.name not in of_step and not row.default]
    typed = {**given, **{name: getattr(request, name) for name in names}}
    for name, value in typed.items():
        if value not in (None, False):
            raise OptionError(
                "--check measures the model under the current strategy: leave "
                f"--{name.removeprefix('is_').replace('_', '-')} out. %dist_strategy changes the "
                "strategy."
            )


def _named(text: str) -> Any:
    """The notebook's variable of that name, if it is a config or has one; else the text."""
    shell = get_ipython()
    value = None if shell is None else shell.user_ns.get(text)
    has_config = isinstance(value, Mapping) or hasattr(getattr(value, "config", value), "to_dict")
    return value if has_config else text


VERBS = (
    Verb(
        "dist_plan",
        "Say whether a model will fit, under which strategy, and what to choose.",
        "%dist_plan llama-3-8b --ranks 8 --gpu h100 --seq 4096",
        dist_plan,
        (
            Option(
                ("model",),
                "number of parameters (7e9, 7B), a name such as llama-3-8b, the path of a "
                "config.json, or a model's variable on the ranks",
                metavar="MODEL",
                choices=tuple(CONFIGS),
            ),
            *options_of(PlanRequest),
            *strategy_options(),
        ),
        place=ANYWHERE,
    ),
)
