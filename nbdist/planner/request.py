"""The request for a plan as given, and its parts that need no ranks or notebook to read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbdist.core.option import option, positive_number, rank_count, switch, whole_number
from nbdist.errors import OptionError
from nbdist.planner.devices import DEVICES, PER_HOST, SAFE_SHARE, Device
from nbdist.planner.lora import QUANTS, TARGETS, with_lora
from nbdist.planner.models import ModelShape, model_of, of_config
from nbdist.planner.plan import SearchSpace
from nbdist.planner.workload import OPTIMIZERS, Workload
from nbdist.strategy import options
from nbdist.strategy.footprint import RECIPES
from nbdist.strategy.table import ROWS

# How memory is counted: closed formulas, or a step with fake tensors in a process of its own.
ENGINES = ("formulas", "fake")
OPTIMIZER = "adamw"
_LARGEST_CONFIG = 1_000_000  # bytes; one of a large model has some thousands
_count = whole_number("a whole number from 1 to 10^9", most=10**9)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A plan's subject, strategy and devices. A field is None or False if it was not given."""

    strategy: str | None = option("one strategy (default: a row for each)", "NAME", choices=ROWS)
    ranks: int | None = option(
        "number of ranks (default: those running, or 8)", "N", rank_count, flags=("--ranks", "-n")
    )
    gpu: str | None = option(
        f"one of {', '.join(DEVICES)} (default: what the ranks have, or h100)",
        "NAME",
        choices=DEVICES,
    )
    memory: str | None = option("memory of a GPU that is not listed: 24GB", "SIZE")
    network: str | float | None = option(
        "GB/s that a host sends to others, all ports together (default: as hosts with that GPU "
        "commonly have)",
        "GB/S",
    )
    batch: int = option("samples per data-parallel rank (default: 1)", "B", _count, 1)
    sequence: int = option("tokens per sample (default: 2048)", "S", _count, 2048, flags=("--seq",))
    samples: int | None = option(
        "samples of all ranks per step, the effective batch; sets --accumulate", "N", _count
    )
    imbalance: float = option(
        "rows of the rank that gets most of those that share experts, by their mean (default: 1, "
        "equally many)",
        "X",
        positive_number,
        1.0,
    )
    price: str | float | None = option("of one GPU for an hour, such as 2.50: adds costs", "P")
    tokens: str | float | None = option("tokens to train on, such as 500e6: adds GPU-hours", "N")
    copies: bool = switch(
        "dp beside tp or pp keeps whole copies, as Megatron does (default: as nbdist, which shards "
        "there)"
    )
    is_search: bool = switch(
        "all configurations that fit (degrees, sharding, micro-batches, recomputation, precision), "
        "the fastest first, with the same samples in a step",
        "--search",
    )
    nodes: int | None = option(
        f"hosts of the ranks (default: {PER_HOST} ranks on each, or those running)", "N", rank_count
    )
    keep_free: str | None = option(
        "the part of each device's memory that has to stay free, such as 10%% (default: 20%%)",
        "PERCENT",
    )
    optimizer: str | None = option(
        f"one of {', '.join(OPTIMIZERS)} (default: {OPTIMIZER})", "NAME", choices=OPTIMIZERS
    )
    lora: int | None = option(
        "rank r of LoRA's adapters, beside which all is frozen",
        "R",
        whole_number("a rank of adapters (1 or more)"),
    )
    targets: str | Sequence[str] | None = option(
        "layers with adapters, with commas (default: q_proj,v_proj, or c_attn, as PEFT)",
        "NAMES",
        choices=TARGETS,
    )
    quant: str | None = option(
        f"with --lora: frozen linear layers in 4 bits, one of {', '.join(QUANTS)}",
        "NAME",
        choices=QUANTS,
    )
    recipe: str | None = option(
        f"what is stored, one of {', '.join(RECIPES)} (default: as nbdist stores it)",
        "NAME",
        choices=RECIPES,
    )
    engine: str | None = option(
        "how memory is counted: formulas, or fake, a step with fake tensors (default: formulas; "
        "fake for a model on the ranks)",
        "NAME",
        choices=ENGINES,
    )
    inputs: str | None = option(
        "a variable on the ranks with a live model's inputs: a tensor, tuple or dict", "NAME"
    )
    is_check: bool = switch(
        "run a real step of a model on the ranks; compare measured with predicted", "--check"
    )
    is_fp32: bool = switch(
        "compute in fp32 (default: bf16; fp16 on a GPU without it, fp32 on the CPU)", "--fp32"
    )
    checkpoints_all: bool = switch("same as --checkpoint full", "--ac")

    @property
    def load(self) -> Workload:
        """Workload that a step trains with."""
        return Workload(
            self.batch, self.sequence, self.optimizer or OPTIMIZER, self.recipe or "",
            self.samples or 0, imbalance=self.imbalance,
        )  # fmt: skip

    def options(self, given: Mapping[str, object]) -> dict[str, object]:
        """Degrees and options that were typed, with those that have a shorter word here.

        Raises:
            OptionError: If two precisions were typed.
        """
        if self.is_fp32 and (others := [word for word in ("bf16", "fp16") if given.get(word)]):
            raise OptionError(f"%dist_plan: --fp32 and --{others[0]} contradict each other.")
        more: dict[str, object] = {"precision": "fp32"} if self.is_fp32 else {}
        if self.checkpoints_all:
            more["checkpoint"] = given.get("checkpoint") or "full"
        typed = {**given, **more}
        return {word: v for word, v in typed.items() if v is not None and v is not False}

    @property
    def safe_share(self) -> float:
        """The part of a device's memory below which a plan is safe.

        Raises:
            OptionError: If --keep-free is not a percentage from 0% to below 100%.
        """
        if self.keep_free is None:
            return SAFE_SHARE
        match = re.fullmatch(r"(\d{1,2}(?:\.\d+)?) ?%", str(self.keep_free), re.ASCII)
        if match is None:
            raise OptionError(
                f"--keep-free {self.keep_free} is not a percentage from 0% to below 100%. It "
                "is the part of each device's memory that has to stay free, such as 10%."
            )
        return 1 - float(match[1]) / 100

    def amount(self, word: str) -> float:
        """The positive number of an option of AMOUNTS; 0 where none was given.

        Raises:
            OptionError: If it is not a positive number.
        """
        typed = getattr(self, word)
        if typed is None:
            return 0.0
        try:
            value = float(typed)
        except (TypeError, ValueError):
            value = math.nan
        if not 0 < value < math.inf:
            what, example = AMOUNTS[word]
            raise OptionError(
                f"--{word} {typed} is not a positive number. It is {what}, such as {example}."
            )
        return value

    def adapted(self, model: ModelShape, *, is_live: bool) -> ModelShape:
        """The model with the adapters that were typed.

        Raises:
            OptionError: As with_lora; or the model is on the ranks, or has to be run.
        """
        if self.lora is not None and is_live:
            raise OptionError(
                f"--lora adds adapters to a model by its name, its number or a config, and "
                f"{model.name} is on the ranks. Add them there with peft.get_peft_model, and plan "
                "it without --lora."
            )
        if self.lora is not None and self.engine == "fake":
            raise OptionError(
                "--lora is counted by formulas. Leave --engine fake out, or make the model with "
                "peft on the ranks and plan its variable."
            )
        return with_lora(model, self.lora, self.targets, self.quant)

    def check_search(self) -> None:
        """Refuse what a search has no use for.

        Raises:
            OptionError: With what to leave out.
        """
        if self.engine == "fake":
            raise OptionError("--search counts by formulas. Leave --engine fake out.")
        if self.copies:
            raise OptionError(
                "--search takes what nbdist can run, and dp beside tp or pp is sharded there. "
                "Leave --copies out."
            )


# What a number of an option is, and one of them.
AMOUNTS = {
    "network": ("the GB/s that a host can send to others, all its ports together", "400"),
    "price": ("the price of one GPU for an hour", "2.50"),
    "tokens": ("the number of tokens to train on", "500e6"),
}


def with_samples(space: SearchSpace) -> SearchSpace:
    """Set the effective batch of a search: as given, or --batch on all ranks.

    Raises:
        OptionError: If both were typed: a search chooses --batch.
    """
    load, together = space.load, space.load.batch * space.world_size
    if load.samples and load.batch > 1:
        raise OptionError(
            f"--search chooses what a rank computes at once. Type --samples {load.samples} or "
            f"--batch {load.batch} (a step of {together} samples), not both."
        )
    if load.samples:
        return space
    note = f"--samples {together}, {load.batch} for each rank"
    return replace(
        space, load=replace(load, samples=together), each=load.batch,
        assumed=(*space.assumed, note),
    )  # fmt: skip


def with_precision(
    given: dict[str, object], load: Workload, device: Device
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Set the precision in which people train there, unless one was given.

    A recipe says which: what is stored in fp32 is computed in it.
    """
    if "precision" in options.read(given)[1]:
        return given, ()
    usual = "fp32" if load.recipe == "fp32" else device.usual_precision
    whys = {"fp16": f", as {device.title} has no bf16", "fp32": ", as is usual on a CPU"}
    why = "" if load.recipe == "fp32" else whys.get(usual, "")
    return {**given, "precision": usual}, (f"--{usual}{why}",)


def shape_asked_for(model: Any) -> ModelShape:
    """The model of a number, a name, a config.json's path, a config, or what has one.

    Raises:
        OptionError: If it is none of these, or no formula knows it.
    """
    if isinstance(model, Mapping):
        return of_config(model)
    config = getattr(model, "config", model)
    if callable(getattr(config, "to_dict", None)):
        return of_config(config.to_dict())
    if isinstance(model, str | Path) and (shape := _read(Path(model))) is not None:
        return shape
    if isinstance(model, str | int | float) and not isinstance(model, bool):
        return model_of(model)
    raise OptionError(
        f"A {type(model).__name__} is not a model to plan for. Give a number of parameters, a "
        "name, or a config."
    )


def _read(path: Path) -> ModelShape | None:
    """The model of a config.json, or of the folder that it lies in; None where it is no path."""
    try:
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            if path.suffix == ".json":
                raise OptionError(f"There is no file {path}.")
            return None
        if file.stat().st_size > _LARGEST_CONFIG:
            raise OptionError(
                f"{file} is too large for a config.json: {file.stat().st_size:,} bytes."
            )
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} cannot be read as a config.json ({error}).") from error
    if not isinstance(config, dict):
        raise OptionError(f"{file} is not a config.json: it holds a {type(config).__name__}.")
    return of_config(config, name=path.name if path.is_dir() else "")
