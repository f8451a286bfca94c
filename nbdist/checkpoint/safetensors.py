"""A file of weights as safetensors lays it out, so that it can be written one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbdist.checkpoint.manifest import SavedTensor
from nbdist.errors import CheckpointError

FILE = "model.safetensors"
SUFFIX = ".safetensors"
CONFIG = "config.json"
# PEFT's names of the files.
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

# torch's name of a dtype -> the format's, and the bytes of an element.
# Source: https://github.com/huggingface/safetensors, its README and bindings for torch.
DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "complex64": ("C64", 8),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}  # fmt: skip
# The header's end, and so every tensor's begin, is a multiple of this.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """A safetensors file that was written and compared with the model.

    Attributes:
        tensors: How many are in it.
        tied: Further names of tensors, of which only the first is in the file.
        left_out: Names in the module's state that are not tensors.
        configs: Files beside it that say how to make the model.
        notes: A sentence on whose values are in it, for each tensor that differs between ranks.
        elapsed_s: Until it had been read back and compared.
    """

    path: str
    model: str
    tensors: int
    size_bytes: int
    tied: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    configs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    elapsed_s: float = 0.0


def bytes_of(weight: SavedTensor) -> int:
    """Bytes of all elements, without the header."""
    return math.prod(weight.shape) * DTYPES[weight.dtype][1]


def in_file_order(weights: Iterable[SavedTensor]) -> list[SavedTensor]:
    """Large elements first: so each begins at a multiple of its own size, without holes."""
    return sorted(weights, key=lambda weight: -DTYPES[weight.dtype][1])


def check(weights: Iterable[SavedTensor]) -> None:
    """Refuse what the format has no dtype for.

    Raises:
        CheckpointError: Names the tensor and the dtypes that there are.
    """
    for weight in weights:
        if weight.dtype not in DTYPES:
            raise CheckpointError(
                f"{weight.name} has dtype {weight.dtype}, which safetensors cannot store. It "
                f"stores {', '.join(DTYPES)}."
            )


def header(weights: Sequence[SavedTensor], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the first tensor: the header's length and its JSON.

    Weights are in the order in which their bytes follow; transformers wants `format`: `pt` in the
    metadata.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for weight in weights:
        entries[weight.name] = {
            "dtype": DTYPES[weight.dtype][0],
            "shape": list(weight.shape),
            "data_offsets": [offset, offset + bytes_of(weight)],
        }
        offset += bytes_of(weight)
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def batches(weights: Sequence[SavedTensor], limit_bytes: int) -> Iterator[Sequence[SavedTensor]]:
    """Neighbours that together have at most `limit_bytes`; a larger one is a batch of its own."""
    first, total_bytes = 0, 0
    for at, weight in enumerate(weights):
        if at > first and total_bytes + bytes_of(weight) > limit_bytes:
            yield weights[first:at]
            first, total_bytes = at, 0
        total_bytes += bytes_of(weight)
    if first < len(weights):
        yield weights[first:]


def file_of(path: Path, name: str) -> Path:
    """The file that a path means: itself where it ends so, else this one in that folder."""
    return path if path.name.endswith(SUFFIX) else path / name
