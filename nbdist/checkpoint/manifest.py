"""The contents of a checkpoint, as its file `nbdist.json` describes them.

The values themselves lie beside it, in torch.distributed.checkpoint's files. This file is
written last: a folder with a readable one, and with all files that it lists, is a whole checkpoint.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nbdist.checkpoint import other_formats
from nbdist.core.typed_json import Misfit, Value
from nbdist.errors import CheckpointError
from nbdist.strategy.choice import Strategy

MANIFEST = "nbdist.json"
# Raised when an older nbdist could not make sense of it. Fields with defaults can be added without.
FORMAT = 1
ADAPTERS = "adapters"
"""In `Checkpoint.extra`, true where of models only the adapters of PEFT were saved."""
_FORMAT_KEY = "nbdist_checkpoint"
_MAX_NAMED = 3
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A parameter or buffer, as the manifest describes it.

    Attributes:
        name: The name in the user's module.
        shape: The whole tensor's shape.
        dtype: torch's name without `torch.`: `float32`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A model, as the manifest describes it.

    Attributes:
        kind: Its class's name.
        tensors: Each once, in the module's order.
        tied: Further names of a tensor -> the name under which it is among `tensors`.
    """

    kind: str
    tensors: tuple[SavedTensor, ...]
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """An optimizer, as the manifest describes it.

    Attributes:
        kind: Its class's name.
        names: Names of the parameters of each group, as the models have them.
        numbers: Numbers of each group: learning rate and the like.
        states: State of a parameter: `exp_avg`, `step`; empty before the first step.
    """

    kind: str
    names: tuple[tuple[str, ...], ...]
    numbers: tuple[Mapping[str, Any], ...]
    states: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file beside the manifest.

    Attributes:
        name: In the folder, with slashes where it lies deeper.
        checksum: `crc32:` and eight hexadecimal digits.
    """

    name: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of the programs that wrote a checkpoint."""

    nbdist: str
    torch: str
    accelerate: str
    python: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All of a checkpoint but the values.

    Attributes:
        models, optimizers: In the order in which they were prepared.
        schedulers: Their states, likewise.
        scaler: The gradient scaler's state; None without one.
        random: States of random generators, by rank: name -> text.
        step: How many steps were made.
        world_size, strategy: Those of the ranks that have saved it.
        saved_s: When, in Unix time.
    """

    models: tuple[SavedModel, ...]
    optimizers: tuple[SavedOptimizer, ...]
    versions: Versions
    world_size: int
    strategy: Strategy
    saved_s: float
    files: tuple[SavedFile, ...]
    schedulers: tuple[Mapping[str, Any], ...] = ()
    scaler: Mapping[str, Any] | None = None
    loaders: tuple[Mapping[str, Any], ...] = ()
    random: tuple[Mapping[str, Any], ...] = ()
    step: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of all files beside the manifest."""
        return sum(file.size_bytes for file in self.files)


def text(checkpoint: Checkpoint) -> str:
    """A checkpoint as JSON, which `parse` reads.

    Raises:
        CheckpointError: Something in it is no plain value; nothing is turned into text for it.
    """
    try:
        return json.dumps({_FORMAT_KEY: FORMAT, **asdict(checkpoint)}, indent=1) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The checkpoint's description cannot be written: {error}. States of schedulers and "
            "loaders must be numbers, strings, lists and dicts."
        ) from error


def parse(written: str, where: str) -> Checkpoint:
    """Parse the JSON that `text` writes; `where` is its path, for the messages.

    Raises:
        CheckpointError: It is torn, of another format, or not a manifest; says which.
    """
    try:
        data = json.loads(written)
    except ValueError as error:
        raise CheckpointError(
            f"{where} is damaged: {error}. It has {len(written):,} characters; its end may "
            "be missing. Load another checkpoint."
        ) from error
    number = data.get(_FORMAT_KEY) if isinstance(data, dict) else None
    if not isinstance(number, int) or isinstance(number, bool):
        raise CheckpointError(f"{where} is not an nbdist manifest: it has no {_FORMAT_KEY!r}.")
    if number != FORMAT:
        by, advice = "a newer nbdist", "Upgrade nbdist to load it."
        if number < FORMAT:
            by = "an nbdist from before the first release"
            advice = "Load it with that version and save it again."
        versions = data.get("versions")
        version = versions.get("nbdist", "unknown") if isinstance(versions, dict) else "unknown"
        raise CheckpointError(
            f"{where} has format {number}, written by {by} (nbdist {version}); this one reads "
            f"format {FORMAT}. {advice}"
        )
    del data[_FORMAT_KEY]
    try:
        return Value(data, "").record(Checkpoint)
    except Misfit as error:
        raise CheckpointError(f"{where} is damaged: {error}. Load another checkpoint.") from error


def read(folder: Path) -> Checkpoint:
    """The manifest of a folder; its files are not looked at.

    Raises:
        CheckpointError: There is no readable one; names the content instead.
    """
    path = folder / MANIFEST
    try:
        written = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        instead = other_formats.instead(folder, MANIFEST)
        raise CheckpointError(f"No nbdist checkpoint found at {folder}: {instead}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is damaged: it is not a text file. Load another checkpoint."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return parse(written, str(path))


def check_files(folder: Path, checkpoint: Checkpoint, *, reads_all: bool = False) -> None:
    """Refuse a checkpoint with missing, short or changed files.

    Without `reads_all` only lengths are compared; with it every byte is read for the checksums.

    Raises:
        CheckpointError: Names the files, and what is wrong with each.
    """
    wrong = []
    for file in checkpoint.files:
        path = folder / file.name
        try:
            size_bytes = path.stat().st_size
            if size_bytes != file.size_bytes:
                wrong.append(f"{file.name} has {size_bytes:,} bytes instead of {file.size_bytes:,}")
            elif reads_all and (actual := checksum(path)) != file.checksum:
                wrong.append(f"{file.name} has changed ({actual} instead of {file.checksum})")
        except FileNotFoundError:
            wrong.append(f"{file.name} is missing")
        except OSError as error:
            wrong.append(f"{file.name} cannot be read ({error.strerror})")
    if wrong:
        raise CheckpointError(
            f"{folder} is incomplete or damaged: {first_few(wrong, '; ')}. {len(wrong)} of "
            f"{len(checkpoint.files)} files cannot be used. Load another checkpoint, or copy "
            "this one again."
        )


def checksum(path: Path) -> str:
    """`crc32:` and eight digits, of a file; it finds damage, not malice."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            value = zlib.crc32(piece, value)
    return checksum_text(value)


def checksum_text(crc32: int) -> str:
    """A running zlib.crc32 as `SavedFile.checksum`."""
    return f"crc32:{crc32 & 0xFFFFFFFF:08x}"


def first_few(phrases: Sequence[str], between: str = ", ") -> str:
    """The first three, and how many more there are."""
    more = len(phrases) - _MAX_NAMED
    return between.join(phrases[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
