"""Records a cell with torch.profiler on this rank, and reads the recording.

`begin` arms the next cell; the profiler runs while that cell does (recording/rank/cell_hook.py).
`finish` gives what was recorded. A step ends at `optimizer.step()`, or at `nbdist.step()` where
that is called.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from nbdist.core.host import usable_cpus
from nbdist.core.rank import this_rank
from nbdist.core.units import size
from nbdist.errors import TraceError
from nbdist.hang.rank import main_thread, recorder
from nbdist.parallel.live import registry
from nbdist.recording.rank import cell_hook
from nbdist.recording.rank.steps import CellRecording, is_profiling, start_profiler
from nbdist.rpc.rank import namespace, progress
from nbdist.strategy import choice as strategy_choice
from nbdist.strategy import footprint
from nbdist.trace import names, read
from nbdist.trace.trace import TraceOptions
from nbdist.variables import pack
from nbdist.variables.pack import PackedValue

FOLDER = "traces"


class _Recording(CellRecording):
    noun = "trace"

    def __init__(self, options: TraceOptions, folder: Path, token: str):
        super().__init__(token, options.steps, self._mark)
        self.path = folder / f"rank{this_rank().place.rank}.json"
        self._options = options
        self._marked: torch.Tensor | None = None  # on the GPU, where there is one
        self._profiler: profile | None = None

    def start(self) -> None:
        """Let the profiler run."""
        activities = [ProfilerActivity.CPU]
        device = this_rank().place.device
        if device != "cpu":
            activities.append(ProfilerActivity.CUDA)
        if is_profiling(unknown=False):
            self.problem = (
                "Another profiler is running on this rank, and torch allows one at a time. Stop it."
            )
            return
        try:
            self._marked = None if device == "cpu" else torch.zeros(1, device=device)
            # Without a schedule: one that is never reached leaves an empty trace.
            self._profiler = profile(
                activities=activities,
                record_shapes=True,  # the sizes of collectives
                profile_memory=self._options.has_memory,
                with_stack=self._options.has_stacks,
            )
            start_profiler(self._profiler)
        except Exception as error:  # noqa: BLE001  # the cell itself is to run
            self.problem = f"The profiler could not start: {error}."
            self._profiler = None
            return
        self._is_on = True
        self._hooks = [register_optimizer_step_post_hook(self._after_optimizer)]

    def after_step(self) -> None:
        """End a step here: the cell has called `nbdist.step()`."""
        if self._is_on and self.steps.take_explicit():
            self._end()

    def export(self) -> None:
        """Write the file, once.

        Raises:
            TraceError: If nothing was recorded, or there is no room for it.
        """
        if self._profiler is None:
            if not self.path.exists():
                raise TraceError(self.problem or "Nothing was recorded on this rank.")
            return
        profiler, self._profiler = self._profiler, None
        try:
            profiler.export_chrome_trace(str(self.path))
        except (OSError, RuntimeError) as error:
            raise TraceError(f"The trace could not be written: {error}.") from error
        if not self.path.exists():  # libkineto only logs that it could not
            free_bytes = shutil.disk_usage(self.path.parent).free
            for part in self.path.parent.glob(f"{self.path.name}*"):
                part.unlink()
            raise TraceError(
                f"The trace could not be written to {self.path.parent}, where "
                f"{size(free_bytes)} are free. Free some space, or record fewer steps (--steps)."
            )
        self.path.chmod(0o600)

    def _mark(self) -> None:
        """Mark the end of a step, by the GPU's clock too: there a mark is drawn by its kernel.

        Not into a CUDA graph that is being captured, which would run the kernel ever after.
        """
        with record_function(names.STEP_END):
            if self._marked is not None and not torch.cuda.is_current_stream_capturing():
                self._marked.zero_()

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_on and self.steps.take_optimizer(id(optimizer)):
            self._end()

    def _end(self) -> None:
        super()._end()
        if self._is_on and self._profiler is not None:
            self._is_on = False
            if not is_profiling(unknown=True):
                self.problem = (
                    "The cell used its own profiler, which ended the recording: torch allows one "
                    "at a time."
                )
                self._profiler = None
                return
            # Metadata that is added after the stop is not in the file.
            self._profiler.add_metadata_json(read.OURS, json.dumps(self._header()))
            self._profiler.stop()

    def _header(self) -> dict[str, Any]:
        """Facts for `trace.read` beside the events: steps, groups, the bytes that a step sends."""
        has_warmup = self._options.steps is not None and len(self.steps.ends) > 1
        choice = registry.current()
        # The numbers are of the whole model, whatever this rank holds of it.
        n_parameters = sum(
            torch.Size(prepared.layouts[name].shape).numel()
            for prepared in registry.prepared()
            for name in prepared.parameters
        )
        is_half = choice.options.precision != "fp32" and choice.name.startswith("fsdp")
        sent = footprint.sent_bytes(choice, n_parameters, parameter_bytes=2 if is_half else 4)
        return {
            "rank": this_rank().place.rank,
            "host": socket.gethostname(),
            "cpus": usable_cpus(),
            "ends": self.steps.ends,
            "skipped": int(has_warmup),
            "groups": {torch_name: name for name, torch_name in namespace.group_names().items()},
            "made": [
                {
                    "pg_name": name,
                    "pg_desc": recorder.group_description(group),
                    "ranks": dist.get_process_group_ranks(group),
                }
                for name, group in recorder.living_groups().items()
            ],
            "calls": main_thread.flight_record(),
            "strategy": strategy_choice.described(choice) if n_parameters else "",
            "formula": footprint.sent_phrases(choice) if n_parameters else (),
            "formula_bytes": sent or None,
        }


@dataclass(slots=True)
class _State:
    """The recording that was armed last, and where its file goes."""

    last: _Recording | None = None
    folder: Path | None = None
    temporary: Any = None


_state = _State()


def begin(options: TraceOptions, token: str) -> None:
    """Record the cell that brings this token; the earlier recording is removed.

    Raises:
        TraceError: If its file has no place.
    """
    cell_hook.state.armed = None
    folder = _folder()
    for path in folder.glob(f"rank{this_rank().place.rank}.json*"):
        path.unlink()
    cell_hook.state.armed = _state.last = _Recording(options, folder, token)


def finish(folders: Sequence[str]) -> PackedValue:
    """Send the last recording of this rank, as {"recording": Recording}.

    Args:
        folders: As variables.pack.send takes them.

    Raises:
        TraceError: If nothing was recorded, or it has no room.
    """
    cell_hook.state.armed = None  # its cell was never sent
    recording = _state.last
    if recording is None:
        raise TraceError("Nothing was recorded on this rank: it was restarted after the recording.")
    with progress.during(recording.noun):
        progress.tell("writing the file")
        recording.export()
        progress.tell("reading the file")
        result = read.read(recording.path, this_rank().place.rank)
    if recording.problem:
        problem = f"{recording.problem} {result.trace.problem}".rstrip()
        result = replace(result, trace=replace(result.trace, problem=problem))
    return pack.send(pack.pack({"recording": result}), folders)


def text(folders: Sequence[str]) -> PackedValue:
    """The file of the last recording, as {"text": bytes in an array}.

    Raises:
        TraceError: If there is none.
    """
    recording = _state.last
    if recording is None or not recording.path.exists():
        raise TraceError("Nothing was recorded on this rank.")
    content = np.fromfile(recording.path, np.uint8)
    return pack.send(pack.pack({"text": content}), folders)


def _folder() -> Path:
    """Make the folder of this rank's file: in the run's, on another host a temporary one."""
    if _state.folder is None:
        run_dir = Path(os.environ.get("NBDIST_RUN", ""))
        if run_dir.name and run_dir.is_dir():
            _state.folder = run_dir / FOLDER
        else:
            _state.temporary = tempfile.TemporaryDirectory(prefix="nbdist-traces-")
            _state.folder = Path(_state.temporary.name)
    try:
        _state.folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise TraceError(f"{_state.folder} cannot be created: {error.strerror}.") from error
    return _state.folder
