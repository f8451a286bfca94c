"""The verb that makes a script of the notebook, and what it knows of the other verbs."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from IPython import get_ipython
from IPython.core.inputtransformer2 import TransformerManager

from nbdist.commands import cells, checkpoint, config
from nbdist.config import kernel as config_kernel
from nbdist.config.emit import ACCELERATE, SBATCH
from nbdist.config.launch import configured
from nbdist.core.option import Option, of_values, option, options_of, rank_count, switch
from nbdist.core.view import View
from nbdist.errors import OptionError, RankBusy, RankGone
from nbdist.exporter import export
from nbdist.exporter import kernel as exporter_kernel
from nbdist.exporter import view as export_view
from nbdist.exporter.export import ExportedScript, Magic, NotebookCell, Reader, Target
from nbdist.exporter.script import RankCall
from nbdist.notebook.notebook import LOCAL, NOTEBOOK
from nbdist.notebook.verb import ANYWHERE, Verb, parse, strategy_given
from nbdist.strategy.choice import Strategy, described
from nbdist.strategy.choose import StrategySpec, default_choice

HISTORY = "history"
# The verbs of a notebook by name: commands/__init__.py, which has them all, sets them.
magics: Mapping[str, Verb] = {}


@dataclass(frozen=True, slots=True)
class _Origin:
    """The source of cells; its name is for the script's first line and the note.

    Attributes:
        hosts: Where each of the ranks runs that these cells have started; empty without.
    """

    cells: list[NotebookCell]
    name: str
    notes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The script to write, and its ranks; None for options that were not given."""

    script: str | Path
    source: str | Path | None = option(
        "the notebook's file, or history for the cells that ran here (default: this notebook's "
        "file, if known)",
        "NOTEBOOK.ipynb",
        flags=("--from",),
    )
    slurm: str | Path | None = option(
        "also write a batch script for Slurm that starts it", "FILE.sbatch"
    )
    accelerate: str | Path | None = option(
        "also write a configuration with which accelerate launch starts it", "FILE.yaml"
    )
    ranks: int | None = option(
        "number of ranks to start (default: as in the notebook)", "N", rank_count,
        flags=("--ranks", "-n"),
    )  # fmt: skip
    nodes: int | None = option("hosts of the ranks (default: as in the notebook)", "N", rank_count)
    device: str | None = option(
        f"what the ranks run on, {' or '.join(config.DEVICES)} (default: as the ranks here; gpu "
        "without ranks)",
        "DEVICE",
        choices=config.DEVICES,
    )
    is_forced: bool = switch("replace files that exist", "--force")

    @property
    def launchers(self) -> dict[str, Path]:
        """Form (of config.emit) -> the file of what starts the script."""
        typed = {SBATCH: self.slurm, ACCELERATE: self.accelerate}
        return {form: Path(path).expanduser() for form, path in typed.items() if path is not None}


def write_script(request: ExportRequest) -> View:
    """Write a notebook's distributed cells as a script; see nbdist.export.

    Raises:
        OptionError: If a file cannot be read or written, or no cell can be taken; nothing is
            written then.
    """
    path, is_forced = Path(request.script).expanduser(), request.is_forced
    if path.suffix != ".py":
        raise OptionError(f"{path} is not a script name. Use one that ends with .py.")
    for form, launcher in request.launchers.items():
        config.check_form(launcher, form)
    for file in (path, *request.launchers.values()):
        config.check_target(file, is_forced=is_forced)
    origin = _origin(request.source)
    target = _target(origin, request)
    try:
        # A transformer of its own for each cell: the shell's sends cells to the ranks.
        reader = Reader(lambda cell: TransformerManager().transform_cell(cell), meaning)
        exported = export.export(origin.cells, origin.name, reader, target)
    except OptionError as error:
        raise OptionError("\n  ".join([str(error), *origin.notes])) from error
    texts = _launchers(path, request, exported)
    for file, text in {path: exported.text, **texts}.items():
        config.write_file(file, text, is_forced=is_forced)
    notes = (*origin.notes, *_other_strategy(origin, exported))
    return export_view.script_view(path, origin.name, notes, exported, request.launchers)


def _other_strategy(origin: _Origin, exported: ExportedScript) -> list[str]:
    """Word a note if the ranks' strategy is not the one of the cells."""
    now = NOTEBOOK.session.strategy_chosen if origin.hosts else None
    if now is None or now == (last := exported.last or default_choice(now.world_size)):
        return []
    ends = f"the script ends under {described(last)}, as the cells do"
    return [f"the ranks train under {described(now)} now; {ends}"]


def _target(origin: _Origin, request: ExportRequest) -> Target:
    """Choose where the script is to run: as given, else as the ranks of this notebook do."""
    here = NOTEBOOK.session.topology.ranks[0].device if NOTEBOOK.is_running else "cuda"
    device = config.device_type(request.device) or here.split(":")[0]
    blocks: tuple[str, ...] = ()
    if NOTEBOOK.is_running and origin.hosts and device != "cpu":
        # Of busy ranks they are not known, which the configuration says.
        with contextlib.suppress(RankBusy, RankGone):
            blocks = config_kernel.blocks(NOTEBOOK.session)
    return Target(origin.hosts, request.ranks, request.nodes, device, blocks)


def _launchers(path: Path, request: ExportRequest, exported: ExportedScript) -> dict[Path, str]:
    """The texts of what starts the script, by file.

    Raises:
        OptionError: There is none for this script, or for these ranks.
    """
    if not request.launchers:
        return {}
    if request.accelerate is not None and exported.needs:
        raise OptionError(
            f"There is no {request.accelerate} for this script, which needs nbdist: "
            f"{exported.needs[0]}. torchrun starts it: leave --accelerate out. --slurm FILE writes "
            "a batch script. Nothing was written."
        )
    setting = replace(exported.setting, script=str(path))
    job = configured(setting).texts
    config_of = configured(replace(setting, is_in_script=False)).texts
    texts = {SBATCH: job[SBATCH], ACCELERATE: config_of.get(ACCELERATE, "")}
    return {file: texts[form] for form, file in request.launchers.items()}


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
    """Translate a magic for a script; None for one that is not nbdist's."""
    if name not in magics:
        return None
    verb = magics[name]
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
        spec=spec,
    )


def _of_reset(values: Namespace) -> Magic:
    start = _of_start(values)
    note = "%dist_reset restarts the ranks; the script keeps its variables"
    return replace(start, world_size=None, seed=None, note=note)


def _of_strategy(values: Namespace) -> Magic:
    name = values.named[0] if values.named else None
    spec = StrategySpec.parse(name, strategy_given(values))
    return Magic(choice=_choice(spec, None), spec=spec)


def _of_config(values: Namespace) -> Magic:
    """A file that is applied is a strategy: a script has it as it is in the file now."""
    if not values.is_applied or len(values.file) != 1:
        return Magic()
    _literal("%dist_config", values.file)
    spec = config.applied(values).spec
    return Magic(choice=_choice(spec, None), spec=spec)


def _of_save(values: Namespace) -> Magic:
    path = _literal("%dist_save", values.path)
    if values.is_export:
        options = {
            "model": values.model, "is_merged": values.is_merged, "adapter": values.adapter
        }  # fmt: skip
        typed = tuple((word, value) for word, value in options.items() if value)
        return Magic(call=RankCall("export_weights", path, typed))
    flags = {"asynchronous": values.is_async, "adapters_only": values.is_adapters}
    typed = tuple((word, True) for word, is_given in flags.items() if is_given)
    return Magic(call=RankCall("save", path, typed))


def _of_load(values: Namespace) -> Magic:
    part = (("models_only", True),) if values.is_models_only else ()
    return Magic(call=RankCall("load", _literal("%dist_load", values.path), part))


def _literal(verb: str, words: list[str]) -> str:
    """A path as typed.

    Raises:
        OptionError: The notebook's own variables are in it.
    """
    path = checkpoint.path_of(verb, words)
    if "{" in path or "$" in path:
        raise OptionError(
            f"{path} has variables of the notebook in it, which a script does not have, so it is "
            "left out. Write the path itself"
        )
    return path


def _choice(spec: StrategySpec | None, world_size: int | None) -> Strategy | None:
    """The strategy for as many ranks as were typed, or run here, or as it takes."""
    if spec is None:
        return None
    if NOTEBOOK.is_running and world_size is None:
        with contextlib.suppress(OptionError):
            return spec.on(NOTEBOOK.session.topology)
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
    "dist_config": _of_config,
    "dist_save": _of_save,
    "dist_load": _of_load,
    "dist_mode": _of_mode,
    "dist_shutdown": lambda _values: Magic(mode=LOCAL),
    "dist_detach": lambda _values: Magic(mode=LOCAL),
}


def dist_export(values: Namespace) -> View:
    """Write the distributed cells as a script."""
    if len(values.script) != 1:
        raise OptionError("%dist_export: name one file, for example %dist_export train.py.")
    return write_script(of_values(ExportRequest, values, script=values.script[0]))


VERBS = (
    Verb(
        "dist_export",
        "Write the notebook's distributed cells as one script for torchrun.",
        "%dist_export train.py --slurm train.sbatch --nodes 2",
        dist_export,
        (
            Option(("script",), "the script to write, such as train.py", metavar="FILE.py"),
            *options_of(ExportRequest),
        ),
        place=ANYWHERE,
    ),
)
