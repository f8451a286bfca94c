"""Records of a save or a load of a checkpoint, for a person to read."""

from __future__ import annotations

from dataclasses import dataclass

from nbdist.strategy.choice import Strategy

RUNNING, DONE, FAILED = "running", "done", "failed"


@dataclass(frozen=True, slots=True)
class SaveStarted:
    """A save that has begun, on one rank or on all; it goes on while training does.

    Attributes:
        models, optimizers: Their names.
        copied_bytes: Bytes that this rank, or all ranks, copied to their hosts' memory to write.
        notes: What is not saved, a sentence each.
        stall_s: How long training was paused for that; of the slowest rank.
    """

    path: str
    models: tuple[str, ...]
    optimizers: tuple[str, ...]
    copied_bytes: int
    notes: tuple[str, ...]
    stall_s: float


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is in its place.

    Attributes:
        size_bytes: The size of all files but the manifest.
        files, tensors: How many files, and names of tensors, it has.
        step: How many steps were made before it.
        elapsed_s: From the beginning to the last rename.
        notes: What is not saved, a sentence each.
    """

    path: str
    size_bytes: int
    files: int
    tensors: int
    step: int
    strategy: Strategy
    elapsed_s: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Saving:
    """Progress of a save on one rank.

    Attributes:
        state: RUNNING, DONE or FAILED. Rank 0 is done last, when the checkpoint is in its place.
        done_bytes, total_bytes: Written and compared; each byte counts twice.
        saved: On rank 0, once it is there.
    """

    state: str
    phase: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    failure: str = ""
    saved: Saved | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """Report of one rank after a load.

    Attributes:
        models, optimizers: Their names here.
        saved_as, loaded_as: The strategy then and now.
        saved_size: How many ranks have saved it.
        read_bytes: The bytes of this rank's parts.
        notes: Differences from the saved state, a sentence each.
    """

    path: str
    models: tuple[str, ...]
    optimizers: tuple[str, ...]
    step: int
    saved_as: Strategy
    loaded_as: Strategy
    saved_size: int
    read_bytes: int
    notes: tuple[str, ...]
    elapsed_s: float
