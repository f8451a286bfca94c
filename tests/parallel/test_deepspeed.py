"""DeepSpeed takes model and optimizer over; numbers stay those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nbdist.errors import OptionError
from nbdist.parallel.dp import deepspeed
from nbdist.parallel.transform import ModelBuild
from nbdist.strategy.choice import Degrees, Options, Strategy
from tests.programs.parity import build_alone
from tests.support.torch_ranks import run_ranks
from tests.support.training import HAS_DEEPSPEED, needs_deepspeed

# Each case: options, the same model by itself, and under DeepSpeed. The seed differs by rank.
TRAINS = """
    import contextlib
    from nbdist.strategy.choice import Strategy, Degrees, Options
    from nbdist.parallel.dp import deepspeed
    from nbdist.parallel.mesh import build_mesh
    import torch.nn.functional as F

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = torch.nn.Embedding(64, 32)
            torch.nn.init.normal_(self.tokens.weight, std=0.1)
            self.body = torch.nn.Sequential(
                torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32),
                torch.nn.LayerNorm(32))
            self.head = torch.nn.Linear(32, 64, bias=False)
            self.head.weight = self.tokens.weight
            self.register_buffer("scale", torch.rand(1) + 1)
        def forward(self, x, y):
            h = self.tokens(x)
            logits = self.head(h + self.body(h)) * self.scale
            return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}

    def batch(step):
        generator = torch.Generator().manual_seed(100 + step)
        return torch.randint(0, 64, (2, 8, 6), generator=generator)
    def built(seed):
        torch.manual_seed(seed)
        model = Model()
        decayed = [p for p in model.parameters() if p.ndim > 1]
        groups = [{"params": decayed, "weight_decay": 0.1},
                  {"params": [p for p in model.parameters() if p.ndim < 2]}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))

    def train(accumulate, max_norm, step_of, steps=4):
        losses, norms = [], []
        for step in range(steps):
            loss = 0.0
            for part in range(accumulate):
                x, y = (t.chunk(accumulate)[part] for t in batch(step))
                loss += step_of["backward"](x, y, part + 1 == accumulate) / accumulate
            losses.append(loss)
            if max_norm:
                norms.append(float(step_of["clip"](max_norm)))
            step_of["step"]()
        return losses, norms

    def alone(options, max_norm):
        model, optimizer, scheduler = built(0)
        def backward(x, y, _is_last):
            loss = model(x, y)["loss"]
            (loss / options.accumulate).backward()
            return loss.item()
        def step():
            optimizer.step(); optimizer.zero_grad(); scheduler.step()
        clip = lambda value: torch.nn.utils.clip_grad_norm_(model.parameters(), value)
        losses, norms = train(options.accumulate, max_norm,
                              {"backward": backward, "clip": clip, "step": step})
        named = (*model.named_parameters(), *model.named_buffers())
        return losses, norms, {name: tensor.detach() for name, tensor in named}

    def under(options, max_norm):
        base, optimizer, scheduler = built(rank)
        choice = Strategy("deepspeed", Degrees(dp_replicate=n), n, options)
        engine, same = deepspeed.prepare(
            base, optimizer, choice, build_mesh(choice, "cpu"), torch.device("cpu"))
        assert same is optimizer and engine.module is base
        def backward(x, y, is_last):
            with contextlib.nullcontext() if is_last else deepspeed.no_sync(engine):
                output = engine(x.chunk(n)[rank], y.chunk(n)[rank])
                assert output["loss"].dtype is output["logits"].dtype is torch.float32
                deepspeed.backward(engine, output["loss"] / options.accumulate)
            loss = output["loss"].detach().clone()
            dist.all_reduce(loss)
            return loss.item() / n
        def step():
            assert deepspeed.step(engine)
            scheduler.step()
        losses, norms = train(options.accumulate, max_norm, {
            "backward": backward, "clip": lambda value: deepspeed.clip(engine, value),
            "step": step})
        return losses, norms, deepspeed.full_state(engine), engine

    def apart(max_norm=None, **options):
        options = Options(**options)
        expected_losses, expected_norms, expected = alone(options, max_norm)
        losses, norms, state, engine = under(options, max_norm)
        assert all(norm > 2 * max_norm for norm in norms), norms
        engine.destroy()
        far = lambda a, b: max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)
        return {"loss": far(losses, expected_losses), "norm": far(norms, expected_norms),
                "parameters": max((state[k] - expected[k]).abs().max().item() for k in state),
                "names": sorted(set(expected) ^ set(state))}

    results = {}
    for stage in (1, 2, 3):
        results[f"stage {stage}"] = apart(stage=stage)
        results[f"stage {stage} accumulating"] = apart(stage=stage, accumulate=2)
        results[f"stage {stage} clipping"] = apart(stage=stage, max_norm=0.02)
        results[f"stage {stage} offloaded"] = apart(stage=stage, offload="cpu")
        results[f"stage {stage} bf16"] = apart(stage=stage, precision="bf16")
    results["offloaded accumulating"] = apart(stage=2, offload="cpu", accumulate=2, max_norm=0.02)
    results["3 offloaded accumulating"] = apart(stage=3, offload="cpu", accumulate=2, max_norm=0.02)

    # What one engine has, another one of another stage is given.
    moved = {}
    for old, new, precision in ((1, 3, "fp32"), (3, 2, "fp32"), (2, 3, "bf16")):
        *_, state, before = under(Options(stage=old, precision=precision), None)
        before.destroy()
        base, optimizer, _ = built(rank)
        choice = Strategy("deepspeed", Degrees(dp_replicate=n), n,
                        Options(stage=new, precision=precision))
        after, _ = deepspeed.prepare(
            base, optimizer, choice, build_mesh(choice, "cpu"), torch.device("cpu"))
        deepspeed.load_full(after, state)
        again = deepspeed.full_state(after)
        x, y = batch(9)
        with torch.no_grad():
            loss = after(x, y)["loss"].item()
        model = Model()
        model.load_state_dict(state, strict=False)
        moved[f"{old} to {new} {precision}"] = [
            max((again[k] - state[k]).abs().max().item() for k in state),
            abs(loss - model(x, y)["loss"].item())]
        after.destroy()

    engine = under(Options(stage=2, offload="cpu"), None)[-1]
    errors = {"offload": refusal(lambda: deepspeed.no_sync(engine).__enter__()),
              "norm": refusal(lambda: deepspeed.clip(engine, 1.0, norm_type=1))}
    done(results=results, errors=errors, moved=moved)
"""


@needs_deepspeed
@pytest.mark.timeout(300)
def test_stages_and_offload_train_as_one_process(tmp_path: Path) -> None:
    """Losses and parameters, with two groups, a scheduler, tied weights and clipping."""
    ends = run_ranks(tmp_path, 2, TRAINS)

    for end in ends:
        for name, differences in end["results"].items():
            limit = 2e-2 if "bf16" in name else 1e-6
            assert differences["names"] == []
            assert (
                max(differences["loss"], differences["norm"], differences["parameters"]) < limit
            ), (name, differences)
        for name, (same, loss) in end["moved"].items():
            assert same == 0.0, (name, same)
            assert loss < (2e-2 if "bf16" in name else 1e-6), (name, loss)
        assert "--accumulate 2 or more" in end["errors"]["offload"]
        assert "not the 1-norm" in end["errors"]["norm"]


def job(**options: Any) -> ModelBuild:
    choice = Strategy("deepspeed", Degrees(dp_replicate=2), 2, Options(**options))
    return build_alone(torch.nn.Linear(2, 2), choice)


@pytest.mark.skipif(HAS_DEEPSPEED, reason="deepspeed is installed")
def test_a_missing_package_is_named_with_the_way_to_get_it() -> None:
    """Before a model is touched; so are strategies that need none."""
    with pytest.raises(OptionError, match=r"nbdist\[deepspeed\].*Or use zero1"):
        deepspeed.STEP.plan(job(), {})


@needs_deepspeed
def test_options_that_do_not_go_together_are_refused() -> None:
    """NVMe is for stage 3."""
    with pytest.raises(OptionError, match=r"stage 3 only, not in 2\. Use --stage 3, or --offload"):
        deepspeed.STEP.plan(job(stage=2, offload="nvme"), {})
    with pytest.raises(OptionError, match=r"no stage 4\. Use --stage 1, 2 or 3"):
        deepspeed.STEP.plan(job(stage=4), {})


def test_settings_leave_gradients_as_they_are() -> None:
    """DeepSpeed clips by itself unless it is told otherwise."""
    settings = deepspeed.config(job(stage=3, offload="cpu", accumulate=4).choice)

    assert settings["gradient_clipping"] == 0.0
    assert settings["gradient_accumulation_steps"] == 4
    assert settings["zero_optimization"]["offload_param"]["device"] == "cpu"
