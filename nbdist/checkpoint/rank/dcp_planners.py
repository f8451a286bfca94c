"""Plans for torch's own writer and reader of checkpoints (DCP): boxes of tensors.

torch plans for tensors and DTensors. Packed layers, pipeline stages and states that one rank has
are neither, so plans are made of `checkpoint.chunks`. The result is an ordinary DCP checkpoint.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from nbdist.checkpoint.chunks import Chunk
from nbdist.checkpoint.rank.tensors import CheckpointTensors, Spot
from nbdist.core.progress import BYTES
from nbdist.rpc.rank import progress


class ChunkWriter(FileSystemWriter):
    """torch's writer, for one rank's file, without a word of where it was written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True, thread_count=1)

    def storage_meta(self) -> StorageMeta | None:
        """Nothing: the folder gets another name once it is whole."""
        return StorageMeta()


class ChunkSavePlanner(SavePlanner):
    """Plans one rank's part of a save. Meets no rank: all make the same plan."""

    def __init__(
        self, contents: CheckpointTensors, rank: int, value: Callable[[Spot], torch.Tensor]
    ) -> None:
        """Take what all ranks save; `create_local_plan` picks this rank's boxes.

        `value` gives a box that it holds, contiguous, on the host.
        """
        self._contents, self._rank, self._value = contents, rank, value

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Do nothing: the constructor has the contents."""

    def create_local_plan(self) -> SavePlan:
        """One write item for each box that this rank writes."""
        items = []
        for part in self._contents.parts:
            if part.writer == self._rank:
                size = torch.Size(self._contents.shapes[part.name])
                properties = TensorProperties(dtype=self._contents.dtypes[part.name])
                data = TensorWriteData(_box(part.chunk), properties, size)
                index = MetadataIndex(part.name, part.chunk.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans as they are, and the metadata of all tensors, under each of their names."""
        contents = self._contents
        boxes: dict[str, list[ChunkStorageMetadata]] = {}
        for part in contents.parts:
            boxes.setdefault(part.name, []).append(_box(part.chunk))
        stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, shape in contents.shapes.items():
            properties = TensorProperties(dtype=contents.dtypes[name])
            entry = TensorStorageMetadata(properties, torch.Size(shape), boxes[name])
            stored |= dict.fromkeys((name, *contents.aliases[name]), entry)
        return all_plans, Metadata(stored, planner_data=dict(contents.paths))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The values of a box."""
        return self._value(spot(write_item.index))


class ChunkLoadPlanner(LoadPlanner):
    """Plans one rank's reading: what its boxes have in common with those that were saved."""

    def __init__(self, wanted: Mapping[str, tuple[torch.Tensor, Sequence[Chunk]]]) -> None:
        """Take what this rank reads, and where to.

        `wanted` is name -> (this rank's local tensor, which is filled in place, and the boxes of
        the whole that it consists of).
        """
        self._wanted = wanted
        self._metadata: Metadata | None = None
        self._total_bytes = sum(tensor.nbytes for tensor, _ in wanted.values())
        self._done_bytes = 0

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Note the metadata of the saved checkpoint."""
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Plan the rank's reads: each element of its boxes once, if the saved ones are whole."""
        assert self._metadata is not None
        items = []
        for name, (_, chunks) in self._wanted.items():
            saved: Any = self._metadata.state_dict_metadata[name]
            for chunk in chunks:
                items += [
                    item
                    for saved_chunk in saved.chunks
                    if (item := _common(name, saved_chunk, chunk)) is not None
                ]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never: there are tensors alone."""
        raise AssertionError(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Part of the local tensor that a box is copied to."""
        target, _ = self._wanted[read_item.dest_index.fqn]
        for dim, (start, n) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, start, n)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It was copied in place: report the progress."""
        self._done_bytes += tensor.nbytes
        progress.tell("reading", self._done_bytes, self._total_bytes, BYTES)


def spot(index: MetadataIndex) -> Spot:
    """Which box an index of DCP's names."""
    return index.fqn, tuple(index.offset or ())


def _box(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


def _common(name: str, saved: ChunkStorageMetadata, chunk: Chunk) -> ReadItem | None:
    """The intersection of a saved box and one of this rank's."""
    begin = [max(a, b) for a, b in zip(saved.offsets, chunk.offsets, strict=True)]
    ends = zip(saved.offsets, saved.sizes, chunk.offsets, chunk.sizes, strict=True)
    end = [min(a + m, b + n) for a, m, b, n in ends]
    lengths = [last - first for first, last in zip(begin, end, strict=True)]
    if any(length <= 0 for length in lengths):
        return None
    local = [
        at + first - off for at, first, off in zip(chunk.local, begin, chunk.offsets, strict=True)
    ]
    inside = [first - off for first, off in zip(begin, saved.offsets, strict=True)]
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(name, torch.Size(begin)),
        torch.Size(local),
        MetadataIndex(name, saved.offsets),
        torch.Size(inside),
        torch.Size(lengths),
    )
