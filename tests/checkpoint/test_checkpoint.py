"""A checkpoint that any number of ranks has saved is loaded by any other, under any strategy."""

import functools
import gc
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nbdist.checkpoint.rank import jobs, write
from nbdist.checkpoint.rank import load as loading
from nbdist.checkpoint.rank.load import load
from nbdist.checkpoint.rank.save import begin
from nbdist.errors import CheckpointError, NbdistError
from tests.programs import saving
from tests.programs.optimizers import PlainSGD
from tests.programs.rank import everyone, n, rank, refusal, run_dir
from tests.programs.saving import CLOSE, accelerator, is_same, made, run, save, steps, values
from tests.programs.training import Net, labels, tokens, use
from tests.support.kernel import run_python
from tests.support.torch_ranks import on_ranks

# No nbdist: what anybody with torch can do. One file of it all, and one tensor of the folder.
PLAIN = """
import sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
folder, out = sys.argv[1:]
dcp_to_torch_save(folder, out)
whole = torch.load(out, weights_only=True)
part = {"model.tied.blocks.0.mlp.up_proj.weight": torch.empty(32, 16)}
dcp.load(part, checkpoint_id=folder)
model, steps = whole["model"]["tied"], whole["optimizer"]["adamw"]["tied"]["head.bias"]
assert "nbdist" not in sys.modules
assert torch.equal(model["embed.weight"], model["head.weight"])
assert torch.equal(*part.values(), model["blocks.0.mlp.up_proj.weight"])
assert "spare" not in model, sorted(model)
assert {"scale", "blocks.1.attention.k_proj.bias"} <= model.keys(), sorted(model)
assert sorted(steps) == ["exp_avg", "exp_avg_sq", "step"], steps
assert steps["step"].item() == 3, steps
"""


def batches_after(path: str, loader: Any) -> Any:
    """The loader goes on by itself; generators do where there are as many ranks as saved it."""
    notes = load(path).notes
    if n == 2:
        assert not notes
    else:
        assert notes[0].startswith("random generators are unchanged: saved on 2 ranks")
    return loader


def saves_and_loads(**given: Any) -> saving.Curves:
    return saving.goes_on(**given, save=save, load=batches_after)


_LOADED = [("ddp", {}, "Net", "fsdp"), ("fsdp", {}, "Tied", "pp"), ("tp", {}, "Net", "zero1")]
_MORE = [("zero1", {}, "Net", "fsdp"), ("pp", {}, "Net", "fsdp"), ("fsdp", {}, "Net", "zero1")]


@pytest.mark.parametrize("loaded", [_LOADED, pytest.param(_MORE, marks=pytest.mark.parity)])
def test_a_checkpoint_goes_on_under_another_strategy(tmp_path: Path, loaded: list[Any]) -> None:
    """Weights, moments, groups, rate, position in the data, own objects, generators; tied ones."""
    saved = [("fsdp", {}, "Net"), ("pp", {}, "Tied"), ("zero1", {}, "Net")]
    saving.on(tmp_path, 2, saves_and_loads, saved, loaded, BLOCKS="2")
    paths = str(tmp_path / "ppTied"), str(tmp_path / "whole.pt")
    ended = run_python("-W", "ignore", "-c", PLAIN, *paths)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parity
def test_another_number_of_ranks_loads_it_and_plain_torch_too(tmp_path: Path) -> None:
    """Saved on two ranks, loaded on four and on one; read whole without nbdist."""
    saved = [("fsdp", {}, "Net"), ("pp", {}, "Tied"), ("fsdp1", {}, "Net"), ("tp", {}, "Net")]
    curves = saving.on(tmp_path, 2, saves_and_loads, saved, [])
    four = [
        ("fsdp", {"tp": 2}, "Net", "fsdp"),
        ("fsdp", {"pp": 2}, "Tied", "pp"),
        ("fsdp1", {}, "Net", "tp"),
        ("zero1", {}, "Net", "fsdp1"),
    ]
    alone = [("single", {}, "Net", "fsdp1"), ("single", {}, "Tied", "pp")]
    for size, loaded in ((4, four), (1, alone)):
        saving.on(tmp_path, size, saves_and_loads, [], loaded, curves=curves)


class Odd:
    """An object of the user's whose state is no plain data."""

    def state_dict(self):
        return {"f": {"g": [1, saving.Counter()]}}

    def load_state_dict(self, state):
        pass


def an_odd_object_is_refused(path: str) -> None:
    odd = Odd()
    accelerator().register_for_checkpointing(odd)
    text = refusal(lambda: begin(path, "two", False))
    assert "objects.1.1.f.g.1 (tests.programs.saving.Counter) cannot be saved" in text


@on_ranks(2, BLOCKS="2")
def test_a_save_beside_training_and_saves_that_fail() -> None:
    """It holds what was there when it began; what fails leaves the earlier one whole."""
    folder = run_dir / "states"
    path = str(folder / "beside")
    use("fsdp")
    parts = made(0, Net)
    run(parts, list(parts[3])[:2])
    before = values(parts[0])
    begin(path, "one", True)
    refusal(lambda: load(path))  # or none, where the save is faster
    run(parts, list(parts[3])[:2])
    assert jobs.wait("one").state == "done"
    dist.barrier()
    run(parts, list(parts[3])[:1])
    load(path)
    assert is_same(parts[0], before)
    an_odd_object_is_refused(path)
    gc.collect()
    saves_that_fail(path)
    load(path)
    assert [entry.name for entry in folder.iterdir()] == ["beside"]


def saves_that_fail(path: str) -> None:
    """Of a rank that is told to stop, and of one that writes something else than it was given."""
    begin(path, "three", False)
    if rank == 1:
        jobs.stop("three", "somebody asked for it")
    jobs.wait("three")
    state = jobs.state("three")
    dist.barrier()
    if state.state == "failed":  # it may have been faster
        assert "somebody asked for it" in state.failure
    is_equal = write._is_equal
    with mock.patch.object(write, "_is_equal", lambda *both: rank == 0 and is_equal(*both)):
        begin(path, "four", False)
        torn = jobs.wait("four").failure
    assert "differs in" in torn
    assert torn.startswith("rank 1: ")
    assert everyone(torn) == [torn, torn]


class Rows(PlainSGD):
    """Keeps a number for each row, as Adafactor does, which prepare refuses under fsdp."""

    def step_one(self, p, gradient, state, rate):
        state["rows"] = gradient.abs().mean(-1)
        super().step_one(p, gradient, state, rate)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rows": Rows,
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.01),
}


def prepared(seed: int, kind: str) -> Any:
    gc.collect()
    torch.manual_seed(seed)
    net = Net()
    return accelerator().prepare(net, OPTIMIZERS[kind](net.parameters()))


def after_a_save(kind: str) -> list[float]:
    use("ddp")
    parts = prepared(0, kind)
    steps(accelerator(), *parts)
    save(f"{run_dir}/{kind}")
    return steps(accelerator(), *parts)


def after_a_load(kind: str, name: str) -> list[float]:
    use(name)
    parts = prepared(3, kind)
    load(f"{run_dir}/{kind}")
    return steps(accelerator(), *parts)


@pytest.mark.parity
@on_ranks(2)
def test_optimizers_of_every_form() -> None:
    """SGD's momentum, a rate that is a tensor; factors go where they can, a history nowhere."""
    for kind, names in (
        ("sgd", ("ddp", "zero1", "fsdp")),
        ("amsgrad", ("ddp", "zero1", "fsdp")),
        ("adafactor", ("ddp", "zero1")),
        ("rows", ("ddp", "zero1")),
    ):
        wanted = after_a_save(kind)
        for name in names:
            assert after_a_load(kind, name) == pytest.approx(wanted, abs=CLOSE), (kind, name)
    text = refusal(lambda: after_a_load("rows", "fsdp"))
    assert "which cannot be sharded as the strategy requires" in text
    text = refusal(lambda: after_a_save("lbfgs"))
    assert "LBFGS keeps" in text
    assert "cannot be saved in parts" in text


class Judge(Net):
    """Another model."""


def several(seed: int) -> Callable[[], list[float]]:
    """Two models with an optimizer each, and one of both; what trains them."""
    gc.collect()
    torch.manual_seed(seed)
    pairs = []
    for kind in (Net, Judge):
        net = kind()
        pairs.append(accelerator().prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01)))
    both = [p for model, _ in pairs for p in accelerator().unwrap_model(model).parameters()]
    of_both = accelerator().prepare(torch.optim.SGD(both, lr=0.01, momentum=0.9))

    def train() -> list[float]:
        losses = []
        for model, optimizer in pairs:
            loss = model(tokens[:8], labels=labels[:8])
            accelerator().backward(loss)
            optimizer.step()
            losses.append(loss.item())
        of_both.step()
        for _, optimizer in pairs:
            optimizer.zero_grad()
        return losses

    return train


@pytest.mark.parity
@on_ranks(2)
def test_several_models_and_an_optimizer_of_both() -> None:
    """Each finds its own, by the names of models."""
    use("fsdp")
    train = several(0)
    train()
    save(f"{run_dir}/several")
    wanted = train() + train()
    del train
    use("zero1")
    train = several(5)
    load(f"{run_dir}/several")
    assert train() + train() == pytest.approx(wanted, abs=CLOSE)
    manifest = json.loads((run_dir / "several/nbdist.json").read_text())
    names = {saved["kind"]: saved["names"][0][0] for saved in manifest["optimizers"]}
    assert names == {"AdamW": "judge.embed.weight", "SGD": "net.embed.weight"}


@on_ranks(2, BLOCKS="2")
def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    """Shapes, names, classes, damage, a pickle that would run something: nothing is changed."""
    path = str(run_dir / "one")
    use("fsdp")
    nothing = refusal(lambda: load(f"{path} more"), CheckpointError)
    assert "does not exist" in nothing or "No model is prepared" in nothing
    for part in (a_save, of_another_shape, of_other_names, of_another_class):
        part(path)
        gc.collect()
    parts = made(4, Net)
    run(parts, list(parts[3])[:1])
    fails_on_one_rank(path, parts)
    damage_is_named(Path(path))


def a_save(path: str) -> None:
    parts = made(0, Net)
    run(parts, list(parts[3])[:1])
    save(path)


def of_another_shape(path: str) -> None:
    parts = made(0, functools.partial(Net, width=32))
    before = values(parts[0])
    text = refusal(lambda: load(path))
    assert "embed.weight is (24, 16) in the checkpoint and (24, 32) here" in text
    assert "Nothing was changed" in text
    assert is_same(parts[0], before)


def of_other_names(path: str) -> None:
    parts = made(0, saving.Tied)
    assert "scale is not in the checkpoint" in refusal(lambda: load(path))
    assert parts


def of_another_class(path: str) -> None:
    """The model alone fits."""
    net = Net()
    parts = accelerator().prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert "AdamW in the checkpoint, SGD here" in refusal(lambda: load(path))
    load(path, True)
    assert "does not exist" in refusal(lambda: load(f"{path} more"))
    assert parts


def fails_on_one_rank(path: str, parts: Any) -> None:
    weight = accelerator().unwrap_model(parts[0]).head.weight
    moments = parts[1].optimizer.state[weight]["exp_avg"].to_local().clone()
    before, fill = values(parts[0]), loading._fill

    def broken(*args: Any) -> Any:
        filled = fill(*args)
        if rank == 1:
            raise NbdistError("the cable is out")
        return filled

    with mock.patch.object(loading, "_fill", broken):
        text = refusal(lambda: load(path))
    assert "the cable is out" in text
    assert rank == 1 or "failed on rank 1, so no rank went on" in text
    assert is_same(parts[0], before)
    weight = accelerator().unwrap_model(parts[0]).head.weight
    assert torch.equal(moments, parts[1].optimizer.state[weight]["exp_avg"].to_local())


class Bad:
    def __reduce__(self):
        return os.system, (f"touch {run_dir}/ran",)


def plant(folder: Path) -> None:
    """A pickle that runs a program, with its checksum."""
    bad = pickle.dumps(Bad())
    (folder / ".metadata").write_bytes(bad)
    manifest = json.loads((folder / "nbdist.json").read_text())
    for entry in manifest["files"]:
        if entry["name"] == ".metadata":
            entry |= {"size_bytes": len(bad), "checksum": f"crc32:{zlib.crc32(bad):08x}"}
    (folder / "nbdist.json").write_text(json.dumps(manifest))


def damage_is_named(folder: Path) -> None:
    file = folder / "__1_0.distcp"
    data = file.read_bytes()
    dist.barrier()
    if rank == 0:
        file.write_bytes(data[:-5] + b"abcde")
    dist.barrier()
    assert "__1_0.distcp has changed" in refusal(lambda: load(str(folder)))
    if rank == 0:
        file.write_bytes(data)
        plant(folder)
    dist.barrier()
    assert "posix.system" in refusal(lambda: load(str(folder), True))
    assert not (run_dir / "ran").exists()
