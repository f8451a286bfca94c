"""What was asked of a plan, as typed, and what of it needs neither ranks nor a notebook to read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbdist.errors import OptionError
from nbdist.planner.devices import SAFE_SHARE, Device
from nbdist.planner.lora import with_lora
from nbdist.planner.models import ModelShape, model_of, of_config
from nbdist.planner.workload import Workload
from nbdist.strategy import options

_LARGEST_CONFIG = 1_000_000  # bytes; one of a large model has some thousands


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is planned on. Each field is None, or False, where it was not typed.

    Attributes:
        engine: How memory is counted: fake of a live model, formulas of any other by default.
        inputs: The variable on the ranks that a live model is called with.
        optimizer: By default a live model's own.
        network: GB/s that a host sends to others.
        price: Of an hour of one device.
        tokens: To be trained on.
        copies: dp beside tp or pp as whole copies.
        nodes: Hosts of the ranks.
        keep_free: The part of a device's memory that is to stay free, "10%".
        is_search: All configurations, instead of a row for each strategy.
        lora, targets, quant: As for lora.with_lora.
    """

    ranks: int | None = None
    gpu: str | None = None
    memory: str | None = None
    engine: str | None = None
    inputs: str | None = None
    optimizer: str | None = None
    network: str | float | None = None
    price: str | float | None = None
    tokens: str | float | None = None
    copies: bool = False
    nodes: int | None = None
    keep_free: str | None = None
    is_search: bool = False
    lora: int | None = None
    targets: str | Sequence[str] | None = None
    quant: str | None = None

    @property
    def safe_share(self) -> float:
        """The part of a device's memory below which a plan is safe.

        Raises:
            OptionError: If --keep-free is no percent from 0 to below 100.
        """
        if self.keep_free is None:
            return SAFE_SHARE
        match = re.fullmatch(r"(\d{1,2}(?:\.\d+)?) ?%", str(self.keep_free), re.ASCII)
        if match is None:
            raise OptionError(
                f"--keep-free {self.keep_free} is no percent from 0 up to, but not, 100. It is the "
                "part of each device's memory that has to stay free, such as 10%."
            )
        return 1 - float(match[1]) / 100

    def amount(self, word: str) -> float:
        """The number of an option of AMOUNTS, above 0; 0 where none was typed.

        Raises:
            OptionError: If it is no such number.
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
                f"--{word} {typed} is no number above 0. It is {what}, such as {example}."
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


def with_samples(load: Workload, world_size: int) -> tuple[Workload, tuple[str, ...]]:
    """The load with an effective batch: as typed, or what --batch makes with copies on all ranks.

    Raises:
        OptionError: If both were typed: a search chooses --batch.
    """
    if load.samples:
        if load.batch > 1:
            raise OptionError(
                f"--search chooses what a rank computes at once. Type --samples {load.samples} or "
                f"--batch {load.batch} (a step of {load.batch * world_size} samples), not both."
            )
        return load, ()
    samples = load.batch * world_size
    note = f"--samples {samples}, {load.batch} for each rank"
    return replace(load, samples=samples), (note,)


def with_precision(
    given: dict[str, object], load: Workload, device: Device
) -> tuple[dict[str, object], tuple[str, ...]]:
    """What was typed with the precision in which people train there, unless one was typed.

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
