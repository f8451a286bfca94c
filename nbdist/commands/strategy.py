"""Verbs for models that live on the ranks: the strategy, and making them equal."""

from __future__ import annotations

from argparse import Namespace

from nbdist.core.option import Option, whole_number
from nbdist.core.view import View
from nbdist.errors import OptionError
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.verb import Verb, parse, strategy_given, strategy_options
from nbdist.strategy.choose import StrategySpec, choose
from nbdist.strategy.options import listed
from nbdist.strategy.table import ROWS
from nbdist.switch import view as strategy_view


def dist_sync_model(values: Namespace) -> View:
    """Make the models of all ranks equal to those of one."""
    names = NOTEBOOK.session.sync_model(values.source)
    return View(f"all ranks have rank {values.source}'s {', '.join(names)}")


def strategy_spec(text: str) -> StrategySpec:
    """A strategy with its options, in one text: `fsdp --bf16`.

    Raises:
        OptionError: If it cannot be read, or there is no such strategy.
    """
    values = parse(VERBS[0], text).values
    if len(values.named) > 1:
        raise OptionError(
            f"Which one is {text!r}: {listed(values.named, 'or')}? A strategy with options goes "
            'into quotation marks: "fsdp --bf16" ddp'
        )
    name = values.named[0] if values.named else None
    spec = StrategySpec.parse(name, strategy_given(values))
    if spec is None or (name is not None and name not in ROWS):
        choose(name, {}, 1)  # says which there are
    assert spec is not None
    return spec


def dist_strategy(values: Namespace) -> View:
    """Show the strategy that counts, or switch to another."""
    strategies, settings = NOTEBOOK.session.strategy, strategy_given(values)
    if len(values.named) > 1:
        raise OptionError(f"%dist_strategy: choose one of {', '.join(values.named)}.")
    name = values.named[0] if values.named else None
    if StrategySpec.parse(name, settings) is None:
        choice = strategies.current()
        tokens = strategies.expert_tokens() if choice.degrees.ep > 1 else {}
        return strategy_view.current(choice, tokens)
    return strategy_view.switch_result(strategies.switch(name, **settings))


_RANK = whole_number("a valid rank (0 or more)", 0)

VERBS = (
    Verb(
        "dist_strategy",
        "Show how models are trained in parallel, or switch it under live models.",
        "%dist_strategy fsdp --tp 2 --bf16",
        dist_strategy,
        (
            Option(
                ("named",),
                f"{listed(ROWS, 'or')} (default: show all)",
                metavar="NAME",
                choices=tuple(ROWS),
            ),
            *strategy_options(),
        ),
    ),
    Verb(
        "dist_sync_model",
        "Make models and optimizers of all ranks equal to those of one.",
        "%dist_sync_model --from 0",
        dist_sync_model,
        (Option(("--from",), "the rank that is copied (default: 0)", _RANK, 0, "R", "source"),),
    ),
)
