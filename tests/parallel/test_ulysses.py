"""Heads on several ranks: what cannot be split says which degrees can. Numbers: test_cp.py."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nbdist.errors import OptionError
from nbdist.parallel.cp import cp, ulysses
from nbdist.parallel.mesh import ParallelMesh
from nbdist.parallel.transform import ModelBuild
from nbdist.strategy.choice import Degrees, Options, Strategy
from tests.support.cp_ranks import COMMON
from tests.support.torch_ranks import run_ranks

pytestmark = pytest.mark.engine


def job(base: torch.nn.Module, degree: int, context: str) -> ModelBuild:
    choice = Strategy(context, Degrees(cp=degree), degree, Options(context=context))
    return ModelBuild(
        base, choice, ParallelMesh(choice.degrees, 0, Degrees(), None), torch.device("cpu")
    )


def torchs_own() -> torch.nn.Module:
    return torch.nn.TransformerEncoderLayer(48, 6, 64)


def configured() -> torch.nn.Module:
    """As transformers' models say it."""
    model: Any = torch.nn.Linear(2, 2)
    model.config = type("Config", (), {"num_attention_heads": 6})()
    return model


@pytest.mark.parametrize("build", [torchs_own, configured])
def test_a_model_that_tells_its_heads_is_refused_before_anything_changes(build: Any) -> None:
    """With the degrees that divide them; ring attention has no such need."""
    base = build()
    with pytest.raises(OptionError, match=r"cp=4 .*6 heads .*\(6 % 4 = 2\)\. Use cp=1, 2, 3 or 6"):
        cp.STEP.plan(job(base, 4, "ulysses"), {})

    assert cp.STEP.plan(job(base, 3, "ulysses"), {}) == {}
    assert cp.STEP.plan(job(base, 4, "ring"), {}) == {}


def test_one_head_leaves_ring_attention() -> None:
    """There is no other degree to name."""
    with pytest.raises(OptionError, match=r"1 head is .* Use cp=1, or the strategy cp \(ring"):
        ulysses.check_heads(1, 2)


FORWARD = """
    class Heads(torch.nn.Module):
        def __init__(self, heads, dropout=0.0):
            super().__init__()
            self.mix, self.parts, self.dropout = torch.nn.Linear(24, 72), heads, dropout
        def forward(self, x):
            b, t, _ = x.shape
            q, k, v = self.mix(x).view(b, t, 3, self.parts, -1).permute(2, 0, 3, 1, 4)
            p = self.dropout if self.training else 0.0
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    uneven, even, x = Heads(3), Heads(4, 0.5), torch.randn(1, 64, 24)
    message = refused(lambda: split(uneven, context="ulysses")(x))
    with torch.no_grad():
        alone = (split(uneven, context="ulysses")(x) - uneven(x)).abs().max().item()
        # Weights are dropped, and the rest is scaled up: far from the whole, near it on average.
        torch.manual_seed(rank)
        expected, model = even.eval()(x), split(even, context="ulysses")
        calm = (model.eval()(x) - expected).abs().max().item()
        model.base.train()
        drawn = torch.stack([model(x) for _ in range(200)])
    apart, mean = (drawn[0] - expected).abs().mean().item(), (drawn.mean(0) - expected).abs().mean()
    done(told=message, alone=alone, calm=calm, apart=apart, mean=mean.item(),
         sums=drawn.sum().item())
"""


def test_what_only_forward_shows(tmp_path: Path) -> None:
    """Heads that no attribute tells are found at the first call; dropout is each rank's own."""
    ends = run_ranks(tmp_path, 2, COMMON + FORWARD)

    for end in ends:
        assert "3 heads are not divisible by 2 (3 % 2 = 1). Use cp=1 or 3" in end["told"]
        assert end["alone"] == 0.0, "without gradients each rank computes the whole"
        assert end["calm"] < 2e-6
        assert end["mean"] < 0.2 * end["apart"], end
    assert ends[0]["sums"] == ends[1]["sums"], "outputs are whole, and so the same"
