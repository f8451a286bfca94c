"""The verb that runs the same steps under several strategies."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence

from nbdist.commands.strategy import strategy_spec
from nbdist.comparison import view as comparison_view
from nbdist.core.option import Option
from nbdist.core.view import View
from nbdist.errors import OptionError
from nbdist.notebook.notebook import NOTEBOOK, SHOWN, show
from nbdist.notebook.verb import Verb
from nbdist.strategy.options import listed
from nbdist.strategy.table import ROWS


def compare_strategies(
    strategies: Sequence[str], code: str, tell: Callable[[View], None] = lambda _view: None
) -> View:
    """Compare the strategies, and return the table and picture.

    Args:
        strategies: Each as it is typed behind %dist_strategy.
        code: Source as in a distributed cell.
        tell: Shows a heading above each strategy's output; and what there is, where the cell ends
            it before all have run.

    Raises:
        OptionError: If a strategy does not exist, or there is no code.
        DistributedError, Interrupted, NbdistError: See comparison.kernel.
    """
    if not strategies:
        raise OptionError(
            f"%dist_compare: no strategy was given. Choose from {listed(ROWS)}: "
            "%dist_compare ddp fsdp -- train(3)"
        )
    asked = [(text, strategy_spec(text)) for text in strategies]
    comparing = NOTEBOOK.session.comparing(code)
    try:
        comparison = comparing.run(asked, lambda text: tell(View(f"{text}:")))
    except BaseException:
        for view in comparison_view.partial_result(comparing.rows, comparing.restored):
            tell(view)
        raise
    return comparison_view.comparison_result(comparison)


def dist_compare(values: Namespace) -> View:
    """Run the cell under each strategy, and show them side by side."""
    with SHOWN.silenced():  # each strategy has a heading, and its output below
        return compare_strategies(values.strategies, values.rest, show)


VERBS = (
    Verb(
        "dist_compare",
        "Run the same steps under several strategies: time, memory, bytes and overlap of each.",
        '%dist_compare ddp "fsdp --bf16" tp -- train(3)',
        dist_compare,
        (
            Option(
                ("strategies",),
                "one or more, each quoted together with its options; then -- and the steps, or "
                "%%dist_compare with the steps below",
                metavar="STRATEGY",
                choices=tuple(ROWS),
                is_list=True,
            ),
        ),
        takes_code=True,
    ),
)
