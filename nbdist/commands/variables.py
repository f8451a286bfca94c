"""Verbs that bring variables from the notebook to ranks and back."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from IPython import get_ipython

from nbdist.core.failures import ranks_phrase
from nbdist.core.view import View
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.verb import Option, Verb
from nbdist.variables.kernel import Moved
from nbdist.variables.names import check_known, check_names, described, described_list


def dist_push(values: Namespace) -> View:
    """Give ranks copies of the notebook's variables."""
    session = NOTEBOOK.session
    own = _notebook().user_ns
    check_names(values.names, "%dist_push")
    check_known(values.names, own)
    moved = session.push({name: own[name] for name in values.names}, values.ranks)
    phrase = ranks_phrase(moved.ranks)
    return _view(
        [f"{name} to {phrase}: {described(value)}" for name, value in moved.values.items()], moved
    )


def dist_pull(values: Namespace) -> View:
    """Bind variables of ranks in the notebook: a list in rank order where there are several."""
    session = NOTEBOOK.session
    check_names(values.names, "%dist_pull")
    moved = session.variables.pull(values.names, values.ranks, is_whole=values.is_whole)
    _notebook().push(dict(moved.values))
    phrase = ranks_phrase(moved.ranks)
    tell = described if len(moved.ranks) == 1 else described_list
    return _view(
        [f"{name} from {phrase}: {tell(value)}" for name, value in moved.values.items()], moved
    )


def _view(lines: list[str], moved: Moved) -> View:
    return View("\n".join([*lines, *moved.remarks]))


def _notebook() -> Any:
    return get_ipython()


_NAMES = Option(("names",), "names of variables", metavar="NAME")
_RANKS = Option(("--ranks",), "ranks such as 0,2-3 (default: all)", metavar="RANKS")

VERBS = (
    Verb(
        "dist_push",
        "Give ranks copies of the notebook's variables.",
        "%dist_push a b --ranks 0,2",
        dist_push,
        (_NAMES, _RANKS),
    ),
    Verb(
        "dist_pull",
        "Bring variables of ranks into the notebook; of several ranks as a list in rank order.",
        "%dist_pull loss --ranks 0",
        dist_pull,
        (
            _NAMES,
            _RANKS,
            Option(("--whole",), "gather DTensors (takes all ranks)", None, name="is_whole"),
        ),
    ),
)
