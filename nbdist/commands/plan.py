"""The verb that says whether a model will fit; it needs no ranks."""

from __future__ import annotations

import argparse
import json
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from IPython import get_ipython

from nbdist.core import plan_devices, strategy_options
from nbdist.core.bandwidth import LinkModel
from nbdist.core.footprint import RECIPES
from nbdist.core.plan import plan
from nbdist.core.plan_advice import advise
from nbdist.core.plan_devices import DEVICES, Device
from nbdist.core.plan_load import OPTIMIZERS, Load
from nbdist.core.plan_models import CONFIGS, ModelShape, model_of, of_config
from nbdist.core.topology import Topology
from nbdist.errors import OptionError
from nbdist.notebook import NOTEBOOK
from nbdist.verbs import ANYWHERE, Option, Verb, rank_count, strategy_given
from nbdist.verbs import strategy_options as typed_options
from nbdist.view.mime import View
from nbdist.view.plan import PlanView, shown_plan

_DEVICE = "h100"
_RANKS = 8
_LARGEST_CONFIG = 1_000_000  # bytes; one of a large model has some thousands


@dataclass(frozen=True, slots=True)
class Asked:
    """What is planned on.

    Attributes:
        ranks, gpu, memory: As typed; None where not.
    """

    ranks: int | None = None
    gpu: str | None = None
    memory: str | None = None


def planned(
    model: Any,
    asked: Asked,
    load: Load,
    strategy: str | None = None,
    given: Mapping[str, object] | None = None,
) -> PlanView:
    """Plan for a model.

    Args:
        model: A number of parameters, a name, the path of a config.json, a config (a mapping, or
            anything with `to_dict`, as transformers' configs), or a model that has such a config.
        asked: On how many ranks, on which device.
        load: What is trained with.
        strategy: A name; None for all.
        given: Its degrees and options.

    Raises:
        OptionError: If a word does not exist, or degrees do not fit.
    """
    shape = _shape(model)
    given = dict(given or {})
    device, measured, assumed = _device(asked)
    world_size, told = _ranks(asked, given)
    if measured is not None and measured.world_size != world_size:
        measured = None
    found = plan(
        shape, device, world_size, load, strategy=strategy, given=given, measured=measured,
        assumed=(*assumed, *told),
    )  # fmt: skip
    return shown_plan(found, advise(found, given, measured))


def _shape(model: Any) -> ModelShape:
    if isinstance(model, Mapping):
        return of_config(model)
    config = getattr(model, "config", model)
    if callable(getattr(config, "to_dict", None)):
        return of_config(config.to_dict())
    if isinstance(model, str | Path) and (text := _read(Path(model))) is not None:
        return text
    if isinstance(model, str | int | float) and not isinstance(model, bool):
        return model_of(model)
    raise OptionError(
        f"A {type(model).__name__} is no model to plan for. Give its number of parameters, its "
        "name, or its config."
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
                f"{file} is larger than any config.json: {file.stat().st_size} bytes."
            )
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} cannot be read as a config.json ({error}).") from error
    if not isinstance(config, dict):
        raise OptionError(f"{file} is no config.json: it holds a {type(config).__name__}.")
    return of_config(config, name=path.name if path.is_dir() else "")


def _device(asked: Asked) -> tuple[Device, LinkModel | None, tuple[str, ...]]:
    """The device, what was measured between the ranks if it is theirs, and what is assumed."""
    if asked.gpu is not None and asked.memory is not None:
        raise OptionError("Type --gpu or --memory, not both.")
    if asked.gpu is not None:
        return plan_devices.device_of(asked.gpu), None, ()
    if asked.memory is not None:
        return plan_devices.with_memory(asked.memory), None, ()
    default = DEVICES[_DEVICE]
    if not NOTEBOOK.is_running:
        return default, None, (f"--gpu {_DEVICE}",)
    topology, last = NOTEBOOK.session.topology, NOTEBOOK.session.bandwidth.last
    device, told = _of_ranks(topology)
    model = last.model if device is not None and last is not None and not last.caveat else None
    return device or default, model, told


def _of_ranks(topology: Topology) -> tuple[Device | None, tuple[str, ...]]:
    """What the running ranks have, if the catalogue knows it, and what is told of that."""
    first = topology.ranks[0]
    device = plan_devices.known_as(first.device_name)
    if device is None:
        why = f", as {first.device_name} is not in the catalogue" if first.device_name else ""
        return None, (f"--gpu {_DEVICE}{why}",)
    sharing = max(Counter(place.device_uuid for place in topology.ranks).values())
    if sharing == 1:
        return device, (f"--gpu {device.name}, as the ranks here have",)
    shared = replace(device, memory_bytes=device.memory_bytes / sharing)
    return shared, (f"--gpu {device.name}, which {sharing} ranks share here",)


def _ranks(asked: Asked, given: Mapping[str, object]) -> tuple[int, tuple[str, ...]]:
    """As typed, or as the degrees make it, or as many as run."""
    if asked.ranks is not None:
        return asked.ranks, ()
    degrees = {**strategy_options.read(given).degrees, "replicas": 1}
    product = math.prod(degrees.values())
    if product > 1:
        return product, (f"--ranks {product}, as the degrees make them",)
    if NOTEBOOK.is_running:
        count = NOTEBOOK.session.topology.world_size
        return count, (f"--ranks {count}, as run here",)
    return _RANKS, (f"--ranks {_RANKS}",)


def dist_plan(values: Namespace) -> View:
    """Plan for what was typed."""
    if len(values.model) != 1:
        raise OptionError(
            "%dist_plan: name one model: its number of parameters (7e9), the path of a "
            f"config.json, or one of {', '.join(CONFIGS)}."
        )
    given = strategy_given(values)
    others = [word for word in ("bf16", "fp16") if given[word]]
    if values.is_fp32 and (others or (values.precision or "fp32") != "fp32"):
        raise OptionError(f"%dist_plan: --fp32 and --{[*others, 'precision'][0]} contradict.")
    if values.checkpoints_all:
        given["checkpoint"] = given["checkpoint"] or "full"
    load = Load(
        values.batch, values.sequence, values.optimizer, values.recipe or "", values.samples or 0
    )
    asked = Asked(values.ranks, values.gpu, values.memory)
    return planned(_named(values.model[0]), asked, load, values.strategy, given)


def _named(text: str) -> Any:
    """The notebook's variable of that name, if it is a config or has one; else the text."""
    shell = get_ipython()
    value = None if shell is None else shell.user_ns.get(text)
    has_config = isinstance(value, Mapping) or hasattr(getattr(value, "config", value), "to_dict")
    return value if has_config else text


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 10^9")
    return int(text)


VERBS = (
    Verb(
        "dist_plan",
        "Say whether a model will fit, under which strategy, and what to choose.",
        "%dist_plan llama-3-8b --ranks 8 --gpu h100 --bf16 --seq 4096",
        dist_plan,
        (
            Option(
                ("model",),
                "parameters (7e9, 7B), a name such as llama-3-8b, or the path of a config.json",
                metavar="MODEL",
            ),
            Option(("--strategy",), "one alone (without: a row for each)", metavar="NAME"),
            Option(("--ranks", "-n"), "ranks (those that run, or 8)", rank_count, metavar="N"),
            Option(("--gpu",), f"of {', '.join(DEVICES)} (h100)", metavar="NAME"),
            Option(("--memory",), "of another device: 24GB", metavar="SIZE"),
            Option(("--batch",), "samples of a data-parallel rank (1)", _count, 1, "B"),
            Option(
                ("--seq",), "tokens of a sample (2048)", _count, 2048, "S", name="sequence"
            ),
            Option(
                ("--samples",),
                "of all ranks in a step, the effective batch; sets --accumulate",
                _count,
                metavar="N",
            ),
            Option(
                ("--optimizer",), f"of {', '.join(OPTIMIZERS)} (adamw)", str, "adamw", "NAME"
            ),
            Option(
                ("--recipe",),
                f"what is stored: of {', '.join(RECIPES)} (as nbdist stores it)",
                metavar="NAME",
            ),
            Option(("--fp32",), "compute in fp32, the default", None, name="is_fp32"),
            Option(("--ac",), "as --checkpoint full", None, name="checkpoints_all"),
            *typed_options(),
        ),
        place=ANYWHERE,
    ),
)  # fmt: skip
