"""The verb for configurations of others: the strategy as one, and what is wrong with a file."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbdist.config import check, yaml_reader
from nbdist.config import view as config_view
from nbdist.config.emit import FORMS, SCRIPT, Setting
from nbdist.config.launch import Configured, configured
from nbdist.config.report import TYPED, CheckContext
from nbdist.config.strategy_file import FileStrategy, read_strategy
from nbdist.config.tree import Document
from nbdist.core.option import Option, positive_number, rank_count
from nbdist.core.view import View
from nbdist.errors import OptionError, no_such
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.verb import ANYWHERE, Verb, strategy_given
from nbdist.notebook.verb import strategy_options as typed_options
from nbdist.strategy.choose import StrategySpec
from nbdist.strategy.options import read as read_options
from nbdist.strategy.table import ROWS
from nbdist.switch import view as strategy_view

# As typed -> as torch calls it.
DEVICES = {"gpu": "cuda", "cpu": "cpu"}
# How a file's name says which form it has.
_SUFFIXES = {
    ".yaml": "accelerate",
    ".yml": "accelerate",
    ".json": "deepspeed",
    ".sbatch": "sbatch",
    ".slurm": "sbatch",
}
# Where a configuration names another file that counts together with it.
_NAMES_OTHERS = (
    ("deepspeed_config", "deepspeed_config_file"),
    ("train", "deepspeed", "config_path"),
)


def _configure(values: Namespace) -> Configured:
    """The strategy that was typed, or the one that counts on the ranks, as configurations."""
    spec = StrategySpec.parse(values.strategy, strategy_given(values))
    ranks = values.ranks
    device = device_type(values.device)
    if spec is None:
        if ranks is not None:
            raise OptionError("Name the strategy as well: --strategy ddp, for example.")
        if not NOTEBOOK.is_running:
            raise OptionError(
                "No ranks run here, so there is no strategy to show. Name a file to check, or a "
                "strategy: --strategy ddp --ranks 8."
            )
        return NOTEBOOK.session.config(
            values.nodes, device=device, script=values.script, clip=values.clip
        )
    if ranks is None:
        if not NOTEBOOK.is_running:
            raise OptionError("No ranks run here, so say how many there will be: --ranks 8.")
        ranks = NOTEBOOK.session.topology.world_size
    here = NOTEBOOK.session.topology.ranks[0].device if NOTEBOOK.is_running else "cuda"
    hosts, device = values.nodes or 1, device or here.split(":")[0]
    choice = spec.choose(ranks)
    return configured(Setting(choice, hosts, device, clip=values.clip, script=values.script))


def device_type(typed: str | None) -> str:
    """Translate --device to torch's device type; "" without the option."""
    if typed is not None and typed not in DEVICES:
        raise no_such("--device", typed, DEVICES)
    return "" if typed is None else DEVICES[typed]


def _show(values: Namespace) -> View:
    """All forms of a strategy, or what was written of one."""
    config = _configure(values)
    if values.write is None:
        return config_view.configured(config)
    wanted = _form(values.form, Path(values.write))
    if wanted not in config.texts:
        raise OptionError(f"There is no {wanted} form of this strategy: {config.refused[wanted]}")
    write_file(Path(values.write).expanduser(), config.texts[wanted], is_forced=values.is_forced)
    return config_view.written(config, wanted, values.write)


def _form(form: str | None, path: Path) -> str:
    word = form or _SUFFIXES.get(path.suffix.lower())
    if word in FORMS:
        return str(word)
    if form is not None:
        raise no_such("--as", form, FORMS)
    raise OptionError(
        f"The name {path.name} does not say which form the file has (.yaml, .json and .sbatch do). "
        f"Add --as with one of {', '.join(FORMS)}."
    )


def check_file(
    path: str | Path,
    around: CheckContext,
    beside: Sequence[str | Path] = (),
    write: str | Path | None = None,
    *,
    is_forced: bool = False,
) -> config_view.CheckView:
    """Check a file, and write it corrected.

    Args:
        path: It.
        around: What was typed of ranks and degrees.
        beside: Files that count together with it; those that it names itself are found.
        write: Where to write it corrected; None for nowhere.
        is_forced: Replace that file if it exists.

    Raises:
        OptionError: A file cannot be read or written.
    """
    document = yaml_reader.load(path)
    others = [yaml_reader.load(other) for other in beside]
    around = _complete(around, (*others, *_read_others(document, path)))
    before = check.check(document, around)
    if write is None:
        return config_view.checked(before)

    def read(text: str) -> Document:
        return yaml_reader.read(document.name, text, document.syntax)

    after, changes = check.corrected(before, around, read)
    write_file(Path(write).expanduser(), after.document.text, is_forced=is_forced)
    return config_view.corrected(before, after, changes, str(write))


def _complete(around: CheckContext, others: tuple[Document, ...]) -> CheckContext:
    """With the ranks that run here, and their degrees, where none are typed."""
    ranks, source = around.ranks, TYPED
    degrees = {"tp": around.tp, "pp": around.pp, "cp": around.cp, "dp": around.dp}
    if ranks is None and NOTEBOOK.is_running:
        ranks, source = NOTEBOOK.session.topology.world_size, "as run here"
        last = NOTEBOOK.session.strategy_chosen
        if last is not None and not any(degrees.values()):
            degrees |= {axis: getattr(last.degrees, axis) for axis in ("tp", "pp", "cp")}
    return CheckContext(ranks, source if ranks is not None else "", others=others, **degrees)


def _read_others(document: Document, path: str | Path) -> list[Document]:
    """Configurations that a file names, where they are: beside it, or where this runs."""
    documents = []
    for place in _NAMES_OTHERS:
        name = document.value(*place)
        if not isinstance(name, str) or not name:
            continue
        named = Path(name).expanduser()
        choices = [Path(path).expanduser().parent / named, named]
        other = next((path for path in choices if path.is_file()), None)
        if other is not None:
            documents.append(yaml_reader.load(other))
    return documents


def check_target(path: Path, *, is_forced: bool) -> None:
    """Refuse a file that cannot be written, or that would be replaced without `is_forced`."""
    if not path.parent.is_dir():
        raise OptionError(f"There is no folder {path.parent.absolute()} for {path.name}. Make it.")
    if path.is_dir():
        raise OptionError(f"{path} is a folder. Name a file in it.")
    if path.exists() and not is_forced:
        raise OptionError(f"{path} exists. --force replaces it; or name another file.")


def check_form(path: Path, form: str) -> None:
    """Refuse a file whose name says another form, or none."""
    endings = [ending for ending, word in _SUFFIXES.items() if word == form]
    if path.suffix.lower() not in endings:
        raise OptionError(
            f"{path} is no name for the {form} form. Use one that ends with {' or '.join(endings)}."
        )


def write_file(path: Path, text: str, *, is_forced: bool) -> None:
    """Write a text, whole or not at all.

    Raises:
        OptionError: It cannot be written, or exists and must not be replaced.
    """
    check_target(path, is_forced=is_forced)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OptionError(f"{path} cannot be written ({error.strerror}).") from error


def around_of(ranks: int | None, options: Mapping[str, object]) -> CheckContext:
    """Ranks and degrees as typed.

    Raises:
        OptionError: If something else of a strategy was typed: a file says that itself.
    """
    degrees, others = read_options(options)
    extra = [*others, *(["replicas"] if "replicas" in degrees else [])]
    if extra:
        raise OptionError(
            f"{extra[0]} is read from the file. With a file, only --ranks and the degrees "
            "--tp, --pp, --cp and --dp can be typed."
        )
    typed: dict[str, Any] = dict(degrees)
    return CheckContext(ranks, **typed)


def dist_config(values: Namespace) -> View:
    """Show or write the strategy as configurations; with a file, check or apply that."""
    _refuse_words(values)
    if not values.file:
        return _show(values)
    if values.is_applied:
        return _apply(values)
    beside = [] if values.beside is None else [values.beside]
    around = around_of(values.ranks, strategy_given(values))
    return check_file(values.file[0], around, beside, values.write, is_forced=values.is_forced)


def _refuse_words(values: Namespace) -> None:
    """Refuse options that have no meaning with a file, or without one."""
    if len(values.file) > 1:
        raise OptionError(
            "%dist_config: name one file to check; --with names another that goes with it."
        )
    if not values.file and (values.beside is not None or values.is_applied):
        word = "apply" if values.is_applied else "with"
        raise OptionError(f"%dist_config: --{word} needs a file. Name it.")
    flags = {"form": "as", "nodes": "nodes", "device": "device", "strategy": "strategy"}
    for name, word in flags.items() if values.file else ():
        if getattr(values, name) is not None:
            raise OptionError(
                f"%dist_config: --{word} cannot be used with a file: it is about the ranks."
            )
    given = [values.write, values.ranks, *strategy_given(values).values()]
    if values.is_applied and any(given):
        raise OptionError("%dist_config: --apply takes the file as it is, for these ranks.")


def _apply(values: Namespace) -> View:
    """Put the file's strategy under the live models."""
    session, strategy = NOTEBOOK.session, applied(values)
    switched = strategy_view.switch_result(session.strategy.switch_spec(strategy.spec))
    return View("\n".join([switched.text, *config_view.left_lines(strategy)]))


def applied(values: Namespace) -> FileStrategy:
    """Read the strategy of the file that is to be applied.

    Raises:
        OptionError: If it cannot be read, or has a mistake or no strategy.
    """
    path = values.file[0]
    document = yaml_reader.load(path)
    beside = [] if values.beside is None else [yaml_reader.load(values.beside)]
    named = (*beside, *_read_others(document, path))
    # For as many ranks as the file says, not for the running ones.
    report = check.check(document, CheckContext(None, others=named))
    if report.is_bad:
        raise OptionError(f"Nothing was changed.\n{config_view.checked(report).text}")
    return read_strategy(document, named)


VERBS = (
    Verb(
        "dist_config",
        "Check a configuration of Accelerate or DeepSpeed, apply it, or show the strategy as one.",
        "%dist_config ds_config.json --ranks 8 --write corrected.json",
        dist_config,
        (
            Option(
                ("file",), "the YAML or JSON to check (default: show the strategy)", metavar="FILE"
            ),
            Option(
                ("--write",),
                "write the corrected file, or the strategy in one form",
                metavar="FILE",
            ),
            Option(
                ("--as",),
                f"the form to write, one of {', '.join(FORMS)} (default: by the file's name)",
                metavar="FORM",
                name="form",
                choices=FORMS,
            ),
            Option(("--force",), "replace the file if it exists", None, name="is_forced"),
            Option(
                ("--apply",),
                "put the file's strategy under the live models",
                None,
                name="is_applied",
            ),
            Option(
                ("--with",),
                "another file that goes with the one to check",
                metavar="FILE",
                name="beside",
            ),
            Option(
                ("--ranks", "-n"),
                "number of ranks (default: those running, or as in the file)",
                rank_count,
                metavar="N",
            ),
            Option(
                ("--nodes",), "hosts of the ranks (default: those running)", rank_count, metavar="N"
            ),
            Option(
                ("--device",),
                f"what its ranks run on, {' or '.join(DEVICES)} (default: as the ranks here)",
                metavar="DEVICE",
                choices=tuple(DEVICES),
            ),
            Option(
                ("--strategy",),
                "strategy to show (default: the one of the ranks)",
                metavar="NAME",
                choices=tuple(ROWS),
            ),
            Option(
                ("--script",), f"script to start (default: {SCRIPT})", default=SCRIPT, metavar="PY"
            ),
            Option(
                ("--clip",),
                "norm that the loop clips gradients to, for DeepSpeed (default: none)",
                positive_number,
                0.0,
                "NORM",
            ),
            *typed_options(),
        ),
        place=ANYWHERE,
    ),
)
