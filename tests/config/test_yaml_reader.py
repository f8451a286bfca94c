"""Configuration files are read with the places of their values, and changed in them."""

import json
from pathlib import Path

import pytest
import yaml

from nbdist.config.tree import ADD, JSON, REMOVE, RENAME, SET, Fix, apply_fix, plain, remove_flaw
from nbdist.config.yaml_reader import LARGEST, load, read
from nbdist.errors import OptionError

_JSON = """{
  "train_batch_size": 2048,
  "zero_optimization": {
    "stage": 1, // enough
    "reduce_bucket_size": 5e8,
  },
  "fp16": {"enabled": true /* on */},
  "betas": [0.9, 0.999]
}
"""
_YAML = """# mine
distributed_type: FSDP  # two
fsdp_config:
  # inner
  fsdp_version: 2
  fsdp_offload_params:
  lr: 1e-5
deepspeed_config:
  zero_stage: 2
flow: {a: 1, b: 2}
list:
- 1
- x: 2
"""
_PLAIN_JSON = _JSON.replace(" // enough", "").replace(" /* on */", "").replace("5e8,", "5e8")
_FIXES = [
    (Fix(SET, ("train_batch_size",), 2000), ("train_batch_size", 2000)),
    (Fix(SET, ("zero_optimization", "stage"), 3), ("zero_optimization", "stage", 3)),
    (
        Fix(REMOVE, ("zero_optimization", "stage")),
        ("zero_optimization", {"reduce_bucket_size": 5e8}),
    ),
    (Fix(REMOVE, ("zero_optimization", "reduce_bucket_size")), ("zero_optimization", {"stage": 1})),
    (Fix(REMOVE, ("fp16", "enabled")), ("fp16", {})),
    (Fix(REMOVE, ("betas",)), ("betas", None)),
    (Fix(ADD, ("bf16", "enabled"), True), ("bf16", {"enabled": True})),
    (Fix(ADD, ("fp16", "loss_scale"), 0.5), ("fp16", {"enabled": True, "loss_scale": 0.5})),
    (Fix(SET, ("gradient_clipping",), 1.0), ("gradient_clipping", 1.0)),
    (Fix(RENAME, ("betas",), "moments"), ("moments", [0.9, 0.999])),
]
_YAML_FIXES = [
    (Fix(SET, ("distributed_type",), "NO"), ("distributed_type", "NO")),
    (Fix(SET, ("fsdp_config", "lr"), 1e-05), ("fsdp_config", "lr", 1e-05)),
    (
        Fix(SET, ("fsdp_config", "fsdp_offload_params"), False),
        ("fsdp_config", "fsdp_offload_params", False),
    ),
    (Fix(REMOVE, ("fsdp_config", "lr")), ("fsdp_config", "lr", None)),
    (Fix(REMOVE, ("deepspeed_config", "zero_stage")), ("deepspeed_config", {})),
    (Fix(REMOVE, ("deepspeed_config",)), ("deepspeed_config", None)),
    (Fix(REMOVE, ("flow", "b")), ("flow", {"a": 1})),
    (Fix(ADD, ("fsdp_config", "z"), "on"), ("fsdp_config", "z", "on")),
    (Fix(ADD, ("flow", "c"), 3), ("flow", {"a": 1, "b": 2, "c": 3})),
    (Fix(ADD, ("new", "key"), 1), ("new", {"key": 1})),
    (Fix(RENAME, ("list",), "items"), ("items", [1, {"x": 2}])),
]


def test_json_with_comments_and_commas_is_read_and_told() -> None:
    """Each is named with its line; without them it is the JSON that was meant."""
    document = read("ds.json", _JSON)
    flaws = [(flaw.name, flaw.line) for flaw in document.flaws]
    while document.flaws:
        document = read("ds.json", remove_flaw(document, document.flaws[0]))

    assert flaws == [("comment", 4), ("trailing comma", 5), ("comment", 7)]
    assert json.loads(document.text) == plain(read("ds.json", _JSON).root)
    assert document.line("zero_optimization", "reduce_bucket_size") == 5


@pytest.mark.parametrize(("fix", "wanted"), _FIXES)
def test_json_is_changed_in_its_place(fix: Fix, wanted: tuple[object, ...]) -> None:
    """One value changes; the result is JSON, and all else is as it was typed."""
    text = apply_fix(read("ds.json", _PLAIN_JSON), fix)
    json.loads(text)
    *path, value = wanted

    assert read("ds.json", text).value(*map(str, path)) == value
    assert text.count("\n") >= _PLAIN_JSON.count("\n") - 1
    assert text.startswith('{\n  "train_batch_size": 20')


@pytest.mark.parametrize(("fix", "wanted"), _YAML_FIXES)
def test_yaml_is_changed_in_its_place(fix: Fix, wanted: tuple[object, ...]) -> None:
    """One value changes; PyYAML reads the result so, and comments stay."""
    text = apply_fix(read("a.yaml", _YAML), fix)
    *path, value = wanted

    assert read("a.yaml", text).value(*map(str, path)) == value
    assert plain(read("a.yaml", text).root) == yaml.safe_load(text)
    assert "# mine" in text
    assert "  # inner" in text


def test_values_are_those_of_the_formats() -> None:
    """YAML 1.1 reads NO as false and 1e-5 as a text; quotation marks are known."""
    document = read("a", "a: NO\nb: 1e-5\nc: 'no'\nd: &x {e: 1}\nf: *x\ng: 2020-99-99\n")
    entry = document.entry("c")

    assert document.value("a") is False
    assert document.value("b") == "1e-5"
    assert entry is not None
    assert entry.node.is_quoted
    assert document.value("f") == {"e": 1}
    assert read("x", ' {"a": 1}').syntax == JSON


_BROKEN = {
    '{"a": 1': "line 1: a comma or } is missing",
    '{"a" 1}': 'a colon after "a" is missing',
    '{"a": }': "a value is missing",
    '{"a": True}': "write true",
    '{"a": yes}': "strings need double quotation marks",
    "{a: 1}": "a key in double quotation marks, or }, is missing",
    '{"a": "x}': "a quotation mark is not closed",
    "{}\n{}": "line 2: there is something after the end",
    '{"a": ' + "[" * 60: "more than 50 objects",
    "a: [1": "this is not valid YAML",
    "a: b: c": "line 1: this is not valid YAML",
    "- 1": "a configuration is a mapping",
    "": "a configuration is a mapping",
    "a: &x\n  b: *x": "stands for a mapping that it is in itself",
}


@pytest.mark.parametrize("text", _BROKEN)
def test_what_cannot_be_read_is_told_with_its_line(text: str) -> None:
    """Neither format is guessed at; the message has the line and what is missing."""
    with pytest.raises(OptionError) as caught:
        read("mine", text)

    assert _BROKEN[text] in str(caught.value)


def test_repeated_keys_are_told() -> None:
    """Both formats take the last one; it is told where the first one is."""
    for text in ('{"a": 1,\n"a": 2}', "a: 1\na: 2\n"):
        document = read("mine", text)

        assert document.value("a") == 2
        assert [(flaw.name, flaw.line) for flaw in document.flaws] == [("a", 2)]


def test_files_that_are_none_are_told(tmp_path: Path) -> None:
    """A folder, bytes and a file of data are refused."""
    (tmp_path / "data.json").write_bytes(b"\xff" * 10)
    (tmp_path / "large.json").write_text(" " * (LARGEST + 1))
    for name, message in (
        ("", "cannot be read as text"),
        ("data.json", "cannot be read as text"),
        ("large.json", "more than any configuration"),
        ("recipe.toml", "toml files are not read"),
    ):
        with pytest.raises(OptionError, match=message):
            load(tmp_path / name)
