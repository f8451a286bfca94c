"""A manifest comes back as it was written; what is no whole checkpoint is told for what it is."""

import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.checkpoint import manifest
from nbdist.checkpoint.manifest import (
    Checkpoint,
    SavedFile,
    SavedModel,
    SavedOptimizer,
    SavedTensor,
    Versions,
)
from nbdist.checkpoint.mismatch import mismatches
from nbdist.core.finding import BAD, WARN
from nbdist.errors import CheckpointError
from nbdist.strategy.choose import choose

MODEL = SavedModel(
    "Net",
    (SavedTensor("wte.weight", (100, 8), "float32"), SavedTensor("norm.count", (), "int64")),
    {"head.weight": "wte.weight"},
)
OPTIMIZER = SavedOptimizer(
    "AdamW", (("wte.weight",),), ({"lr": 1e-3, "betas": [0.9, 0.95]},), ("exp_avg", "step")
)
WHOLE = Checkpoint(
    models=(MODEL,),
    optimizers=(OPTIMIZER,),
    versions=Versions("0.9.0", "2.13.0", "1.15.0", "3.12.1"),
    world_size=4,
    strategy=choose("fsdp", {"tp": 2, "precision": "bf16"}, 4),
    saved_s=1.7e9,
    files=(SavedFile("__0_0.distcp", 5, "crc32:3610a686"),),
    schedulers=({"last_epoch": 3, "_last_lr": [0.1]},),
    loaders=({"epoch": 1, "position": 7},),
    random=({"torch": "AAEC"}, {"torch": "AwQF"}),
    step=17,
)


def _write(folder: Path, saved: Checkpoint = WHOLE) -> None:
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"hello")
    (folder / manifest.MANIFEST).write_text(manifest.text(saved))


@pytest.mark.parametrize("saved", [WHOLE, replace(WHOLE, scaler={"scale": 65536.0}, models=())])
def test_a_manifest_comes_back_as_it_was_written(saved: Checkpoint) -> None:
    """All records, with tuples, degrees and options, are equal after JSON."""
    assert manifest.parse(manifest.text(saved), "there") == saved


def test_a_field_of_a_later_version_is_passed_over() -> None:
    """Within a format, fields can be added: older ones are read with their defaults."""
    data = json.loads(manifest.text(WHOLE))
    data["colour"] = "red"
    data["strategy"]["options"]["shine"] = 3
    del data["strategy"]["options"]["sdpa"], data["extra"], data["scaler"]

    assert manifest.parse(json.dumps(data), "there") == WHOLE


def _with(path: str, value: object) -> Callable[[dict[str, object]], None]:
    def change(data: dict[str, object]) -> None:
        *ways, last = path.split(".")
        inner = data
        for way in ways:
            inner = inner[int(way) if isinstance(inner, list) else way]  # type: ignore[assignment,index]
        inner[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with("nbdist_checkpoint", 2), "format 2, written by a newer nbdist (nbdist 0.9.0)"),
        (_with("nbdist_checkpoint", 0), "reads format 1. Load it with that version"),
        (_with("nbdist_checkpoint", True), "not an nbdist manifest"),
        (lambda data: data.pop("nbdist_checkpoint"), "not an nbdist manifest"),
        (lambda data: data.pop("models"), "damaged: models is missing"),
        (_with("models", None), "models is nothing, not a list"),
        (_with("models.0.tensors.0.shape", 3), "models[0].tensors[0].shape is a whole number"),
        (
            _with("models.0.tensors.0.shape", [3, "4"]),
            "shape[1] is a text ('4'), not a whole number",
        ),
        (_with("world_size", True), "world_size is true or false (True), not a whole number"),
        (_with("strategy.degrees", 3), "strategy.degrees is a whole number (3), not a dict"),
        (_with("models.0.tied", {"a": 1}), "models[0].tied.a is a whole number (1), not a text"),
    ],
)
def test_a_manifest_that_cannot_be_used_says_why(
    change: Callable[[dict[str, object]], None], message: str
) -> None:
    """Other formats and fields of other types are named, with their place."""
    data = json.loads(manifest.text(WHOLE))
    change(data)

    with pytest.raises(CheckpointError) as caught:
        manifest.parse(json.dumps(data), "here/nbdist.json")

    assert message in str(caught.value)
    assert "here/nbdist.json" in str(caught.value)


def test_every_torn_manifest_is_refused() -> None:
    """Whatever number of its characters is there, half a file is no checkpoint."""
    written = manifest.text(WHOLE).rstrip()

    for count in range(len(written)):
        with pytest.raises(CheckpointError, match="is damaged"):
            manifest.parse(written[:count], "there")


def test_values_that_are_no_plain_ones_are_refused_before_anything_is_written() -> None:
    """A scheduler with a function in its state is refused, not written as text."""
    with pytest.raises(CheckpointError, match="function is not JSON serializable"):
        manifest.text(replace(WHOLE, schedulers=({"lambda": lambda: 1},)))


def _legacy_torch(path: Path) -> None:
    with path.open("wb") as file:
        pickle.dump(0x1950A86A20F9469CFC6C, file, protocol=2)
        pickle.dump(1001, file, protocol=2)


def _torch_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights/data.pkl", b"")


def _folder(*names: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).touch()

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "the path does not exist"),
        (lambda path: _folder("step1/nbdist.json")(path.parent), "Checkpoints next to it: step1."),
        (lambda path: path.mkdir(), "the folder is empty"),
        (_folder(".metadata", "__0_0.distcp"), "torch.distributed.checkpoint without nbdist's"),
        (_folder("__0_0.distcp"), "no .metadata: a save that was not finished"),
        (_folder("config.json", "model-00001-of-00002.safetensors"), "from_pretrained(PATH)"),
        (_folder("model.safetensors", "random_states_0.pkl"), "accelerator.load_state(PATH)"),
        (_folder("latest", "global_step5/x.pt"), "a checkpoint of DeepSpeed"),
        (_folder("a.txt", "b.txt"), "it has no nbdist.json; it contains a.txt, b.txt"),
        (_folder("step1/nbdist.json", "step2/nbdist.json"), "Name one of them: step1, step2"),
        (_torch_zip, "a file of torch.save()"),
        (_legacy_torch, "a file of torch.save()"),
        (lambda path: path.write_bytes(b"\x02" + b"\0" * 7 + b"{}"), "a safetensors file"),
        (lambda path: path.write_bytes(b""), "an empty file"),
        (lambda path: path.write_bytes(b"what is this?"), "a file of 13 bytes"),
    ],
)
def test_what_is_no_checkpoint_is_told_for_what_it_is(
    make: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    """Other programs' folders and files are named, with what reads them."""
    make(tmp_path / "there")

    with pytest.raises(CheckpointError) as caught:
        manifest.read(tmp_path / "there")

    assert message in str(caught.value)


def test_files_that_are_missing_short_or_changed_are_named(tmp_path: Path) -> None:
    """Lengths are always compared, bytes where it is asked for."""
    _write(tmp_path / "c")
    file = tmp_path / "c" / "__0_0.distcp"

    manifest.check_files(tmp_path / "c", WHOLE, reads_all=True)
    file.write_bytes(b"hellO")
    manifest.check_files(tmp_path / "c", WHOLE)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has changed"):
        manifest.check_files(tmp_path / "c", WHOLE, reads_all=True)
    file.write_bytes(b"hell")
    with pytest.raises(CheckpointError, match="has 4 bytes instead of 5"):
        manifest.check_files(tmp_path / "c", WHOLE)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing\. 1 of 1 files cannot"):
        manifest.check_files(tmp_path / "c", WHOLE)


def test_nothing_differs_where_all_is_equal() -> None:
    """A tied tensor may be listed under any of its names."""
    other = SavedModel(
        "Net",
        (replace(MODEL.tensors[0], name="head.weight"), MODEL.tensors[1]),
        {"wte.weight": "head.weight"},
    )

    assert mismatches(WHOLE, (MODEL,), (OPTIMIZER,)) == ()
    assert mismatches(WHOLE, (other,), (OPTIMIZER,)) == ()


def test_each_difference_is_told_with_names_and_numbers() -> None:
    """Shapes and dtypes of both, names that are on one side only, and other classes."""
    many = tuple(SavedTensor(f"more.{n}", (1,), "float32") for n in range(5))
    tensors = (SavedTensor("wte.weight", (120, 8), "bfloat16"), *many)
    findings = mismatches(
        WHOLE, (SavedModel("Net", tensors),), (replace(OPTIMIZER, kind="SGD", names=(("a",),)),)
    )

    assert [(finding.name, finding.verdict, finding.found) for finding in findings] == [
        (
            "Net: shapes",
            BAD,
            "wte.weight is (100, 8) in the checkpoint and (120, 8) here",
        ),
        ("Net: dtypes", WARN, "wte.weight is float32 in the checkpoint and bfloat16 here"),
        (
            "Net: missing",
            BAD,
            "; ".join(f"more.{n} is not in the checkpoint" for n in range(3)) + " and 2 more",
        ),
        ("Net: surplus", BAD, "norm.count is only in the checkpoint"),
        ("SGD: class", BAD, "AdamW in the checkpoint, SGD here"),
        (
            "SGD: parameters",
            BAD,
            "a is not in the checkpoint; wte.weight is only in the checkpoint",
        ),
    ]
    assert "SGD cannot use the state of AdamW: exp_avg, step" in findings[4].why


def test_other_numbers_of_models_and_groups_are_told() -> None:
    """They are known by their order, so their number has to be equal."""
    findings = mismatches(WHOLE, (MODEL, MODEL), (replace(OPTIMIZER, names=((), ("wte.weight",))),))

    assert [finding.found for finding in findings] == [
        "1 in the checkpoint (Net), 2 here (Net, Net)",
        "groups of [1] parameters in the checkpoint, of [0, 1] here",
    ]
