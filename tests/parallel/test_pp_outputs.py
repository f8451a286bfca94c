"""A pipeline without a loss in it: outputs to compute one from, and parameters of other stages."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim.swa_utils import AveragedModel

from nbdist.parallel.pp.outputs import without_cache
from tests.programs.parity import LM, WIDTH, WORDS, batch, close, compare, make, put
from tests.programs.rank import everyone, n, rank, refusal, run_dir
from tests.support.torch_ranks import on_ranks


class Net(LM):
    """Returns logits; others of them return more."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__(depth)
        # A second forward writes to buffers before the first one's backward has read them.
        del self.scale
        self.scale = 1.0

    def forward(self, x):
        return self.head(self.hidden(x))


class Several(Net):
    """A dict with what is not per sample, with integers, and with what no loss uses."""

    def forward(self, x):
        h = self.hidden(x)
        logits = self.head(h)
        return {"logits": logits, "mean": h.mean((0, 1)), "top": logits.argmax(-1), "h": h}


class Single(Net):
    """One number for each sample: of a micro-batch of one sample it is no loss."""

    def forward(self, x):
        return self.hidden(x)[:, -1, 0]


class Squeezed(Single):
    """The same, of one sample a scalar, as a loss is."""

    def forward(self, x):
        return super().forward(x).squeeze()


def cross_entropy(outputs, x):
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    return F.cross_entropy(logits.flatten(0, 1), x.roll(1, 1).flatten())


def summed(outputs, x):
    """No mean over the batch, and it leaves some out."""
    targets = x.roll(1, 1).masked_fill(x > 30, -100)
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum") / 50


def both(outputs, x):
    return cross_entropy(outputs, x) + outputs["mean"].square().mean()


def squares(outputs, x):
    return F.mse_loss(outputs, x[:, 0] / WORDS)


def twice(model, step, cut):
    """Two forwards, one loss: both backwards run at once."""
    one, two = model(cut(batch(step))), model(cut(batch(step + 7, 4)))
    return cross_entropy(one, cut(batch(step))) + 0.3 * two.square().mean() * one.square().mean()


def again(model, step, cut):
    x = cut(batch(step))
    loss = cross_entropy(model(x), x)
    loss.backward(retain_graph=True)
    return loss / 2


def frozen():
    model = make(Net)
    for part in (model.words, model.layers[:2]):
        part.requires_grad_(requires_grad=False)
    return model


def differ(
    loss: Any = cross_entropy, kind: Any = Net, size: int = 8, **options: Any
) -> list[float]:
    """From one process, of a loss of outputs and batch, or of what is a loss of a model."""

    def loss_of(model, step, cut):
        x = cut(batch(step, size))
        return loss(model(x), x)

    usual = loss not in (twice, again)
    options = {"build": lambda: make(kind), **options}
    return compare("pp", loss_of=loss_of if usual else loss, **options)


@on_ranks(2)
def test_a_loss_outside_of_the_model_is_that_of_one_process() -> None:
    """Any loss of any outputs: steps, gradients, retain_graph, errors; no mean is asked for."""
    warnings.simplefilter("ignore")
    close(
        {
            "cross entropy": differ(),
            "two pieces": differ(schedule="gpipe", microbatches=2),
            "sum": differ(summed),
            "seven samples": differ(size=7),
            "not per sample": differ(both, Several),
            "squeezed": differ(squares, Squeezed, size=4),
            "two forwards": differ(twice),
            "two backwards": differ(again),
            "frozen": differ(build=frozen),
        }
    )
    assert 0 < max(differ(precision="bf16")[:2]) < 2e-2
    outputs_of_several()
    errors_in_forward()


def outputs_of_several() -> None:
    """What comes out, and what becomes of it."""
    outer = put(make(Several), "pp").outer
    out = outer(batch(0))
    assert out["logits"].requires_grad
    assert not out["top"].requires_grad
    assert list(out["mean"].shape) == [10]
    with torch.no_grad():
        assert torch.equal(out["top"], outer(batch(0))["top"])
    loss = cross_entropy(out, batch(0))
    loss.backward()
    assert "second time" in refusal(loss.backward, RuntimeError)
    assert any(p.grad is not None for p in outer.parameters())
    for _ in range(2):
        outer(batch(1))  # no backward follows: nobody waits for one


def errors_in_forward() -> None:
    """Of a shape that is known; the next step is right."""
    outer = put(make(Several), "pp").outer
    cross_entropy(outer(batch(0)), batch(0)).backward()
    hook = outer.module.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    text = refusal(lambda: outer(batch(2)), Exception)
    assert text.startswith(["pipeline stage 1, on rank 1", "division by zero"][rank])
    hook.remove()
    cross_entropy(outer(batch(2)), batch(2)).backward()


@pytest.mark.parity
@on_ranks(2, 4)
def test_outputs_of_products_and_more_stages() -> None:
    """With data parallel ranks, whose gradients are averaged, and two stages of four ranks each."""
    warnings.simplefilter("ignore")
    if n == 4:
        product = {"pp": 2, "dp_shard": 2}
        close({"pp x fsdp": differ(degrees=product)})
        close({"grad-op": differ(degrees=product, shard="grad-op")})
        close({"four stages": differ(), "zb": differ(schedule="zb")})
    else:
        close({"one number": differ(squares, Single, size=4)})
        close({"interleaved": differ(schedule="interleaved"), "full": differ(checkpoint="full")})


def said(call: Callable[[], Any]) -> str:
    try:
        return f"no error: {call()}"
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def is_not_read(name: str, call: Callable[[], Any]) -> None:
    start = "NbdistError: A rank of a pipeline holds one stage"
    assert said(call).startswith(start), (name, said(call))


def is_not_saved(call: Callable[[], Any]) -> None:
    text = said(call)
    assert text.startswith("NbdistError: state_dict() of a pipeline"), text
    assert "accelerator.get_state_dict(model)" in text


def reads_and_saves(base: Any, outer: Any) -> None:
    """One sentence, the same on all ranks, that waits for none."""
    other = base.layers[0 if rank else 2]
    p, real = other.out.weight, torch.ones(10, 10)
    for name, call in {
        "item": lambda: p.norm().item(),
        "float": lambda: float(p.detach().abs().max()),
        "sum of all": lambda: sum(q.pow(2).sum() for q in base.parameters()),
        "average": lambda: real.lerp_(p, 0.1),
        "cpu": p.cpu,
        "tolist": p.tolist,
        "equal": lambda: torch.equal(p, p),
        "layer": lambda: other.out(torch.ones(2, WIDTH)),
        "base": lambda: base(batch(0)),
        "deepcopy": lambda: copy.deepcopy(base),
        "AveragedModel": lambda: AveragedModel(base),
        "foreach": lambda: torch._foreach_norm(list(base.parameters())),
    }.items():
        is_not_read(name, call)
    for state in (outer.state_dict, base.state_dict, other.state_dict):
        is_not_saved(state)
    is_not_saved(lambda: torch.save([p], io.BytesIO()))

    held = base.layers[2 if rank else 0]
    assert list(held.state_dict()) == list(other.state_dict(keep_vars=True))
    assert (p.shape, p.dtype, p.numel()) == ((10, 10), torch.float32, 100)
    assert p.requires_grad and p.grad is None and p.is_leaf and p.is_meta  # noqa: PT018
    assert isinstance(p, nn.Parameter)
    assert "another stage" in repr(p)
    assert type(p).__torch_function__ is torch._C._disabled_torch_function_impl  # is cheap


@on_ranks(2)
def test_what_another_stage_holds_is_neither_read_nor_saved_as_nothing() -> None:
    """What does not read works."""
    warnings.simplefilter("ignore")
    base = make(is_tied=False)
    whole = copy.deepcopy(base.state_dict())
    outer = put(base, "pp").outer
    reads_and_saves(base, outer)
    with torch.no_grad():
        for q in base.parameters():
            q.mul_(0.5)
            q.add_(torch.ones(()))
            q.clamp_(-1, 1)
    optimizer = torch.optim.Adagrad(base.parameters())  # makes its state at once
    outer(batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    moving = {key: q.detach().clone() for key, q in base.named_parameters()}
    for key, q in base.named_parameters():
        moving[key].mul_(0.9).add_(q.detach(), alpha=0.1)
    assert 0 < sum(not value.is_meta for value in moving.values()) < len(moving)
    base.load_state_dict(whole)
    held = everyone({key: q.detach() for key, q in base.named_parameters() if not q.is_meta})
    assert all(torch.equal(q, whole[key]) for of_rank in held for key, q in of_rank.items())
    assert {*held[0], *held[1]} == {key for key, _ in base.named_parameters()}


@on_ranks(2)
def test_models_of_transformers_are_saved_whole_or_not_at_all() -> None:
    """By the state that is given; without one it is that of a stage, which is refused."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
    gpt2 = make(lambda: GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False)))
    state = copy.deepcopy(gpt2.state_dict())
    put(gpt2, "pp")
    is_not_saved(lambda: gpt2.save_pretrained(run_dir / f"gpt2.{rank}"))
    is_not_read("generate", lambda: gpt2.generate(batch(0)[:1], max_new_tokens=2))
    if rank == 0:
        gpt2.save_pretrained(run_dir / "whole", state_dict=dict(state))
        loaded = GPT2LMHeadModel.from_pretrained(run_dir / "whole").state_dict()
        assert all(torch.equal(loaded[key], state[key]) for key in state)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_an_output_has_no_cache_by_either_of_its_names(name: str) -> None:
    """That of transformers before 5.24, and since; what a user calls so is no cache."""
    cache_utils = pytest.importorskip("transformers.cache_utils")
    output = {"logits": torch.ones(2), name: cache_utils.DynamicCache()}

    assert list(without_cache(output)) == ["logits"]
    assert without_cache({"cache": torch.ones(2)}).keys() == {"cache"}
