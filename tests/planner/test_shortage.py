"""What a model that is about to be built needs, beside what its rank has free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nbdist.core import rank as core_rank
from nbdist.lints.memory_shortage import LINT
from nbdist.planner.live_model import load_of, shape_of
from nbdist.planner.memory import memory_of
from nbdist.planner.rank import describe_model, shortage
from nbdist.planner.workload import Workload
from nbdist.rpc.rank import namespace
from nbdist.strategy.choose import choose

DDP = choose("ddp", {}, 2)


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two ranks on a CPU, in a notebook without variables, that has seen no batch."""
    place = SimpleNamespace(device="cpu", local_world_size=2, device_uuid="")
    topology = SimpleNamespace(world_size=2, ranks=(place, place))
    monkeypatch.setattr(core_rank, "_joined", SimpleNamespace(place=place, topology=topology))
    monkeypatch.setattr(namespace, "everything", dict)
    monkeypatch.setattr(shortage, "last_batch", lambda: ((), ""))


def facts(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, free: float, choice: Any = DDP
) -> dict[str, Any]:
    monkeypatch.setattr(shortage, "_host_free_bytes", lambda: 2 * free)
    live = describe_model.describe("net", model, None, {}, wants_source=False)
    facts_found = shortage._facts(live, choice, [])
    assert facts_found is not None
    return facts_found


def gpt2(**sizes: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # late: not at collection

    return GPT2LMHeadModel(GPT2Config(**sizes))


def on_meta(count: int) -> nn.Module:
    """So many millions of parameters."""
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(count)])


def test_states_are_counted_where_no_batch_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 million: 0.4 GB of parameters, of gradients, of DDP's buckets, and 0.8 of Adam."""
    model = on_meta(100)
    without = facts(monkeypatch, model, 1e12)
    optimizer = torch.optim.AdamW(model.parameters())
    monkeypatch.setattr(namespace, "everything", lambda: {"optimizer": optimizer})
    adam = facts(monkeypatch, model, 1e12)
    split = facts(monkeypatch, model, 1e12, choose("fsdp", {}, 2))
    gathered = facts(monkeypatch, model, 1e12, choose("fsdp", {"shard": "grad-op"}, 2))

    assert without["needed"] == 1.2e9
    assert without["counted"] == "parameters, gradients, no optimizer was found"
    assert adam["needed"] == 2.0e9
    assert adam["counted"] == "parameters, gradients, AdamW"
    assert (split["needed"], gathered["needed"]) == (0.8e9, 1.2e9)
    assert adam["change"] == split["change"] == ""


def test_activations_count_where_a_batch_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a language model, as the plan's formulas have them."""
    with torch.device("meta"):
        model = gpt2()
    before = facts(monkeypatch, model, 1e12)
    monkeypatch.setattr(shortage, "last_batch", lambda: ((4, 512), "int64"))
    after = facts(monkeypatch, model, 1e12)
    live = describe_model.describe("net", model, None, {}, wants_source=False)
    load = load_of(live, Workload(4, 512, optimizer="sgd", has_gpu=False), "sgd")
    memory = memory_of(shape_of(live), DDP, load)

    assert after["counted"].endswith("activations of batch 4 x 512 tokens")
    assert after["needed"] == pytest.approx(memory.peak, rel=0.01)
    assert after["needed"] > before["needed"] + 1e9


@pytest.mark.parametrize(
    ("free", "name", "given", "change"),
    [
        (1.4e9, "ddp", {}, "Instead, fsdp needs 800.0 MB."),
        (1.9e9, "ddp", {"bucket": 50}, "Instead, fsdp --shard grad-op needs 1.2 GB."),
        (0.9e9, "fsdp", {}, ""),
        (0.6e9, "fsdp", {"checkpoint": "full"}, "With 4 ranks, fsdp needs 400.0 MB."),
        (1e3, "pp", {}, "No strategy makes it fit."),
    ],
)
def test_the_smallest_change(
    monkeypatch: pytest.MonkeyPatch, free: float, name: str, given: dict[str, object], change: str
) -> None:
    """Another strategy, without options that it does not take; then more ranks."""
    model = on_meta(100)
    optimizer = torch.optim.AdamW(model.parameters())
    monkeypatch.setattr(namespace, "everything", lambda: {"optimizer": optimizer})
    facts_found = facts(monkeypatch, model, free, choose(name, given, 2))

    assert facts_found["free"] == free
    assert facts_found["change"] == change
    assert bool(LINT.judge(facts_found["subject"], {0: facts_found, 1: facts_found})) == bool(
        change
    )


def test_what_the_model_has_already_is_free_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters, gradients and the state of its optimizer, on this device."""
    model = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    monkeypatch.setattr(shortage, "_host_free_bytes", lambda: 0.0)
    held = shortage._held(model.parameters(), optimizer)

    assert shortage._free_bytes(held) == pytest.approx(4 * 4 * 100 * 100, abs=8)
    assert shortage._free_bytes([torch.empty(9, device="meta")]) == 0


@pytest.mark.parametrize(
    ("name", "given"), [("deepspeed", {}), ("fsdp", {"offload": "cpu"}), ("tp", {"tp": 2})]
)
def test_it_is_silent_about_what_it_cannot_know(
    monkeypatch: pytest.MonkeyPatch, name: str, given: dict[str, object]
) -> None:
    """States that lie elsewhere, and degrees that the model refuses by itself: 3 heads."""
    with torch.device("meta"):
        model = gpt2(n_embd=48, n_head=3)
    monkeypatch.setattr(shortage, "last_batch", lambda: ((4, 512), "int64"))
    live = describe_model.describe("net", model, None, {}, wants_source=False)

    assert shortage._facts(live, choose(name, given, 2), []) is None
