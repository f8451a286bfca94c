"""A configuration file as a strategy: what `%dist_config FILE --apply` puts under live models.

The reverse of `config.emit`: a file that was written for a strategy is read as that strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbdist.config.check import kind_of
from nbdist.config.emit import SHARDING
from nbdist.config.report import ACCELERATE, DEEPSPEED, TRANSFORMERS, is_count, is_true, show_value
from nbdist.config.tree import Document, join_path
from nbdist.errors import OptionError
from nbdist.strategy.choose import StrategySpec

Path = tuple[str, ...]

# Accelerate's distributed_type -> the strategy; DEEPSPEED and FSDP are settled by their own keys.
_TYPES = {
    "NO": "single", "MULTI_CPU": "ddp", "MULTI_GPU": "ddp", "MULTI_HPU": "ddp", "MULTI_MLU": "ddp",
    "MULTI_MUSA": "ddp", "MULTI_NPU": "ddp", "MULTI_SDAA": "ddp", "MULTI_XPU": "ddp",
}  # fmt: skip
# FSDP1's sharding strategy -> --shard; Accelerate takes torch's number of it as well.
_SHARDS = {"NO_SHARD": "", **{name: word for word, name in SHARDING.items()}}
_NUMBERED = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}
_NO_CHOICE = ("auto", None)
# Keys that say how Accelerate starts processes: these ranks have been started.
_OF_THE_LAUNCH = {
    "compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "gpu_ids",
    "machine_rank", "main_process_ip", "main_process_port", "main_training_function",
    "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "use_cpu",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileStrategy:
    """The strategy of a file.

    Attributes:
        left: Keys of the file that the strategy does not need or cannot have, with their values;
            without those that say how processes are started.
    """

    spec: StrategySpec
    left: tuple[str, ...]


class _Reader:
    """The values of a file, each noted as read."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.read: set[Path] = set()

    def value(self, *path: str) -> Any:
        """A value, and None for `auto` as well: whoever starts the training fills that in."""
        self.read.add(path)
        value = self.document.value(*path)
        return None if value in _NO_CHOICE else value

    def unread(self, path: Path = ()) -> Iterator[str]:
        """Keys that nobody has asked for, with their values."""
        for entry in self.document.entries(*path):
            below = (*path, entry.key)
            if self.document.entries(*below):
                yield from self.unread(below)
            elif below not in self.read and entry.key not in _OF_THE_LAUNCH:
                yield f"{join_path(below)}: {show_value(self.document.value(*below))}"


def read_strategy(document: Document, named: tuple[Document, ...] = ()) -> FileStrategy:
    """Read the strategy of a configuration of Accelerate, DeepSpeed or transformers.

    Args:
        document: The file.
        named: Files that it names, such as DeepSpeed's.

    Raises:
        OptionError: If the file is of another kind, or says a strategy that nbdist does not have.
    """
    kind = kind_of(document)
    if kind not in _READERS:
        formats = ", ".join(_READERS)
        raise OptionError(
            f"{document.name} has no strategy to apply: it is "
            f"{kind or 'no format that is known'}. Formats with one: {formats}."
        )
    reader = _Reader(document)
    files = [_Reader(other) for other in named if kind_of(other) == DEEPSPEED]
    name, settings = _READERS[kind](reader, files)
    spec = StrategySpec.parse(name, settings)
    assert spec is not None  # each reader gives a name
    return FileStrategy(spec, tuple(key for file in (reader, *files) for key in file.unread()))


def _accelerate(file: _Reader, files: list[_Reader]) -> tuple[str, dict[str, object]]:
    kind = str(file.value("distributed_type") or "NO")
    settings: dict[str, object] = {}
    precision = file.value("mixed_precision")
    if precision == "fp8":
        raise _refused(file, ("mixed_precision",), "no strategy here computes in fp8")
    if precision in ("bf16", "fp16"):
        settings["precision"] = precision
    backend = str(file.value("dynamo_config", "dynamo_backend") or "NO")
    if backend.upper() == "INDUCTOR":
        settings["is_compiled"] = True
    elif backend.upper() != "NO":
        path = ("dynamo_config", "dynamo_backend")
        raise _refused(file, path, "torch.compile runs with INDUCTOR here")
    if kind == "FSDP":
        return _fsdp(file, settings)
    if kind == "DEEPSPEED":
        return _accelerates_deepspeed(file, files, settings)
    if kind not in _TYPES:
        raise _refused(
            file, ("distributed_type",), f"known are {', '.join(_TYPES)}, FSDP, DEEPSPEED"
        )
    mesh = _mesh(file)
    split = next((axis for axis in ("tp", "cp") if axis in mesh), "")
    return split or _TYPES[kind], settings | mesh


def _fsdp(file: _Reader, settings: dict[str, object]) -> tuple[str, dict[str, object]]:
    def value(key: str) -> Any:
        named = file.value("fsdp_config", f"fsdp_{key}")
        return file.value("fsdp_config", key) if named is None else named

    if is_true(value("activation_checkpointing")):
        settings["checkpoint"] = "full"
    if is_true(value("offload_params")):
        settings["offload"] = "cpu"
    if str(value("version") or 1) == "2":
        if str(value("reshard_after_forward")).lower() == "false":
            settings["shard"] = "grad-op"
        return "fsdp", settings | _mesh(file)
    name = str(value("sharding_strategy") or "FULL_SHARD").upper()
    shard = _SHARDS.get(_NUMBERED.get(name, name))
    if shard is None:
        path = ("fsdp_config", "fsdp_sharding_strategy")
        raise _refused(file, path, f"known are {', '.join(_SHARDS)}")
    return ("fsdp1", settings | {"shard": shard}) if shard else ("ddp", settings)


def _accelerates_deepspeed(
    file: _Reader, files: list[_Reader], settings: dict[str, object]
) -> tuple[str, dict[str, object]]:
    section = "deepspeed_config"
    if file.value(section, "deepspeed_config_file") is not None:
        if not files:
            path = (section, "deepspeed_config_file")
            raise _refused(file, path, "that file is not there; name it with --with")
        name, of_file = _deepspeed(files[0], [])
        return name, settings | of_file
    stage = file.value(section, "zero_stage")
    steps = file.value(section, "gradient_accumulation_steps")
    devices = [file.value(section, f"offload_{part}_device") for part in ("optimizer", "param")]
    return _of_stage(
        file, (section, "zero_stage"), 2 if stage is None else stage, steps, devices, settings
    )


def _deepspeed(file: _Reader, _files: list[_Reader]) -> tuple[str, dict[str, object]]:
    zero = "zero_optimization"
    enabled = [name for name in ("fp16", "bf16") if is_true(file.value(name, "enabled"))]
    settings: dict[str, object] = {"precision": enabled[0]} if enabled else {}
    devices = [file.value(zero, f"offload_{part}", "device") for part in ("optimizer", "param")]
    stage = file.value(zero, "stage")
    steps = file.value("gradient_accumulation_steps")
    return _of_stage(file, (zero, "stage"), stage or 0, steps, devices, settings)


def _of_stage(
    file: _Reader, path: Path, stage: object, steps: object, devices: list[Any],
    settings: dict[str, object],
) -> tuple[str, dict[str, object]]:  # fmt: skip
    if is_count(steps) and steps != 1:
        settings["accumulate"] = steps
    if stage not in (0, 1, 2, 3):
        raise _refused(file, path, "DeepSpeed has stages 0 to 3")
    if stage == 0:
        return "ddp", settings
    if device := next((device for device in devices if device not in (None, "none")), None):
        settings["offload"] = device
    return "deepspeed", settings | {"stage": stage}


def _transformers(file: _Reader, _files: list[_Reader]) -> tuple[str, dict[str, object]]:
    sizes = {word: _count(file.value(f"{word}_size")) for word in ("pp", "tp", "ep", "fsdp")}
    copies, shards = _count(file.value("dp_replicate_size")), sizes.pop("fsdp")
    settings: dict[str, object] = {word: size for word, size in sizes.items() if size > 1}
    if is_true(file.value("fsdp_cpu_offload")):
        settings["offload"] = "cpu"
    if is_true(file.value("fsdp_mixed_precision")):
        settings["precision"] = "bf16"
    settings |= _hybrid(copies, shards)
    split = next((word for word in ("pp", "tp") if word in settings), "ddp")
    return "fsdp" if shards > 1 else split, settings


def _mesh(file: _Reader) -> dict[str, object]:
    """The degrees of parallelism_config; dp is what they leave of the ranks."""
    section = "parallelism_config"

    def size(key: str) -> int:
        named = file.value(section, f"{section}_{key}_size")
        return _count(file.value(section, f"{key}_size") if named is None else named)

    settings: dict[str, object] = {word: size(word) for word in ("tp", "cp") if size(word) > 1}
    return settings | _hybrid(size("dp_replicate"), size("dp_shard"))


def _hybrid(copies: int, shards: int) -> dict[str, object]:
    """Options for shards within copies of the model; none where there is only one of the two."""
    return {"shard": "hybrid", "replicas": copies} if copies > 1 and shards > 1 else {}


def _count(value: Any) -> int:
    return value if is_count(value) else 1


def _refused(file: _Reader, path: Path, why: str) -> OptionError:
    document, value = file.document, show_value(file.document.value(*path))
    return OptionError(
        f"{document.name}, line {document.line(*path)}: {join_path(path)} is {value}; {why}."
    )


_READERS: Mapping[str, Callable[[_Reader, list[_Reader]], tuple[str, dict[str, object]]]] = {
    ACCELERATE: _accelerate,
    DEEPSPEED: _deepspeed,
    TRANSFORMERS: _transformers,
}
