"""A file as a strategy: what was written for one is read as it, and the rest is named."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.config import distributed_config, emit, yaml_reader
from nbdist.config.emit import Setting
from nbdist.config.strategy_file import FileStrategy, read_strategy
from nbdist.config.tree import JSON, YAML, Document
from nbdist.errors import OptionError
from nbdist.strategy.choose import StrategySpec, choose

# Every strategy and option that a file of one of the three tools can say.
SAID = [
    ("single", {}), ("ddp", {}), ("ddp", {"precision": "bf16", "is_compiled": True}),
    ("fsdp", {}), ("fsdp", {"shard": "grad-op"}), ("fsdp", {"shard": "hybrid", "replicas": 2}),
    ("fsdp", {"tp": 2, "precision": "bf16"}), ("fsdp", {"checkpoint": "full", "offload": "cpu"}),
    ("fsdp1", {}), ("fsdp1", {"shard": "grad-op"}), ("tp", {}), ("pp", {}), ("pp", {"tp": 2}),
    ("deepspeed", {"stage": 3, "offload": "nvme", "precision": "fp16"}),
    ("deepspeed", {"stage": 2, "accumulate": 4}), ("deepspeed", {"stage": 1}),
]  # fmt: skip
_DEEPSPEED = """distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  offload_param_device: none
  gradient_accumulation_steps: 2
"""


def yaml(text: str) -> Document:
    return yaml_reader.read("a.yaml", text, YAML)


def json(text: str) -> Document:
    return yaml_reader.read("a.json", text, JSON)


@pytest.mark.parametrize(("name", "settings"), SAID)
def test_what_is_written_for_a_strategy_is_read_as_it(name: str, settings: dict[str, Any]) -> None:
    """In each tool's form that it has; transformers has no key for recomputation."""
    ranks = 1 if name == "single" else 4
    setting = Setting(choose(name, settings, ranks), blocks=("Block",))
    texts = {
        form: (read, write(setting))
        for form, read, write in (
            ("yaml", yaml, emit.accelerate_text),
            ("deepspeed", json, emit.deepspeed_text),
            ("transformers", json, distributed_config.text),
        )
    }
    forms = {form: read(text) for form, (read, text) in texts.items() if isinstance(text, str)}
    beside = (forms["deepspeed"],) if "deepspeed" in forms else ()

    assert forms
    for form, document in forms.items():
        read = read_strategy(document, beside if form == "yaml" else ())
        lacks = {"checkpoint"} if form == "transformers" else set()
        said = {word: value for word, value in settings.items() if word not in lacks}
        assert read.spec.choose(ranks) == choose(name, said, ranks), form


def strategy(document: Document) -> tuple[str | None, dict[str, object]]:
    spec = read_strategy(document).spec
    return spec.name, dict(spec.settings)


@pytest.mark.parametrize(
    ("text", "name", "settings"),
    [
        ("distributed_type: MULTI_GPU\nmixed_precision: fp16\n", "ddp", {"precision": "fp16"}),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 2\n", "fsdp1",
         {"shard": "grad-op"}),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: NO_SHARD\n", "ddp", {}),
        (_DEEPSPEED, "deepspeed", {"stage": 3, "accumulate": 2}),
        ("distributed_type: MULTI_GPU\nparallelism_config:\n  parallelism_config_tp_size: 2\n",
         "tp", {"tp": 2}),
    ],
)  # fmt: skip
def test_files_of_others(text: str, name: str, settings: dict[str, object]) -> None:
    """As people write them, with the defaults of Accelerate where they say nothing."""
    assert strategy(yaml(text)) == (name, settings)


def test_auto_says_nothing() -> None:
    """Whoever starts the training fills that in."""
    document = json('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}')

    assert strategy(document) == ("deepspeed", {"stage": 2})


def test_the_rest_of_a_file_is_named() -> None:
    """Keys that are of no strategy, and keys that nbdist has nothing for."""
    text = (
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
    )
    expected = ("num_processes: 8", "fsdp_config.fsdp_state_dict_type: SHARDED_STATE_DICT")

    assert read_strategy(yaml(text)) == FileStrategy(StrategySpec("fsdp"), expected)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (yaml("distributed_type: MEGATRON_LM\n"), "line 1: distributed_type is MEGATRON_LM; known"),
        (yaml("distributed_type: NO\nmixed_precision: fp8\n"), "line 2: mixed_precision is fp8"),
        (yaml("distributed_type: NO\ndynamo_config:\n  dynamo_backend: EAGER\n"), "is EAGER;"),
        (yaml("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SOME\n"), "is SOME"),
        (yaml("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: b.json\n"),
         "is b.json; that file is not there; name it with --with"),
        (json('{"zero_optimization": {"stage": 4}}'), "stage is 4; DeepSpeed has stages 0 to 3"),
        (json('{"nothing": 1}'), "has no strategy to apply"),
    ],
)  # fmt: skip
def test_what_no_strategy_has_is_refused(document: Document, message: str) -> None:
    """With the line, and what there is."""
    with pytest.raises(OptionError, match=message):
        read_strategy(document)
