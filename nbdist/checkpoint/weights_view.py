"""What an export of weights has written, as text."""

from __future__ import annotations

from pathlib import Path

from nbdist.checkpoint.safetensors import CONFIG, FILE, Exported
from nbdist.core import units
from nbdist.core.view import View

_MAX_NAMED = 3


def exported(told: Exported) -> View:
    """The file, that it was compared, what is tied or left out, and how to load it."""
    size, took = units.exact_size(told.size_bytes), units.seconds(told.elapsed_s)
    lines = [
        f"{told.path}: {told.model}, {told.tensors} tensors, {size}, compared, in {took}",
    ]
    if told.tied:
        lines.append(f"in it once, with a note of their other names: {_few(told.tied)}")
    if told.left_out:
        lines.append(f"left out, as they are no tensors: {_few(told.left_out)}")
    path = Path(told.path)
    if CONFIG in told.configs and path.name == FILE:
        lines.append(f'load it: {told.model}.from_pretrained("{path.parent}")')
    elif CONFIG in told.configs:
        lines.append(f"transformers looks for {FILE}: rename it, or name the folder alone")
    else:
        lines.append(f'load it: safetensors.torch.load_model(model, "{path}")')
    return View("\n".join(lines))


def _few(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
