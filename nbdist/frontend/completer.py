"""Tab and Shift-Tab: in a distributed cell with the names of a rank, behind a magic its options."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from nbdist import commands
from nbdist.cells.completion import Reply, reply_with, shift_reply
from nbdist.cells.kernel import completion
from nbdist.core.option import Option
from nbdist.errors import OptionError
from nbdist.frontend.input_transformer import Destination, destination
from nbdist.notebook.notebook import LOCAL, NOTEBOOK
from nbdist.notebook.verb import Verb, parse

_OURS = "_nbdist_original"
_MAGIC_LINE = re.compile(r"\s*(%%?)(\w+)[ \[]")
# A choice begins behind these: "fsdp --bf16", --shard=full, --ops all_reduce,all_gather.
_BEGINS = re.compile(r"[=,'\"]")
# What stands behind these are names that ranks have.
_OF_RANKS = frozenset({"dist_pull"})


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
        verb, before, typed = behind
        offered = _offered(verb, before, typed)
        if offered is not None:
            begun = _BEGINS.split(typed)[-1]
            fitting = sorted(word for word in offered if word.startswith(begun))
            return reply_with(fitting, cursor - len(begun), cursor)
        if verb.name in _OF_RANKS and NOTEBOOK.is_running:
            reply = await completion.complete(NOTEBOOK.session, 0, typed, len(typed))
            return shift_reply(reply, cursor - len(typed))
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
    """Destination of the cell, and a rank to ask; None where the notebook answers."""
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
    """The ranks that the line names, or that %dist_mode has chosen; None for all."""
    if not where.magics:
        return NOTEBOOK.mode if NOTEBOOK.mode != LOCAL else None
    verbs = [(commands.VERBS[name], line) for name, line in where.magics]
    given = (verb.run(parse(verb, line).values) for verb, line in verbs if verb.is_cell)
    return next((options.ranks for options in given if options.ranks), None)


def _typed_behind(code: str, cursor: int) -> tuple[Verb, list[str], str] | None:
    """(our magic in the cursor's line, the words behind it, the one at the cursor), else None."""
    begin = code.rfind("\n", 0, cursor) + 1
    magic = _MAGIC_LINE.match(code, begin, cursor)
    verb = commands.VERBS.get(magic.group(2)) if magic else None
    if verb is not None and verb.as_line is not None and magic and magic.group(1) == "%":
        verb = verb.as_line
    if verb is None or magic is None:
        return None
    text = code[magic.end() - 1 : cursor]
    *before, typed = text.split() if text and not text[-1].isspace() else [*text.split(), ""]
    return verb, before, typed


def _offered(verb: Verb, before: list[str], typed: str) -> Iterable[str] | None:
    """Words possible at the cursor, by the verb's table; None where that is anything."""
    if "--" in before and (verb.takes_code or verb.takes_rest):
        return None
    options = {flag: o for o in verb.options for flag in o.flags if not o.is_argument}
    flag, has_value, _ = typed.partition("=")
    option = options.get(flag if has_value else ["", *before][-1])
    if option is not None and option.kind is not None:
        return option.offered or (None if option.kind is str else ())
    flags = [flag for flag in options if flag.startswith("--")]
    argument = next((option for option in verb.options if option.is_argument), None)
    is_typed = any(_is_argument(word, last, options) for last, word in pairwise(["", *before]))
    if typed.startswith("-") or argument is None or (is_typed and not argument.is_list):
        return flags
    # It may be something else, such as a path: then IPython completes it.
    begun = _BEGINS.split(typed)[-1]
    return [choice for choice in argument.offered if choice.startswith(begun)] or None


def _is_argument(word: str, last: str, options: Mapping[str, Option]) -> bool:
    """Whether it is neither an option nor the value of the one before it."""
    is_value = last in options and options[last].kind is not None
    return not word.startswith("-") and not is_value


async def _awaited(reply: Any) -> Reply:
    # A plain dict in ipykernel 6 and 7.4, a coroutine in what comes after.
    return await reply if inspect.isawaitable(reply) else reply  # type: ignore[no-any-return]
