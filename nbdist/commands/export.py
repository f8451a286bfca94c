"""The verb that makes a script of the notebook, and what it knows of the other verbs."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from IPython import get_ipython
from IPython.core.inputtransformer2 import TransformerManager

from nbdist.commands import cells, check, cluster, compare, config, memory, strategy, trace
from nbdist.core.view import View
from nbdist.errors import OptionError
from nbdist.exporter import export
from nbdist.exporter import kernel as exporter_kernel
from nbdist.exporter import view as export_view
from nbdist.exporter.export import Magic, NotebookCell, Reader
from nbdist.notebook.notebook import LOCAL, NOTEBOOK
from nbdist.notebook.verb import ANYWHERE, Option, Verb, parse, strategy_given
from nbdist.strategy import choice as strategies
from nbdist.strategy.choose import StrategySpec

HISTORY = "history"


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where cells were read; its name is for the script's first line and the note.

    Attributes:
        hosts: Where each of the ranks runs that these cells have started; empty without.
    """

    cells: list[NotebookCell]
    name: str
    notes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


def write_script(script: str | Path, source: str | Path | None, *, is_forced: bool) -> View:
    """Write a notebook's distributed cells as a script; see nbdist.export.

    Raises:
        OptionError: If a file cannot be read or written, or no cell can be taken.
    """
    path = Path(script).expanduser()
    if path.suffix != ".py":
        raise OptionError(f"{path} is not a script name. Use one that ends with .py.")
    config.check_target(path, is_forced=is_forced)
    origin = _origin(source)
    try:
        # A transformer of its own for each cell: the shell's sends cells to the ranks.
        reader = Reader(lambda cell: TransformerManager().transform_cell(cell), meaning)
        exported = export.export(origin.cells, origin.name, reader, origin.hosts)
    except OptionError as error:
        raise OptionError("\n  ".join([str(error), *origin.notes])) from error
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(exported.text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OptionError(f"{path} cannot be written: {error}") from error
    return export_view.script_view(path, origin.name, origin.notes, exported)


def _origin(source: str | Path | None) -> _Origin:
    """The cells of the file that is named, else of this notebook's file, else the history."""
    history = _history()
    if source is not None and str(source) != HISTORY:
        path = Path(source).expanduser()
        return _Origin(exporter_kernel.read(path), path.name)
    shell: Any = get_ipython()
    variables = {} if shell is None else shell.user_ns
    notebook = exporter_kernel.notebook_path(variables, os.environ) if source is None else None
    if notebook is not None:
        return _from_own_file(notebook, history)
    if not history:
        raise OptionError("No cell has run here. Name a notebook: --from NOTEBOOK.ipynb.")
    note = "this notebook's file is not known; name it with --from NOTEBOOK.ipynb"
    return _Origin(history, _RAN, () if source else (note,), _hosts())


def _hosts() -> tuple[str, ...]:
    running = NOTEBOOK.session.topology.ranks if NOTEBOOK.is_running else ()
    return tuple(place.host for place in running)


_RAN = "what ran in this kernel"


def _from_own_file(path: Path, history: list[NotebookCell]) -> _Origin:
    """The notebook's own file, unless none of its cells is among those that ran here."""
    in_file = exporter_kernel.read(path)
    saved = {cell.text.strip() for cell in in_file if cell.is_code}
    ran = {cell.text.strip() for cell in history if not cell.text.startswith("%load_ext")}
    if ran and not ran & saved:
        return _Origin(
            history, _RAN, (f"{path} was ignored: none of its cells ran here",), _hosts()
        )
    notes = [f"read from {path} as last saved"]
    if ran - saved:
        notes.append(
            f"{len(ran - saved)} that ran here are not in the file: older versions, or not saved "
            "yet (then save and export again; --from history takes what ran)"
        )
    return _Origin(in_file, path.name, tuple(notes), _hosts())


def _history() -> list[NotebookCell]:
    """The cells that ran in this kernel, in the order in which each text ran first."""
    shell: Any = get_ipython()
    manager = getattr(shell, "history_manager", None)
    if manager is None:
        return []
    # Up to the cell that exports; that one is not there yet where cells run without history.
    typed = list(manager.input_hist_raw)[1 : NOTEBOOK.cell_number or -1]
    failed = set(getattr(manager, "exceptions", {}))  # from IPython 9 on
    worked = Counter(text for number, text in enumerate(typed, 1) if number not in failed)
    read: list[NotebookCell] = []
    repeated: set[str] = set()
    for number, text in enumerate(typed, 1):
        problem = "failed" if not worked[text] else "repeated" if text in repeated else ""
        repeated.add(text)
        read.append(NotebookCell(number, text, problem=problem))
    return read


def meaning(name: str, line: str) -> Magic | None:
    """What a magic means for a script; None for one that is not nbdist's."""
    if name not in _TABLE:
        return None
    verb = _TABLE[name]
    try:
        parsed = parse(verb, line)
        read = _MEANINGS.get(name)
        return Magic() if read is None or parsed.wants_help else read(parsed.values)
    except OptionError as error:
        if verb.as_line is not None:
            with contextlib.suppress(OptionError):
                parse(verb.as_line, line)
                return Magic()
        return Magic(problem=f"{verb.typed} {line}: {str(error).partition(chr(10))[0]}")


def _of_cell(values: Namespace) -> Magic:
    options = cells.cell_options(values)
    return Magic(ranks=options.ranks or "all", timeout_s=options.timeout_s)


def _of_start(values: Namespace) -> Magic:
    spec = StrategySpec.parse(values.strategy, strategy_given(values))
    return Magic(
        mode="all" if values.auto else None,
        world_size=values.world_size,
        seed=values.seed,
        choice=_choice(spec, values.world_size),
    )


def _of_reset(values: Namespace) -> Magic:
    start = _of_start(values)
    note = "%dist_reset restarts the ranks; the script keeps its variables"
    return Magic(mode=start.mode, choice=start.choice, note=note)


def _of_strategy(values: Namespace) -> Magic:
    name = values.named[0] if values.named else None
    return Magic(choice=_choice(StrategySpec.parse(name, strategy_given(values)), None))


def _choice(spec: StrategySpec | None, world_size: int | None) -> strategies.Strategy | None:
    """The strategy for as many ranks as were typed, or run here, or as it takes."""
    if spec is None:
        return None
    sizes = [world_size] if world_size else [len(_hosts()) or 2, 2, 4, 8, 16, 1]
    for size in sizes[:-1]:
        try:
            return spec.choose(size)
        except OptionError:
            continue
    return spec.choose(sizes[-1])


def _of_mode(values: Namespace) -> Magic:
    words = [*values.where, *(["all"] if values.is_on else []), *([LOCAL] if values.is_off else [])]
    return Magic(mode=" ".join(words) or None)


_MEANINGS: dict[str, Callable[[Namespace], Magic]] = {
    "distributed": _of_cell,
    "rank": _of_cell,
    "dist_profile": lambda values: Magic(ranks="all", timeout_s=values.timeout_s),
    "dist_memory": lambda values: Magic(ranks="all", timeout_s=values.timeout_s),
    "dist_init": _of_start,
    "dist_reset": _of_reset,
    "dist_strategy": _of_strategy,
    "dist_mode": _of_mode,
    "dist_shutdown": lambda _values: Magic(mode=LOCAL),
}


def dist_export(values: Namespace) -> View:
    """Write the distributed cells as a script."""
    if len(values.script) != 1:
        raise OptionError("%dist_export: name one file, for example %dist_export train.py.")
    return write_script(values.script[0], values.source, is_forced=values.is_forced)


VERBS = (
    Verb(
        "dist_export",
        "Write the notebook's distributed cells as one script for torchrun.",
        "%dist_export train.py",
        dist_export,
        (
            Option(("script",), "the script to write, such as train.py", metavar="FILE.py"),
            Option(
                ("--from",),
                "the notebook's file, or history for the cells that ran here (default: this "
                "notebook's file, if known)",
                metavar="NOTEBOOK.ipynb",
                name="source",
            ),
            Option(("--force",), "replace the file if it exists", None, name="is_forced"),
        ),
        place=ANYWHERE,
    ),
)
_SUBJECTS = (cluster, strategy, cells, trace, memory, compare, check)
_TABLE = {verb.name: verb for subject in _SUBJECTS for verb in subject.VERBS}
_TABLE |= {verb.name: verb for verb in VERBS}
