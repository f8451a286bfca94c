"""Notes on what a cell's error has to do with a strategy, which torch and Python cannot know."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from nbdist.parallel.live.prepared import Prepared

# Errors about shapes, and about parts together with whole tensors.
_MISFIT = re.compile(
    r"size of tensor|shapes cannot be multiplied|size mismatch|got mixed torch.Tensor and DTensor"
)


_FREED = "backward through the graph a second time"
_NO_TARGET = re.compile(r"Target modules .* not found in the base model")  # PEFT 0.21


def install(shell: Any) -> None:
    """Let the message of a cell's error end with the note on it, wherever it is shown."""
    show = shell.showtraceback

    @functools.wraps(show)
    def showtraceback(exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        error = sys.exc_info()[1] if exc_tuple is None else exc_tuple[1]
        if error is not None and (sentence := explain(error)):
            error.args = (f"{error}. {sentence}",)
        show(exc_tuple, *args, **options)

    shell.showtraceback = showtraceback


def explain(error: BaseException) -> str:
    """A sentence from what models of this rank are; "" for an error of another kind."""
    if _NO_TARGET.match(str(error)):
        return _targets(error)
    # Not imported for this: accelerate comes with it.
    registry = sys.modules.get("nbdist.parallel.live.registry")
    models: Iterable[Prepared] = () if registry is None else registry.prepared()
    notes = (find(model, error) for model in models for find in (_stage, _freed, _added))
    return next(filter(None, notes), "")


def _targets(error: BaseException) -> str:
    """The names of layers that adapters can be on, of the model that PEFT was given."""
    paths = {
        path
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith("peft.")
        for model in frame.f_locals.values()
        if isinstance(model, torch.nn.Module)
        for path, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear | torch.nn.Embedding)
    }
    names = sorted({path.rpartition(".")[2] for path in paths} - {""})
    return f"Linear layers and embeddings in it are called: {', '.join(names)}" if names else ""


def _stage(model: Prepared, error: BaseException) -> str:
    """An attribute was asked for that the forward of another stage's module would have set."""
    module = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    if not isinstance(module, torch.nn.Module) or not any(p.is_meta for p in module.parameters()):
        return ""
    path = next((path for path, each in model.base.named_modules() if each is module), "")
    if not path:
        return ""
    return (
        f"{path} is of another stage of the pipeline, and its forward does not run on this rank: "
        "what it keeps as an attribute is on that stage's rank alone. Let blocks hand it on and "
        "forward return it, or use ddp or fsdp"
    )


def _freed(model: Prepared, error: BaseException) -> str:
    """A loss has a part of a stage's graph in it, which the pipeline's own backward has let go."""
    if model.built.job.choice.degrees.pp == 1 or _FREED not in str(error):
        return ""
    return (
        "A pipeline runs the backward of what forward returns, and of nothing else. An auxiliary "
        "loss that modules or hooks keep beside it is moreover that of one stage: let blocks hand "
        "it on and forward return it in its loss, or use ddp or fsdp"
    )


def _added(model: Prepared, error: BaseException) -> str:
    """Shapes do not fit, and a split model has parameters that no strategy has seen."""
    if not _MISFIT.search(str(error)) or model.built.job.choice.name in {"single", "ddp"}:
        return ""
    at_prepare = set(itertools.chain.from_iterable(model.built.names.values()))
    trained = (name for name, p in model.base.named_parameters() if p.requires_grad)
    added = [name for name in trained if name not in at_prepare]
    if not added:
        return ""
    return (
        f"{model.built.title} got {len(added)} parameters after prepare ({added[0]}), made "
        "from parts of those that this strategy has split. Add adapters (peft.get_peft_model) "
        "first, then prepare the model"
    )
