"""What a session offers of single subjects: each a word for what stands elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nbdist.client import checkpoints, checkup, configuration
from nbdist.client.bandwidth import BENCH_S, Bandwidth
from nbdist.client.checkpoints import Checkpoints
from nbdist.client.lints import Lints
from nbdist.client.memory import Memories
from nbdist.client.trace import Traces
from nbdist.client.variables import Moved, Variables
from nbdist.core.bandwidth import Bench
from nbdist.core.checkup import Checkup
from nbdist.core.config_emit import SCRIPT
from nbdist.core.config_launch import Configured, configured
from nbdist.core.saving import Loaded, Saved, Started
from nbdist.core.snapshot import Snapshot
from nbdist.core.trace import Trace
from nbdist.core.weights import Exported

if TYPE_CHECKING:
    from nbdist.client.session import Session


class Subjects:
    """A part of Session, which makes these."""

    variables: Variables
    traces: Traces
    memories: Memories
    bandwidth: Bandwidth
    checkpoints: Checkpoints
    lints: Lints

    def push(
        self, variables: Mapping[str, object], ranks: str | Sequence[int] | None = None
    ) -> Moved:
        """Give ranks copies of values under these names; see client.variables."""
        return self.variables.push(variables, ranks)

    def pull(
        self, name: str, ranks: str | Sequence[int] | None = None, *, is_whole: bool = False
    ) -> Any:
        """A variable's value on one rank, or a list in rank order; see client.variables."""
        return self.variables.pull([name], ranks, is_whole=is_whole).values[name]

    def trace(self) -> Trace:
        """What was recorded last; a TraceError if nothing was."""
        return self.traces.last

    def bench(
        self,
        ops: str | Sequence[str] | None = None,
        sizes: str | Sequence[int] | None = None,
        limit_s: float = BENCH_S,
    ) -> Bench:
        """Measure the bandwidth of collectives between all ranks; see client.bandwidth."""
        return self.bandwidth.measure(ops, sizes, limit_s)

    def config(
        self, hosts: int | None = None, *, script: str = SCRIPT, clip: float = 0.0
    ) -> Configured:
        """The strategy that counts as configurations: `.texts["accelerate"]` and others."""
        session = cast("Session", self)
        return configured(configuration.setting(session, hosts=hosts, script=script, clip=clip))

    def memory(self) -> Snapshot:
        """The memory that was recorded last; before any recording, whose it is at this moment."""
        return self.memories.last_or_now()

    def save(self, path: str | os.PathLike[str], asynchronous: bool = False) -> Saved | Started:
        """Save models, optimizers and all that goes with them; see client.checkpoints."""
        return self.checkpoints.save(path, asynchronous=asynchronous)

    def load(self, path: str | os.PathLike[str], models_only: bool = False) -> Loaded:
        """Load a checkpoint into what is prepared; see client.checkpoints."""
        return self.checkpoints.load(path, models_only=models_only)

    def export_weights(self, path: str | Path, model: str = "") -> Exported:
        """Write a model's weights into one safetensors file; see client.checkpoints."""
        return checkpoints.export_weights(cast("Session", self), path, model)

    def check(self) -> Checkup:
        """Compare the models of all ranks, and look for NaN and inf; see client.checkup."""
        return checkup.check(cast("Session", self))

    def check_every(self, every: int) -> None:
        """Look before each so manieth step of an optimizer; 0 ends it; see client.checkup."""
        checkup.check_every(cast("Session", self), every)

    def trace_nan(self) -> None:
        """Let the next cell tell the first module whose output is not finite."""
        checkup.trace_nan(cast("Session", self))

    def silence(self, *names: str, is_on: bool = True) -> None:
        """Tell these lints no more (`all` for all); with `is_on=False` tell them again."""
        self.lints.silence(names, is_on=is_on)
