"""Reports of saves, loads and exports, as lines of text."""

from __future__ import annotations

import contextlib
import html
from collections.abc import Sequence
from pathlib import Path

from nbdist.checkpoint.manifest import first_few
from nbdist.checkpoint.results import Loaded, Saved, SaveStarted
from nbdist.checkpoint.safetensors import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    CONFIG,
    FILE,
    ExportedWeights,
)
from nbdist.core import units
from nbdist.core.units import shown
from nbdist.core.view import View
from nbdist.strategy.choice import described
from nbdist.strategy.degrees import ranks

_COMPARED = (
    "read back and compared bit for bit; it loads on any number of ranks, under any strategy"
)


def saved_view(done: Saved | SaveStarted, before: Sequence[str] = ()) -> View:
    """The output of %dist_save; `before` is the outcome of an earlier save beside training."""
    if isinstance(done, Saved):
        took = f"{units.size(done.size_bytes)} in {units.seconds(done.elapsed_s)}"
        files = f"{done.files} files of {ranks(done.strategy.world_size)}"
        rate = _rate(done.size_bytes, done.elapsed_s)
        return _lines(
            [
                *before,
                f"{_shorten(done.path)} saved at step {done.step}: {took} ({rate}), {files}",
                _COMPARED,
                *done.notes,
            ]
        )
    stall = f"training was paused for {units.duration(done.stall_s * 1e9)}"
    return _lines(
        [
            *before,
            f"{_shorten(done.path)} is being saved: {', '.join([*done.models, *done.optimizers])}",
            f"{units.size(done.copied_bytes)} copied to memory, {stall}",
            "%dist_status shows its progress",
            *done.notes,
        ]
    )


def loaded_view(done: Loaded, before: Sequence[str] = ()) -> View:
    """The output of %dist_load; `before` as in `saved_view`."""
    now, then = described(done.loaded_as), described(done.saved_as)
    was = "" if now == then else f", saved under {then}"
    took = f"{units.size(done.read_bytes)} read in {units.seconds(done.elapsed_s)}"
    rate = _rate(done.read_bytes, done.elapsed_s)
    names = ", ".join([*done.models, *done.optimizers])
    return _lines(
        [
            *before,
            f"{_shorten(done.path)} loaded at step {done.step}: {names}",
            f"{took} ({rate}), every file compared with its checksum; {now}{was}",
            *done.notes,
        ]
    )


def exported_view(result: ExportedWeights, host: str = "") -> View:
    """The file, that it was compared, what is tied or left out, and how to load it.

    The host has the file, where it is another one than the notebook's.
    """
    size, took = units.exact_size(result.size_bytes), units.seconds(result.elapsed_s)
    texts = [f"{result.path}: {result.model}, {result.tensors} tensors, {size}, compared in {took}"]
    if host:
        texts.append(f"rank 0 has written it on {host}")
    if result.tied:
        texts.append(f"tied weights, stored once: {first_few(result.tied)}")
    if result.left_out:
        texts.append(f"left out (not tensors): {first_few(result.left_out)}")
    texts += result.notes
    path = Path(result.path)
    if CONFIG in result.configs and path.name == FILE:
        texts.append(f'load it: {result.model}.from_pretrained("{path.parent}")')
    elif path.name == ADAPTER_FILE:
        texts.append(
            f'load it into its base model: PeftModel.from_pretrained(base, "{path.parent}")'
        )
    elif ADAPTER_CONFIG in result.configs:
        texts.append(f"PEFT looks for {ADAPTER_FILE}: rename it, or give only the folder")
    elif CONFIG in result.configs:
        texts.append(f"transformers looks for {FILE}: rename it, or give only the folder")
    else:
        texts.append(f'load it: safetensors.torch.load_model(model, "{path}")')
    return View("\n".join(texts))


def _shorten(path: str) -> str:
    """A path, from the notebook's folder on where it lies in there."""
    with contextlib.suppress(ValueError, OSError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


def _rate(size_bytes: int, elapsed_s: float) -> str:
    return f"{shown(units.exact_size(size_bytes / max(elapsed_s, 1e-9)))}/s"


def _lines(texts: Sequence[str]) -> View:
    body = "".join(f'<div style="white-space:pre-wrap">{html.escape(text)}</div>' for text in texts)
    return View("\n".join(texts), body)
