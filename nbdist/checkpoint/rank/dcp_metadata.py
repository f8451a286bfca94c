"""`.metadata`, a pickle, is read without running anything but the classes that belong in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from nbdist.checkpoint.manifest import Checkpoint
from nbdist.core import safe_pickle
from nbdist.errors import CheckpointError

FILE = ".metadata"
_DCP = "torch.distributed.checkpoint"


def _memory_format(kind: Any, name: Any) -> Any:
    """A member of torch's enum of memory formats; for any other class nothing is looked up.

    Raises:
        safe_pickle.Refused: It is another class.
    """
    formats: Any = getattr(metadata, "_MEM_FORMAT_ENCODING", None)
    if formats is None or kind is not formats:
        raise safe_pickle.Refused(f"asks {kind!r} for {name!r}, which such a file never contains")
    return formats[name]


# All classes that torch's writer puts into it (torch 2.11 to 2.13); making one has no side
# effects. Two are private to torch: without them such a file cannot be read at all.
_CLASSES: Mapping[tuple[str, str], Any] = {
    **{
        (f"{_DCP}.metadata", name): getattr(metadata, name, None)
        for name in (
            "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    },
    (f"{_DCP}.filesystem", "_StorageInfo"): getattr(filesystem, "_StorageInfo", None),
    ("torch.serialization", "_get_layout"): getattr(torch.serialization, "_get_layout", None),
    ("torch", "Size"): torch.Size,
    # Python before 3.11.4 writes a member of an enum as getattr(enum, name).
    ("builtins", "getattr"): _memory_format,
    **{("torch", name): it for name, it in vars(torch).items() if isinstance(it, torch.dtype)},
}  # fmt: skip


def loads(data: bytes) -> Metadata:
    """Metadata of a pickle that may come from anybody.

    Raises:
        CheckpointError: It is damaged, or holds anything else.
    """
    try:
        loaded = safe_pickle.loads(data, _CLASSES)
    except safe_pickle.Refused as error:
        raise CheckpointError(f"its {FILE} {error}") from error
    if not isinstance(loaded, Metadata):
        raise CheckpointError(f"its {FILE} is a {type(loaded).__name__}")
    return loaded


def read(folder: Path, saved: Checkpoint) -> Metadata:
    """The metadata of a checkpoint whose manifest is known and whose files are whole.

    Raises:
        CheckpointError: It is damaged, or does not go with the manifest and its files.
    """
    try:
        loaded = loads((folder / FILE).read_bytes())
        _check(loaded, {file.name: file.size_bytes for file in saved.files})
    except CheckpointError as error:
        raise CheckpointError(f"{folder} cannot be used: {error}. Load another one.") from error
    except OSError as error:
        raise CheckpointError(f"{folder / FILE} cannot be read: {error.strerror}.") from error
    except safe_pickle.ERRORS as error:
        raise CheckpointError(
            f"{folder} cannot be used: its {FILE} is damaged ({type(error).__name__}: {error})."
        ) from error
    return loaded


def _check(loaded: Metadata, files: Mapping[str, int]) -> None:
    """Every box is in one of the files, and all boxes of a tensor are the whole of it."""
    stored = loaded.storage_data
    for name, entry in loaded.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{name} in its {FILE} is no tensor")
        for chunk in entry.chunks:
            place = stored[MetadataIndex(name, chunk.offsets)]
            if place.offset + place.length > files.get(place.relative_path, -1):
                raise CheckpointError(f"{name} is not in its file {place.relative_path}")
        count = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if count != math.prod(entry.size):
            raise CheckpointError(
                f"{name} has {math.prod(entry.size)} elements and {count} are in its files"
            )
