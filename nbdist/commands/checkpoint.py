"""Verbs that save and load checkpoints of what is prepared on the ranks."""

from __future__ import annotations

import socket
from argparse import Namespace

from nbdist.checkpoint import view as checkpoint_view
from nbdist.core.option import Option
from nbdist.errors import OptionError
from nbdist.notebook.notebook import NOTEBOOK, show
from nbdist.notebook.verb import Verb
from nbdist.strategy.options import listed


def dist_save(values: Namespace) -> None:
    """Save a checkpoint, or a model's weights alone; its line of progress becomes the result."""
    path = path_of("%dist_save", values.path)
    if values.is_export:
        if values.is_async or values.is_adapters:
            typed = "--async" if values.is_async else "--adapters"
            raise OptionError(
                f"%dist_save: --export and {typed} cannot be combined; leave one out."
            )
        exported = NOTEBOOK.session.export_weights(
            path, values.model, is_merged=values.is_merged, adapter=values.adapter
        )
        writer = NOTEBOOK.session.topology.ranks[0].host
        host = "" if writer == socket.gethostname() else writer
        show(checkpoint_view.exported_view(exported, host))
        return
    flags = {"--model": values.model, "--merged": values.is_merged, "--adapter": values.adapter}
    if typed := next((flag for flag, value in flags.items() if value), ""):
        raise OptionError(
            f"%dist_save: {typed} is for --export; a checkpoint holds every model that is "
            "prepared. Leave it out."
        )
    checkpoints = NOTEBOOK.session.checkpoints
    done = checkpoints.save(path, asynchronous=values.is_async, adapters_only=values.is_adapters)
    show(checkpoint_view.saved_view(done, checkpoints.earlier_messages()))


def dist_load(values: Namespace) -> None:
    """Load a checkpoint; its line of progress becomes the result."""
    path = path_of("%dist_load", values.path)
    checkpoints = NOTEBOOK.session.checkpoints
    loaded = checkpoints.load(path, models_only=values.is_models_only)
    show(checkpoint_view.loaded_view(loaded, checkpoints.earlier_messages()))


def path_of(typed: str, words: list[str]) -> str:
    """The one path that was typed.

    Raises:
        OptionError: None was, or several were.
    """
    if not words:
        raise OptionError(f"{typed}: which folder? {typed} checkpoints/step100")
    if len(words) > 1:
        raise OptionError(
            f"{typed} takes one path, not {listed(words)}. Put a path with spaces into quotation "
            "marks. All ranks take part; ranks cannot be chosen."
        )
    return words[0]


VERBS = (
    Verb(
        "dist_save",
        "Save models, optimizers and training state as a checkpoint for any number of ranks.",
        "%dist_save checkpoints/step100",
        dist_save,
        (
            Option(
                ("path",), "the folder; an existing checkpoint in it is replaced", metavar="PATH"
            ),
            Option(
                ("--async",),
                "return once all is copied to memory; writing goes on in the background",
                None,
                name="is_async",
            ),
            Option(
                ("--adapters",),
                "of models save the adapters of PEFT alone, with their training state",
                None,
                name="is_adapters",
            ),
            Option(
                ("--export",),
                "write only a model's weights, as a safetensors file that transformers loads; of a "
                "PEFT model its adapter, as PEFT loads it",
                None,
                name="is_export",
            ),
            Option(
                ("--merged",),
                "with --export: merge the PEFT adapter into the weights of its base model",
                None,
                name="is_merged",
            ),
            Option(
                ("--adapter",),
                "with --export: the PEFT adapter that is meant (default: the active one)",
                default="",
                metavar="NAME",
            ),
            Option(
                ("--model",),
                "variable of the model to export (default: the only model)",
                default="",
                metavar="NAME",
            ),
        ),
    ),
    Verb(
        "dist_load",
        "Load a checkpoint into the prepared models and optimizers, under any strategy.",
        "%dist_load checkpoints/step100",
        dist_load,
        (
            Option(("path",), "the folder of the checkpoint", metavar="PATH"),
            Option(
                ("--models-only",),
                "load no optimizers, schedulers, loaders or random generators",
                None,
                name="is_models_only",
            ),
        ),
    ),
)
