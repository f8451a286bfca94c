"""Tab and Shift-Tab: in a distributed cell with the names of a rank, behind a magic its options."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from IPython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from nbdist import commands
from nbdist.cells.completion import Reply, reply_of, reply_with, shift_reply
from nbdist.cells.kernel import completion
from nbdist.errors import OptionError
from nbdist.frontend.input_transformer import Destination, destination
from nbdist.notebook.notebook import LOCAL, NOTEBOOK, CellOptions
from nbdist.notebook.verb import Verb, parse

_OURS = "_nbdist_original"
_MAGIC_LINE = re.compile(r"\s*(%%?)(\w+)[ \[]")
_WORD = re.compile(r"[^\s]*$")
# What stands behind these are names that ranks have.
_OF_RANKS = frozenset({"dist_pull"})
# And behind these that the notebook has: IPython completes no names behind a magic.
_OF_NOTEBOOK = frozenset({"dist_push"})


def install(shell: InteractiveShell) -> None:
    """Answer the kernel's requests for distributed cells. Twice is harmless.

    ipykernel means `do_complete` and `do_inspect` to be replaced; a terminal has neither, and
    completes with the notebook's own names.
    """
    uninstall(shell)
    kernel = getattr(shell, "kernel", None)
    for name, ours in (("do_complete", _complete), ("do_inspect", _inspect)):
        original = getattr(kernel, name, None)
        if original is not None:
            replacement = functools.partial(ours, original)
            setattr(replacement, _OURS, original)
            setattr(kernel, name, replacement)


def uninstall(shell: InteractiveShell) -> None:
    """Let the kernel answer by itself again."""
    kernel = getattr(shell, "kernel", None)
    for name in ("do_complete", "do_inspect"):
        if hasattr(getattr(kernel, name, None), _OURS):
            delattr(kernel, name)  # the class's own is behind it


async def _complete(original: Callable[..., Any], code: str, cursor_pos: int | None) -> Reply:
    cursor = len(code) if cursor_pos is None else cursor_pos
    behind = _typed_behind(code, cursor)
    if behind is not None:
        verb, typed = behind
        if typed.startswith("-"):
            flags = [flag for option in verb.options for flag in option.flags]
            fitting = [f for f in flags if f.startswith("--") and f.startswith(typed)]
            return reply_with(sorted(fitting), cursor - len(typed), cursor)
        if verb.name in _OF_RANKS and NOTEBOOK.is_running:
            reply = await completion.complete(NOTEBOOK.session, 0, typed, len(typed))
            return shift_reply(reply, cursor - len(typed))
        if verb.name in _OF_NOTEBOOK:
            shell: Any = get_ipython()
            hidden, variables = shell.user_ns_hidden, shell.user_ns.items()
            names = [n for n, value in variables if n not in hidden or hidden[n] is not value]
            return reply_of(dict.fromkeys(names, "instance"), code, cursor)
    place = _place(code, cursor)
    if place is None:
        return await _awaited(original(code, cursor_pos))
    where, rank = place
    session, start = NOTEBOOK.session, where.start
    return shift_reply(
        await completion.complete(session, rank, code[start:], cursor - start), start
    )


async def _inspect(
    original: Callable[..., Any],
    code: str,
    cursor_pos: int,
    detail_level: int = 0,
    omit_sections: Any = (),
) -> Reply:
    place = _place(code, cursor_pos)
    if place is None:
        return await _awaited(original(code, cursor_pos, detail_level, omit_sections))
    where, rank = place
    text, cursor = code[where.start :], cursor_pos - where.start
    return await completion.inspect(NOTEBOOK.session, rank, text, cursor, detail_level)


def _place(code: str, cursor: int) -> tuple[Destination, int] | None:
    """Where the cell goes, and the first of its ranks; None where the notebook answers."""
    where = destination(code) if NOTEBOOK.is_running else None
    if where is None or cursor < where.start:
        return None
    session = NOTEBOOK.session
    try:
        chosen = _ranks(where)
        ranks = session.ranks if chosen is None else session.chosen(chosen)
    except OptionError:  # it is being typed
        ranks = session.ranks
    living = [rank for rank in ranks if session.is_connected(rank)]
    return where, (living or ranks)[0]


def _ranks(where: Destination) -> str | None:
    """As typed, or as %dist_mode has it; None for all."""
    if where.verb is None:
        return NOTEBOOK.mode if NOTEBOOK.mode != LOCAL else None
    if where.verb.takes_code:
        return None
    options: CellOptions = where.verb.run(parse(where.verb, where.line).values)
    return options.ranks


def _typed_behind(code: str, cursor: int) -> tuple[Verb, str] | None:
    """(the magic of ours in the cursor's line, the word before the cursor); None elsewhere."""
    begin = code.rfind("\n", 0, cursor) + 1
    magic = _MAGIC_LINE.match(code, begin, cursor)
    verb = commands.VERBS.get(magic.group(2)) if magic else None
    if verb is not None and verb.as_line is not None and magic and magic.group(1) == "%":
        verb = verb.as_line
    word = _WORD.search(code, begin, cursor)
    return None if verb is None else (verb, word.group() if word else "")


async def _awaited(reply: Any) -> Reply:
    # A plain dict in ipykernel 6 and 7.4, a coroutine in what comes after.
    return await reply if inspect.isawaitable(reply) else reply  # type: ignore[no-any-return]
