"""What code over all parameters and around the model does: the table of docs/strategies.md."""

import json
import re
from typing import Any

import numpy as np
import pytest

from tests.support.deep_model import TWO_BLOCKS
from tests.support.kernel import Kernel

_IDIOMS = """%%distributed
import copy, json

class Net(Deep):
    def forward(self, tokens):
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))

torch.manual_seed(0)
net = Net()
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

def tried(idiom):
    try:
        return idiom()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def curve():
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        accelerator.backward(loss)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(p.detach(), alpha=2e-2)
        losses.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))
        for name, p in model.named_parameters():
            moving[name].lerp_(p.detach(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses

def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor

def kinds():
    return ', '.join(sorted({type(value).__name__ for value in model.state_dict().values()}))

def copied():
    return sum(whole(p).norm().item() for p in copy.deepcopy(inner).parameters())

def asked():
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    return sum(whole(g).norm().item() for g in torch.autograd.grad(loss, list(model.parameters())))

moving = {name: p.detach().clone() for name, p in model.named_parameters()}
inner = accelerator.unwrap_model(model)
results = {
    'curve': tried(curve),
    'average': tried(lambda: sum(whole(e).norm().item() for e in moving.values() if not e.is_meta)),
    'norms': tried(lambda: sum(whole(p.norm()).item() for p in model.parameters())),
    'norms by item()': tried(lambda: sum(p.norm().item() for p in model.parameters())),
    'state_dict': tried(kinds),
    'get_state_dict': sum(v.norm().item() for v in accelerator.get_state_dict(model).values()),
    'inner forward': tried(lambda: inner(tokens).detach().norm().item()),
    'deepcopy': tried(copied),
    'autograd.grad': tried(asked),
}
print('idioms', json.dumps(results))
"""
# After it a step is broken off, so it stands by itself.
_PENALTY = """%%distributed
loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
loss = loss + 1e-4 * sum(p.pow(2).sum() for p in model.parameters())
accelerator.backward(loss)
"""
# Idiom -> what becomes of it under ddp, fsdp, tp and pp; "part" is a wrong number without an error.
_TABLE = {
    "curve": ("right", "right", "right", "right"),
    "average": ("right", "right", "right", "part"),
    "norms": ("right", "right", "right", "one stage"),
    "norms by item()": ("right", "part", "part", "one stage"),
    "state_dict": ("Tensor", "DTensor", "DTensor, Tensor", "state_dict()"),
    "get_state_dict": ("right", "right", "right", "right"),
    "inner forward": ("right", "right", "right", "one stage"),
    "deepcopy": ("right", "torch's refusal", "right", "one stage"),
    "autograd.grad": ("right", "refused", "right", "one stage"),
    "penalty": ("right", "hint", "hint", "one stage"),
}
_SENTENCES = {
    "NbdistError: A rank of a pipeline holds one stage": "one stage",
    "NbdistError: state_dict() of a pipeline": "state_dict()",
    "NbdistError: torch.autograd.grad gives no": "refused",
    "NbdistError: torch.autograd.grad was asked for parameters of other stages": "one stage",
    "AssertionError: FSDP does not support deepcopy": "torch's refusal",
}


def _idioms(kernel: Kernel, typed: str) -> dict[str, Any]:
    """What rank 0 has; ranks whose numbers are parts have others."""
    switched = kernel.run(f"%dist_strategy {typed}")
    assert switched.status == "ok", switched.visible
    assert kernel.run(TWO_BLOCKS).status == "ok"
    cell = kernel.run(_IDIOMS)
    assert cell.status == "ok", cell.visible
    values: dict[str, Any] = json.loads(re.findall(r"idioms (\{.*\})", cell.text)[0])
    return values


def _outcome(value: Any, wanted: Any) -> str:
    if isinstance(value, str):
        return next((word for start, word in _SENTENCES.items() if value.startswith(start)), value)
    return "right" if np.allclose(value, wanted, rtol=1e-4) else "part"


def _penalty(kernel: Kernel) -> str:
    cell = kernel.run(_PENALTY)
    if cell.status == "ok":
        return "right"
    last = cell.visible.strip().splitlines()[-1]
    words = {"A rank of a pipeline holds one stage": "one stage", "p.grad.add_(p.detach()": "hint"}
    assert "ranks 0-1 raised" in last, last
    return next((word for text, word in words.items() if text in last), last)


@pytest.mark.parametrize(
    "names", [["fsdp", "pp"], pytest.param(["ddp", "tp"], marks=pytest.mark.parity)]
)
def test_each_works_or_says_what_to_do(kernel: Kernel, names: list[str]) -> None:
    """The numbers of one process, or one sentence for all ranks, and what is neither."""
    expected = _idioms(kernel, "single")
    assert _penalty(kernel) == "right"
    outcomes: dict[str, list[str]] = {name: [] for name in _TABLE}
    for typed in names:
        for name, value in _idioms(kernel, typed).items():
            outcomes[name].append(_outcome(value, expected[name]))
        outcomes["penalty"].append(_penalty(kernel))
    kernel.run("%dist_strategy ddp")

    columns = [("ddp", "fsdp", "tp", "pp").index(typed) for typed in names]
    assert outcomes == {name: [row[n] for n in columns] for name, row in _TABLE.items()}


_LAMB = """%%distributed
class Lamb(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * (p.norm().item() / (p.grad.norm().item() + 1e-6)), alpha=0.01)

net = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
model, optimizer = accelerator.prepare(net, Lamb(net.parameters()))
"""
_STEP = """%%distributed
accelerator.backward(model(torch.randn(6, 12)).square().mean())
optimizer.step()
"""
_ADAFACTOR = "%%distributed\naccelerator.prepare(torch.optim.Adafactor(model.parameters()));"


def test_an_optimizer_that_takes_parts_for_the_whole_is_told_in_its_cell(kernel: Kernel) -> None:
    """Once, as one line of all ranks; torch's that cannot work is one error."""
    for code in ("%dist_strategy fsdp", _LAMB):
        assert kernel.run(code).status == "ok"
    first, second = kernel.run(_STEP), kernel.run(_STEP)
    refused = kernel.run(_ADAFACTOR)
    kernel.run("%dist_strategy ddp")

    assert first.status == "ok", first.visible
    lines = re.findall(
        r"\[0-1\] Lamb does not step under fsdp as in one .* is off by", first.visible
    )
    assert len(lines) == 1, first.visible
    assert "does not step" not in second.visible
    sentence = "ranks 0-1 raised OptionError: Adafactor takes norms of rows, .* and fsdp makes"
    refused.check_failure("DistributedError", sentence)
