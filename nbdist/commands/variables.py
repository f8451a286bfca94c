"""Verbs that bring variables from the notebook to ranks and back."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

from IPython import get_ipython

from nbdist.commands.cells import RANKS
from nbdist.core.failures import ranks_phrase
from nbdist.core.option import Option
from nbdist.core.view import View
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.verb import Verb
from nbdist.variables.names import check_known, check_names, describe, describe_list


def dist_push(values: Namespace) -> View:
    """Give ranks copies of the notebook's variables."""
    session, shell = NOTEBOOK.session, get_ipython()
    assert shell is not None
    variables = shell.user_ns
    check_names(values.names, "%dist_push")
    check_known(values.names, variables)
    moved = session.push({name: variables[name] for name in values.names}, values.ranks)
    phrase = f"to {ranks_phrase(moved.ranks)}"
    lines = [f"{name} {phrase}: {describe(value)}" for name, value in moved.values.items()]
    return View("\n".join([*lines, *moved.remarks]))


def dist_pull(values: Namespace) -> View:
    """Bind variables of ranks in the notebook: a list in rank order where there are several."""
    session, shell = NOTEBOOK.session, get_ipython()
    assert shell is not None
    check_names(values.names, "%dist_pull")
    moved = session.variables.pull(values.names, values.ranks, is_whole=values.is_whole)
    shell.push(dict(moved.values))
    phrase = f"from {ranks_phrase(moved.ranks)}"
    tell = describe if len(moved.ranks) == 1 else describe_list
    lines = [f"{name} {phrase}: {tell(value)}" for name, value in moved.values.items()]
    return View("\n".join([*lines, *moved.remarks]))


def _notebook_names() -> list[str]:
    """List the names that Tab offers to push: IPython itself completes no names behind a magic."""
    shell: Any = get_ipython()
    hidden, variables = shell.user_ns_hidden, shell.user_ns.items()
    names = [n for n, value in variables if n not in hidden or hidden[n] is not value]
    return [name for name in names if not name.startswith("_")]


_NAMES = Option(("names",), "variables", metavar="NAME", is_list=True)
VERBS = (
    Verb(
        "dist_push",
        "Give ranks copies of the notebook's variables.",
        "%dist_push a b --ranks 0,2",
        dist_push,
        (replace(_NAMES, choices=_notebook_names), RANKS),
    ),
    Verb(
        "dist_pull",
        "Bring variables of ranks into the notebook; of several ranks as a list in rank order.",
        "%dist_pull loss --ranks 0",
        dist_pull,
        (
            _NAMES,
            RANKS,
            Option(("--whole",), "gather DTensors (uses all ranks)", None, name="is_whole"),
        ),
    ),
)
