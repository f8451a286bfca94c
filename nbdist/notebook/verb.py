"""Definition of a verb: its options, its help, and a parser that never raises UsageError."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from nbdist.core.option import Option, positive_number, rank_count
from nbdist.core.view import View
from nbdist.errors import OptionError, did_you_mean
from nbdist.strategy.options import DEGREES, OPTIONS, SHORTHANDS, OptionRow, listed, takers
from nbdist.strategy.table import ROWS

# Where a verb works: as a magic, as a word after `nbdist` in a terminal, or as both.
NOTEBOOK = "notebook"
ANYWHERE = "anywhere"
TERMINAL = "terminal"


@dataclass(frozen=True, slots=True)
class Verb:
    """One thing that a user can ask for.

    Attributes:
        name: As typed after % or %%.
        run: Does it and returns what to show. Of a cell's verb it does nothing: it returns the
            notebook.CellOptions with which the cell is sent.
        options: In the order of the help.
        is_cell: A cell magic (%%).
        replaced: Options of the nbdistributed package -> what stands for them here.
        place: NOTEBOOK, ANYWHERE or TERMINAL.
        takes_rest: What stands after `--` belongs to it, as `values.rest`.
        takes_code: What stands after `--` is Python, as `values.rest` as it was typed; as a cell
            magic, which it is as well, it has the lines below.
        as_line: What the same name is as a line magic, of one that is a cell's.
    """

    name: str
    help: str
    example: str
    run: Callable[[argparse.Namespace], Any]
    options: tuple[Option, ...] = ()
    is_cell: bool = False
    replaced: Mapping[str, str] = field(default_factory=dict, hash=False)
    place: str = NOTEBOOK
    takes_rest: bool = False
    takes_code: bool = False
    as_line: Verb | None = None

    @property
    def typed(self) -> str:
        """The verb as a user types it: with its percent signs, or after `nbdist` in a terminal."""
        if self.place == TERMINAL:
            return f"nbdist {self.name}"
        return f"%%{self.name}" if self.is_cell else f"%{self.name}"

    @property
    def word(self) -> str:
        """Name of the verb in a terminal."""
        return self.name.removeprefix("dist_")

    def in_terminal(self) -> Verb:
        """The same verb with its help and messages as they are typed in a terminal."""
        typed = f"nbdist {self.word}"
        example = self.example.replace(self.typed, typed)
        return replace(self, name=self.word, example=example, place=TERMINAL)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A line that was understood.

    Attributes:
        answers: What to say about options of nbdistributed that were typed.
        wants_help: `--help` was typed; nothing else counts then.
    """

    values: argparse.Namespace
    answers: tuple[str, ...]
    wants_help: bool = False


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is an OptionError and nothing exits the kernel."""

    flags: tuple[str, ...] = ()

    def error(self, message: str) -> NoReturn:
        # Typed lines must not raise UsageError: nbval and Run All pass over it.
        # parse_intermixed_args keeps the usage as a template, in which % would mean something.
        usage = self.format_usage() if self.usage is None else f"usage: {self.usage}"
        unknown = re.match(r"unrecognized arguments: (?:(\d+)$|(--?[\w-]+))", message)
        number, flag = unknown.groups() if unknown else (None, None)
        hint = did_you_mean(flag, self.flags) if flag else ""
        if number and "-n" in self.flags:
            hint = f" Did you mean -n {number}?"
        raise OptionError(f"{self.prog}: {message}.{hint}\n{usage.strip()}")


def parse(verb: Verb, line: str) -> Parsed:
    """Read what was typed after a verb.

    Raises:
        OptionError: If it cannot be read; the message shows the usage.
    """
    parsed = _parse(verb, line)
    return replace(parsed, values=argparse.Namespace(**vars(parsed.values)))


@functools.lru_cache(maxsize=32)  # the same cell is run again and again
def _parse(verb: Verb, line: str) -> Parsed:
    code, rest = "", list[str]()
    if verb.takes_code:  # quotation marks behind the first `--` are Python's
        line, _, code = re.sub(r"(^|\s)--(\s|$)", "\0", line, count=1).partition("\0")
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise OptionError(f"{verb.typed}: {error} in {line!r}. Close the quotation.") from error
    if verb.takes_rest and "--" in words:
        at = words.index("--")
        words, rest = words[:at], words[at + 1 :]
    if "--help" in words or "-h" in words:
        return Parsed(argparse.Namespace(), (), wants_help=True)
    own_words, answers = _without_replaced(verb, words)
    # Intermixed: an argument may stand behind options as well as before them.
    values = _parser(verb).parse_intermixed_args(own_words)
    if verb.takes_rest or verb.takes_code:
        values.rest = code if verb.takes_code else rest
    return Parsed(values, tuple(answers))


def help_view(verb: Verb) -> View:
    """The verb's help with its example."""
    return View(f"{_parser(verb).format_help().rstrip()}\n\nexample: {verb.example}")


@functools.cache  # a third of a millisecond, and every cell that is typed has a verb
def _parser(verb: Verb) -> _Parser:
    parser = _Parser(
        prog=verb.typed,
        description=verb.help,
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, width=88),
    )
    for option in verb.options:
        named: dict[str, Any] = {"help": option.help}
        if option.kind is None:
            named |= {"action": "store_true", "dest": option.name}
        elif not option.is_argument:
            named |= {"type": option.kind, "default": option.default, "dest": option.name}
            if option.implied is not None:
                named |= {"nargs": "?", "const": option.implied}
        else:
            named |= {"nargs": "*", "type": option.kind}
        if option.kind is not None:
            named["metavar"] = option.metavar
        parser.add_argument(*option.flags, **named)
    options = (option for option in verb.options if not option.is_argument)
    parser.flags = tuple(flag for option in options for flag in option.flags)
    return parser


def _without_replaced(verb: Verb, words: list[str]) -> tuple[list[str], list[str]]:
    """The words without nbdistributed's options (and their values), and what to say of them."""
    own_words: list[str] = []
    answers: list[str] = []
    takes_value = False
    for word in words:
        flag, has_value, _ = word.partition("=")
        is_value = takes_value and not word.startswith("-")
        takes_value = flag in verb.replaced and not has_value
        if flag in verb.replaced:
            answers.append(f"{flag}: {verb.replaced[flag]}")
        elif not is_value:
            own_words.append(word)
    return own_words, answers


def strategy_options() -> tuple[Option, ...]:
    """The degrees and options of strategies as typed; which belong where, strategy.choice says."""
    degrees = [
        Option((f"--{word}",), help_text, rank_count, metavar="N")
        for word, help_text in DEGREES.items()
    ]
    short = [
        Option((f"--{word}",), f"{OPTIONS[name].help}: {value}", None)
        for word, (name, value) in SHORTHANDS.items()
    ]
    named = {name for name, _ in SHORTHANDS.values()}
    return (*degrees, *short, *(_typed(row) for row in OPTIONS.values() if row.name not in named))


def strategy_given(values: argparse.Namespace) -> dict[str, Any]:
    """Values typed for `strategy_options`, by name."""
    words = [*DEGREES, *SHORTHANDS, *(row.word for row in OPTIONS.values())]
    return {word: getattr(values, word) for word in words if hasattr(values, word)}


def _typed(row: OptionRow) -> Option:
    help_text = f"{row.help} (default: {row.default})" if row.default else row.help
    names = takers(row)
    if len(names) < len(ROWS) / 2:
        help_text = f"{listed(names)}: {help_text}"
    if row.kind == "switch":
        return Option((row.flag,), help_text, None, name=row.word)
    kind = positive_number if row.kind == "number" else str
    choices = "|".join(row.choices)
    metavar = {"choice": choices, "count": "K", "number": "MB"}.get(row.kind, "WHAT")
    return Option((row.flag,), help_text, kind, None, metavar, row.word, row.choices)
