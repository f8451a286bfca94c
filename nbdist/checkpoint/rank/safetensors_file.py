"""A safetensors file on rank 0: written beside its place, compared, then given its name."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from nbdist.checkpoint import folder as checkpoint_folder
from nbdist.checkpoint import safetensors
from nbdist.checkpoint.manifest import SavedTensor
from nbdist.core import host
from nbdist.core.units import exact_size
from nbdist.errors import CheckpointError

_MARK = ".nbdist-weights-"


class WeightsFile:
    """The file while it is made. This rank alone; `abandon` at the end in any case."""

    def __init__(
        self,
        target: Path,
        weights: Sequence[SavedTensor],
        tied: Mapping[str, str],
        make_configs: Callable[[], Mapping[str, str]],
    ) -> None:
        """Nothing is written before `begin`. Weights are in the file's order.

        `tied` is further names -> the name in the file; noted in it, as safetensors' own
        `load_model` wants. `make_configs` gives what comes beside it: files' names -> texts.
        """
        self._target = target
        self._weights = weights
        self._tied = tied
        self._make_configs = make_configs
        self._configs: Mapping[str, str] = {}
        self._temporary = target.with_name(f".{target.name}{_MARK}{_process()}")
        self._file: IO[bytes] | None = None
        self._reader: Any = None

    def begin(self) -> None:
        """Open it, once there is room for it, and write its header.

        Raises:
            CheckpointError: The place cannot be written, is too small, or has configs of another
                model.
        """
        self._configs = self._make_configs()
        with checkpoint_folder.explain_errors(self._target):
            if self._target.is_dir():
                raise CheckpointError(f"{self._target} is a folder. Name a file.")
            self._target.parent.mkdir(parents=True, exist_ok=True)
            _sweep(self._target)
            for name, text in self._configs.items():
                # A folder's config.json may be of another model, which has nothing to do with this.
                beside = self._target.with_name(name)
                is_other = beside.exists() and beside.read_text(encoding="utf-8") != text
                if is_other and not self._target.exists():
                    raise CheckpointError(
                        f"{beside} already exists and belongs to another model. Choose another "
                        "folder."
                    )
            needed_bytes = sum(safetensors.bytes_of(weight) for weight in self._weights)
            free_bytes = shutil.disk_usage(self._target.parent).free
            if free_bytes < needed_bytes:
                raise CheckpointError(
                    f"{self._target} needs {needed_bytes:,} bytes ({exact_size(needed_bytes)}), "
                    f"but only {free_bytes:,} are free there. Free some space, or choose another "
                    "path."
                )
            self._file = self._temporary.open("xb")
            self._file.write(safetensors.header(self._weights, {"format": "pt", **self._tied}))

    def write(self, batch: Sequence[SavedTensor], values: Mapping[str, torch.Tensor]) -> None:
        """Append a batch of tensors to the file."""
        assert self._file is not None
        with checkpoint_folder.explain_errors(self._target):
            for weight in batch:
                self._file.write(_bytes(values[weight.name]).numpy().data)

    def end(self) -> None:
        """All of it is on disk; what follows reads it."""
        assert self._file is not None
        with checkpoint_folder.explain_errors(self._target):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        try:
            self._reader = safe_open(self._temporary, framework="pt")
        except SafetensorError as error:
            raise CheckpointError(f"{self._target} cannot be read back: {error}.") from error
        names = set(self._reader.keys())
        if names != {weight.name for weight in self._weights}:
            raise CheckpointError(
                f"{self._target} was read back with {len(names)} tensors instead of "
                f"{len(self._weights)}."
            )

    def compare(self, batch: Sequence[SavedTensor], values: Mapping[str, torch.Tensor]) -> None:
        """Check that the values read back are the model's, bit by bit.

        Raises:
            CheckpointError: Names the tensor, and how many of its values differ.
        """
        for weight in batch:
            written, expected = self._reader.get_tensor(weight.name), values[weight.name].cpu()
            if written.shape != expected.shape or written.dtype != expected.dtype:
                raise CheckpointError(
                    f"{weight.name} was read back from {self._target} as {written.dtype} "
                    f"{tuple(written.shape)} instead of {expected.dtype} {tuple(expected.shape)}."
                )
            if not torch.equal(_bytes(written), _bytes(expected)):
                differ = (
                    (_bytes(written) != _bytes(expected)).view(max(1, expected.numel()), -1).any(1)
                )
                raise CheckpointError(
                    f"{int(differ.sum()):,} of {expected.numel():,} values of {weight.name} "
                    f"differ from the model's when read back from {self._target}: the disk or the "
                    "model changed meanwhile. Try again, or choose another disk."
                )

    def commit(self) -> tuple[int, tuple[str, ...]]:
        """Give it its name, with the configs beside it.

        Returns:
            Its bytes, and the configs' names.
        """
        self._reader = None
        with checkpoint_folder.explain_errors(self._target):
            for name, text in self._configs.items():
                beside = self._temporary.with_name(f"{self._temporary.name}.{name}")
                beside.write_text(text, encoding="utf-8")
                beside.replace(self._target.with_name(name))
            self._temporary.replace(self._target)
            checkpoint_folder.flush(self._target.parent)
            return self._target.stat().st_size, tuple(self._configs)

    def abandon(self) -> None:
        """Remove what has no name yet."""
        self._reader = None
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
                for entry in self._target.parent.iterdir():
                    if entry.name.startswith(self._temporary.name):
                        entry.unlink()


def configs_of(base: torch.nn.Module) -> Mapping[str, str]:
    """Config files of a model of transformers: names -> texts; none for other models."""
    config: Any = getattr(base, "config", None)
    if not hasattr(config, "to_json_string") or not hasattr(config, "model_type"):
        return {}
    exported: Any = copy.deepcopy(config)
    exported.architectures = [type(base).__name__]
    floating = [p.dtype for p in base.parameters() if p.is_floating_point()]
    if floating:
        exported.dtype = str(floating[0]).removeprefix("torch.")
    texts = {safetensors.CONFIG: exported.to_json_string()}
    generation: Any = getattr(base, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        texts["generation_config.json"] = generation.to_json_string()
    return texts


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _process() -> str:
    """Name this process apart from every other that may write to the same folder."""
    machine = zlib.crc32("/".join(astuple(host.this_machine())).encode())
    return f"{machine:08x}-{os.getpid()}-{host.started(os.getpid()) or ''}"


def _sweep(target: Path) -> None:
    """Remove what processes of this machine have left that ended before they were done."""
    machine = _process().split("-")[0]
    for entry in target.parent.iterdir():
        if not entry.name.startswith(f".{target.name}{_MARK}{machine}-"):
            continue
        pid, start = entry.name.rpartition(_MARK)[2].split(".")[0].split("-")[1:]
        if host.started(int(pid)) != start:
            entry.unlink(missing_ok=True)
