"""Who owns memory: every storage once, by the user's own names, with the bytes that it has."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nbdist.memory.rank.owners import StorageOwner, owners
from nbdist.memory.snapshot import BUFFER, COMMUNICATION, GRADIENT, OPTIMIZER, PARAMETER, UNKNOWN
from tests.programs.rank import rank, user
from tests.support.torch_ranks import on_ranks


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The user's variables, in a process without other models."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    before = set(shell.user_ns)
    gc.collect()
    yield shell.user_ns
    for name in set(shell.user_ns) - before:
        del shell.user_ns[name]
    gc.collect()


def of(category: int) -> dict[str, int]:
    """Name -> bytes."""
    return {owner.name: owner.size_bytes for owner in owners() if owner.category == category}


def trained(model: torch.nn.Module, *shape: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(shape)).sum().backward()
    optimizer.step()
    return optimizer


def test_each_part_of_a_training_has_its_owner_once(names: dict[str, Any]) -> None:
    """Parameters, buffers, gradients, both moments and the count of steps, and a variable."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    names.update(model=model, optimizer=trained(model, 4, 5), batch=torch.ones(9)[3:])
    all_owners = owners()

    parameters = {"0.weight": 140, "0.bias": 28, "1.weight": 28, "1.bias": 28}
    assert of(PARAMETER) == parameters
    assert of(GRADIENT) == parameters
    assert of(BUFFER) == {"1.running_mean": 28, "1.running_var": 28, "1.num_batches_tracked": 8}
    assert of(OPTIMIZER) == {
        f"{name}: {key}": 4 if key == "step" else size_bytes
        for name, size_bytes in parameters.items()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert of(UNKNOWN)["batch"] == 36
    assert len({(owner.device, owner.address) for owner in all_owners}) == len(all_owners)
    weight = model[0].weight
    assert StorageOwner(weight.data_ptr(), 140, PARAMETER, "0.weight", "cpu") in all_owners


def test_what_is_frozen_beside_adapters_has_no_gradient_and_no_moments(
    names: dict[str, Any],
) -> None:
    """Of a model of PEFT; the base is a parameter as the adapters are."""
    peft = pytest.importorskip("peft")
    base = torch.nn.Sequential(torch.nn.Linear(5, 7, bias=False))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
    names.update(model=model, optimizer=trained(model, 4, 5))

    prefix = "base_model.model.0"
    adapters = {f"{prefix}.lora_{x}.default.weight": 8 * n for x, n in (("A", 5), ("B", 7))}
    assert of(PARAMETER) == {f"{prefix}.base_layer.weight": 140, **adapters}
    assert of(GRADIENT) == adapters
    assert of(OPTIMIZER) == {
        f"{name}: {key}": 4 if key == "step" else size_bytes
        for name, size_bytes in adapters.items()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_tied_weights_count_once(names: dict[str, Any]) -> None:
    """Under the first of their names."""
    model = torch.nn.Sequential(torch.nn.Embedding(6, 3), torch.nn.Linear(3, 6, bias=False))
    model[1].weight = model[0].weight
    names["model"] = model

    assert of(PARAMETER) == {"0.weight": 72}


def test_views_of_one_storage_count_once_and_say_how_many_they_are(names: dict[str, Any]) -> None:
    """As FSDP1's flat parameters are."""
    flat = torch.zeros(10)
    model = torch.nn.Module()
    for number in range(3):
        model.register_parameter(f"p{number}", torch.nn.Parameter(flat[number : number + 2]))
    names["model"] = model

    assert of(PARAMETER) == {"p0 and 2 more": 40}


def test_several_models_are_told_apart_by_their_variables(names: dict[str, Any]) -> None:
    """One that no variable holds does not change another's names."""
    teacher, student = torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(3, 5, bias=False)
    names["teacher"] = teacher
    assert of(PARAMETER) == {"weight": 24, "Linear.weight": 60}
    names["student"] = student

    assert of(PARAMETER) == {"teacher.weight": 24, "student.weight": 60}


def test_what_is_around_a_model_does_not_show_in_names(names: dict[str, Any]) -> None:
    """DataParallel's and a compiled model's; a user's own `module` does."""
    names["model"] = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False)))
    assert of(PARAMETER) == {"0.weight": 24}
    inner = torch.nn.Module()
    inner.module = torch.nn.Linear(2, 2, bias=False)
    names["model"] = inner

    assert of(PARAMETER) == {"module.weight": 16}


def test_parameters_of_no_module_have_a_name(names: dict[str, Any]) -> None:
    """The variable's; or the optimizer's place for it."""
    names["scale"] = torch.nn.Parameter(torch.ones(3))
    hidden = torch.nn.Parameter(torch.ones(5))
    names["optimizer"] = torch.optim.SGD([names["scale"], hidden], momentum=0.9)

    assert of(PARAMETER) == {"scale": 12, "SGD, group 0, parameter 1": 20}


def test_sparse_meta_and_half_made_tensors(names: dict[str, Any]) -> None:
    """A sparse gradient is its indices and values; what has no memory is left out."""
    names["embedding"] = torch.nn.Embedding(10, 4, sparse=True)
    names["embedding"](torch.tensor([1, 2, 2])).sum().backward()
    names["lazy"] = torch.nn.LazyLinear(3)
    names["meta"] = torch.nn.Linear(4, 4, device="meta")
    gradients = [owner for owner in owners() if owner.category == GRADIENT]

    assert sorted(gradient.size_bytes for gradient in gradients) == [3 * 8, 3 * 4 * 4]
    assert {gradient.name for gradient in gradients} == {"embedding.weight"}
    assert of(PARAMETER) == {"embedding.weight": 160}


def test_a_leaf_that_is_no_parameter_has_a_gradient(names: dict[str, Any]) -> None:
    """An input for which the user wants one."""
    names["image"] = torch.ones(6, requires_grad=True)
    (names["image"] * 2).sum().backward()

    assert of(GRADIENT) == {"image": 24}
    assert of(UNKNOWN)["image"] == 24


def train_on_ranks(wrap: Any) -> None:
    """A step of the user's model."""
    layers = torch.nn.Linear(12, 7), torch.nn.Linear(7, 3)
    user.model = wrap(torch.nn.Sequential(*layers))
    user.optimizer = trained(user.model, 4, 12)


@on_ranks(2)
def test_ddp_has_whole_parameters_and_its_buckets() -> None:
    """Names without DDP's own, the buckets as large as all gradients together."""
    train_on_ranks(DistributedDataParallel)
    whole = {"0.weight": 336, "0.bias": 28, "1.weight": 84, "1.bias": 12}
    assert of(PARAMETER) == whole
    assert of(GRADIENT) == whole
    assert sum(of(COMMUNICATION).values()) == sum(whole.values())


@on_ranks(2)
def test_fsdp_has_shards_with_their_padding() -> None:
    """Seven rows are four on each of two ranks, three are two; moments are of the rank's own."""
    train_on_ranks(fully_shard)
    padded = {"0.weight": 4 * 12 * 4, "0.bias": 4 * 4, "1.weight": 2 * 7 * 4, "1.bias": 2 * 4}
    assert of(PARAMETER) == padded
    assert not of(COMMUNICATION)
    rows = {"0.weight": (4, 3)[rank] * 48, "0.bias": (4, 3)[rank] * 4}
    moments = of(OPTIMIZER)
    assert {name: moments[f"{name}: exp_avg"] for name in rows} == rows
    # FSDP2 reduces all gradients of a group into one storage: here every rank's halves.
    assert of(GRADIENT) == {"0.weight and 3 more": 272}
    user.model(torch.ones(1, 12))
    assert sum(of(COMMUNICATION).values()) == 2 * sum(padded.values())
    assert of(PARAMETER) == padded
