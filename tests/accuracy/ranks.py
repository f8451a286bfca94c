"""What ranks run: each case's model under its strategy by nbdist's own steps, measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nbdist.parallel.accelerator import prepare
from nbdist.parallel.ep import tokens as routed
from nbdist.parallel.live import registry
from nbdist.planner.fake import pickle_by_value
from nbdist.planner.fake.models import PickledModel
from nbdist.planner.rank import measure_step as measured
from nbdist.strategy.choose import choose
from tests.programs.rank import n
from tests.programs.training import tried


class Mlp(nn.Module):
    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(32, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 11)

    def forward(self, x):
        x = self.inner(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Cnn(nn.Module):
    def __init__(self, channels: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512,
            image_size=64, patch_size=8, num_labels=10, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def made(case: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A model and what it is called with."""
    torch.manual_seed(0)
    if case["config"]:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**case["config"])
        tokens = torch.randint(0, 500, (case["batch"], case["sequence"]))
        kwargs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        if case["name"] in ("cp", "ulysses"):
            kwargs["shift_labels"] = tokens
        return AutoModelForCausalLM.from_config(config), (), kwargs
    if case["model"] == "mlp":
        return Mlp(), (torch.randn(64 * case["batch"], 32),), {}
    if case["model"] == "cnn":
        return Cnn(), (torch.randn(case["batch"], 3, 32, 32),), {}
    return vit(), (), {"pixel_values": torch.randn(case["batch"], 3, 64, 64)}


def step(case: dict[str, Any]) -> dict[str, Any]:
    """What a step of a case takes, and its model for a process that has none."""
    model, args, kwargs = made(case)
    registry.set_choice(choose(case["name"], case["given"], n))
    sent = pickle_by_value.dumps(PickledModel(model, args, kwargs))
    routed.forget()
    outer = prepare.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepare.bind(optimizer)
    result = measured.measure_step(measured.StepSubject(outer, model, optimizer, args, kwargs))
    memory = {name: getattr(result, name) for name in result.__slots__}
    load = routed.load() or 1.0
    return {"sent": "" if case["config"] else sent.hex(), "load": load, **memory}


def measure(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each case what `step` says, or an error's text."""
    return {"found": [tried(step, case) for case in cases]}
