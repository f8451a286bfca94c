"""torch's own tools open the files that are written. Its javascript is not in the wheel."""

import base64
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.cuda._memory_viz as viz

from nbdist.memory.file import read, write
from nbdist.memory.snapshot import BEFORE, STAYS, RankMemory
from nbdist.memory.torch_reader import of_torch
from tests.support.memory_records import GPU, drawn

# A CPU rank with many blocks, and the GPU made by hand.
MEMORIES = [drawn(7), drawn(8), of_torch(GPU)]


def whole(path: Path, memory: RankMemory) -> Any:
    """What torch's tools are given of memory that was written into a file."""
    write(path, memory)
    return pickle.loads(path.read_bytes())


@pytest.mark.parametrize("memory", MEMORIES, ids=["drawn", "drawn too", "GPU"])
def test_torch_reads_it(tmp_path: Path, memory: RankMemory) -> None:
    """Sums of segments agree; every allocation is told; frames stand in the flame graph."""
    data = whole(tmp_path / "rank0.pickle", memory)
    b = memory.blocks
    stays = b.end_ns == STAYS

    summary = viz.segsum(data)
    used = int(b.size_bytes[stays].sum())
    assert f"total_allocated: {viz.Bytes(used)}" in summary
    trace = viz.trace(data)
    allocation_count = int(((b.start_ns != BEFORE) | stays).sum())
    assert len(re.findall(r"^\w+ = \w+\[", trace, re.MULTILINE)) == allocation_count
    assert trace.count("raise OutOfMemoryError") == len(memory.failures)
    flames = viz.memory(data, format_flamegraph=lambda lines: lines)
    active_bytes = sum(
        int(line.rsplit(" ", 1)[1]) for line in flames.splitlines() if ";active_" in line
    )
    assert active_bytes == used
    for place in np.unique(b.stack[stays & (b.stack >= 0)]):
        frame = memory.stacks[place][0]
        assert f":{frame.line}:{frame.function}" in flames


def test_segments_of_the_gpu_are_as_they_were(tmp_path: Path) -> None:
    """What is free in them is told as torch tells it of its own snapshot."""
    on_device = {"segments": [segment for segment in GPU["segments"] if segment["device"] == 0]}
    for segment in on_device["segments"]:  # a block that waits for its stream counts as free there
        for block in segment["blocks"]:
            if block["state"] == "active_pending_free":
                block["state"] = "active_allocated"
            if block["state"] != "inactive":
                block["requested_size"] = block["size"]

    written = whole(tmp_path / "rank0.pickle", of_torch(GPU))
    assert viz.segsum(written) == viz.segsum(on_device)


def test_plot_holds_the_whole_file(tmp_path: Path) -> None:
    """The page has the pickle in it, as its javascript unpacks it; with colours by category."""
    memory = drawn(7)
    written = whole(tmp_path / "rank0.pickle", memory)
    page = viz.trace_plot(written)

    (packed,) = json.loads(re.search(r"local_files = (\[.*\])\n", page)[1])
    assert pickle.loads(base64.b64decode(packed["base64"])) == written
    categories = {event.get("category") for event in written["device_traces"][0]}
    assert "unknown" in categories  # its javascript fails where there are categories without it
    again = tmp_path / "again.pickle"
    again.write_bytes(base64.b64decode(packed["base64"]))
    assert len(read(again).ranks[0].blocks) == len(memory.blocks)


def test_what_differs_between_two_files(tmp_path: Path) -> None:
    """torch's comparison takes the segments of both."""
    before, after = (whole(tmp_path / "one", drawn(seed))["segments"] for seed in (7, 8))

    comparison = viz.compare(before, after, format_flamegraph=lambda lines: lines)
    assert "only_before" in comparison
    assert "only_after" in comparison
