"""The cell magics above a cell: which are ours, what they mean together, and what is run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from nbdist.commands import VERBS
from nbdist.core.failures import ranks_phrase
from nbdist.core.ranks import rank_label
from nbdist.errors import OptionError
from nbdist.notebook.notebook import NOTEBOOK, CellOptions

LOCAL_CELL = "local"
CELL_VERBS = tuple(name for name, verb in VERBS.items() if verb.is_cell)
# With a text below them, but not as one cell of the ranks.
CODE_VERBS = tuple(name for name, verb in VERBS.items() if verb.takes_code)
WITH_BODY = frozenset({*CELL_VERBS, *CODE_VERBS, LOCAL_CELL})
# IPython's magics that run what is below them as a cell: ours may stand there too.
_RUNS_A_CELL = frozenset({"time", "timeit", "capture", "prun"})
# Magics of which a cell takes one, and why.
_ONE_OF = (
    ({"distributed", "rank", LOCAL_CELL}, "say where the cell runs. Remove one of them."),
    ({"dist_profile", "dist_memory"}, "need torch's one profiler. Run the cell once under each."),
)

# `%%rank[0,1]` is written without a space in nbdistributed, which IPython takes for a name.
GLUED_RANKS = re.compile(r"^%%rank\[")
_MAGIC = re.compile(r"^(%%?)(\w+)(.*)$", re.DOTALL)

# A magic as typed: its name, and what is behind it.
TypedMagic = tuple[str, str]


@dataclass(frozen=True, slots=True)
class MagicCell:
    """A cell below cell magics, of which one at least is ours.

    Attributes:
        magics: Ours, from the top.
        is_outermost: Whether the topmost of all is one of ours.
        start: Where the lines below the magics begin, in characters.
        code: What the ranks get, empty where nothing is below: IPython's magics that stood between
            ours, and the lines below. Ours are comments in it, so that line numbers stay right; a
            code that begins with a cell magic has to begin with it, and its line numbers are
            relative in IPython anyway.
    """

    magics: tuple[TypedMagic, ...]
    is_outermost: bool
    start: int
    code: str

    @property
    def taker(self) -> TypedMagic | None:
        """The magic that runs the lines below in its own way (%%dist_verify); None without."""
        return next((magic for magic in self.magics if magic[0] in CODE_VERBS), None)


def read(lines: Sequence[str]) -> MagicCell | None:
    """The magics above a cell and its code; None without one of ours.

    Raises:
        OptionError: If they have no meaning together.
    """
    magics, others, end, is_outermost = list[TypedMagic](), list[str](), 0, False
    while (number := first_code_line(lines, end)) is not None:
        percents, name, rest = split_magic(lines[number])
        if percents == "%%" and name in WITH_BODY:
            is_outermost = is_outermost or not others
            magics.append((name, rest.strip()))
        # What %%time runs in the notebook, below %%local, is again a cell of any kind.
        elif percents == "%%" and name in _RUNS_A_CELL and (LOCAL_CELL, "") not in magics:
            others.append(lines[number])
        else:
            break
        end = number + 1
    if not magics:
        return None
    _check(magics)
    code = "".join([*others, *lines[end:]])
    if not code.lstrip().startswith("%%"):
        code = _commented(lines[:end]) + code if code.strip() else ""
    return MagicCell(tuple(magics), is_outermost, sum(map(len, lines[:end])), code)


def combined(given: Sequence[CellOptions]) -> CellOptions:
    """Combine the options of all magics above a cell.

    Raises:
        OptionError: If one is given twice, or a rank is to be recorded that does not run the cell.
    """
    values: dict[str, Any] = {}
    default = CellOptions()
    for options in given:
        for name in (field.name for field in fields(CellOptions)):
            value = getattr(options, name)
            if value == getattr(default, name):
                continue
            if values.get(name, value) != value:
                raise OptionError("--timeout is given twice above this cell. Remove one of them.")
            values[name] = value
    return _recorded_where_it_runs(CellOptions(**values))


def first_code_line(lines: Sequence[str], start: int = 0) -> int | None:
    """The first line from `start` on that is neither blank nor a comment; None without one."""
    texts = ((number, lines[number].strip()) for number in range(start, len(lines)))
    return next((number for number, text in texts if text and not text.startswith("#")), None)


def split_magic(line: str) -> tuple[str, str, str]:
    """The percent signs, the name and the rest of a line with a magic; empty for another line."""
    magic = _MAGIC.match(GLUED_RANKS.sub("%%rank [", line))
    return (magic[1], magic[2], magic[3]) if magic else ("", "", "")


def _check(magics: Sequence[TypedMagic]) -> None:
    """Refuse magics that have no meaning together, and an option of %%local, which has none."""
    names = [name for name, _ in magics]
    for kind, why in _ONE_OF:
        if len(typed := [f"%%{name}" for name in names if name in kind]) > 1:
            raise OptionError(f"{' and '.join(typed)} stand above one cell, and both {why}")
    takers = [magic for magic in magics if magic[0] in CODE_VERBS]
    for name, line in magics:
        # %%distributed alone says what is so anyway.
        if takers and (name, line) not in {takers[0], ("distributed", "")}:
            raise OptionError(
                f"%%{takers[0][0]} runs the cell on all ranks in its own way, so %%{name} cannot "
                "stand above or below it. Remove one of them."
            )
        if name == LOCAL_CELL and len(magics) > 1:
            other = next(other for other in names if other != LOCAL_CELL)
            raise OptionError(
                f"%%local runs the cell in the notebook, and %%{other} is for cells on ranks. "
                "Remove one of them."
            )


def _recorded_where_it_runs(options: CellOptions) -> CellOptions:
    """Only ranks that get the cell record it."""
    record = options.record
    if record is None or options.ranks is None:
        return options
    ranks = NOTEBOOK.session.chosen(options.ranks)
    recorded = ranks if record.ranks is None else NOTEBOOK.session.chosen(record.ranks)
    if outside := set(recorded) - set(ranks):
        raise OptionError(
            f"--ranks {record.ranks}: the cell runs on {ranks_phrase(ranks)}, and nothing "
            f"is recorded on {ranks_phrase(sorted(outside))}. Choose ranks that run it."
        )
    return replace(options, record=replace(record, ranks=rank_label(recorded)))


def _commented(lines: Sequence[str]) -> str:
    return "".join(line if line.startswith("#") else f"# {line}" for line in lines)
