"""A pipeline without a loss in it: outputs to compute one from, and parameters of other stages."""

from pathlib import Path

import pytest
import torch

from nbdist.parallel.pp.outputs import without_cache
from tests.support.pipelines import PP
from tests.support.torch_ranks import run_ranks

FP32 = 2e-6

OUTER = (
    PP
    + """
class Net(nn.Module):
    "Returns logits; others of them return more."
    def __init__(self, depth=4, drop=0.0):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.words.weight, std=0.1)  # large logits have large rounding errors
        self.layers = nn.ModuleList(Block(drop) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
    def hidden(self, x):
        h = self.words(x)
        for layer in self.layers:
            h = layer(h)
        return self.norm(h)
    def forward(self, x):
        return self.head(self.hidden(x))

class Several(Net):
    "A dict with what is not per sample, with integers, and with what no loss uses."
    def forward(self, x):
        h = self.hidden(x)
        logits = self.head(h)
        return {"logits": logits, "mean": h.mean((0, 1)), "top": logits.argmax(-1), "h": h}

class Single(Net):
    "One number for each sample: of a micro-batch of one sample it is no loss."
    def forward(self, x):
        return self.hidden(x)[:, -1, 0]

class Squeezed(Net):
    "The same, of one sample a scalar, as a loss is."
    def forward(self, x):
        return self.hidden(x)[:, -1, 0].squeeze()

def cross_entropy(outputs, x):
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    return F.cross_entropy(logits.flatten(0, 1), x.roll(1, 1).flatten())

def of_step(loss_of, size=8):
    "A loss of a model and a step's number, of one of outputs and batch."
    def loss(model, step):
        x = tokens(step, size)
        return loss_of(model(x), x)
    return loss

def summed(outputs, x):
    "No mean over the batch, and it leaves some out."
    targets = x.roll(1, 1).masked_fill(x > 30, -100)
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum") / 50

def both(outputs, x):
    return cross_entropy(outputs, x) + outputs["mean"].square().mean()

def twice(model, step):
    "Two forwards, one loss: both backwards run at once."
    one, two = model(tokens(step)), model(tokens(step + 7, 4))
    return cross_entropy(one, tokens(step)) + 0.3 * two.square().mean() * one.square().mean()

def again(model, step):
    loss = of_step(cross_entropy)(model, step)
    loss.backward(retain_graph=True)
    return loss / 2

def frozen(model):
    model.words.requires_grad_(False)
    model.layers[:2].requires_grad_(False)
    return model

def differ(loss_of, kind=Net, how=lambda model: model, degrees=None, **settings):
    "Largest difference of losses and gradients of three steps from those of one process."
    torch.manual_seed(0)
    alone = how(kind())
    base = copy.deepcopy(alone)
    outer = put(base, degrees, **settings)
    return max(gaps(follow(outer, base, loss_of, pp_gradients),
                    follow(alone, alone, loss_of, gradients_of)))

usual = of_step(cross_entropy)
if n == 4:
    done(fp32={"pp x fsdp": differ(usual, degrees={"pp": 2, "dp_shard": 2}),
               "grad-op": differ(usual, degrees={"pp": 2, "dp_shard": 2}, shard="grad-op"),
               "four stages": differ(usual), "zb": differ(usual, schedule="zb")})
if "MORE" in os.environ:
    done(fp32={
        "interleaved": differ(usual, schedule="interleaved"),
        "one number": differ(of_step(lambda y, x: F.mse_loss(y, x[:, 0] / WORDS), 4), Single),
        "checkpointed": differ(usual, checkpoint="full")})
fp32 = {
    "cross entropy": differ(usual),
    "two pieces": differ(usual, schedule="gpipe", microbatches=2),
    "sum": differ(of_step(summed)),
    "seven samples": differ(of_step(cross_entropy, 7)),
    "not per sample": differ(of_step(both), Several),
    "squeezed": differ(of_step(lambda y, x: F.mse_loss(y, x[:, 0] / WORDS), 4), Squeezed),
    "two forwards": differ(twice), "two backwards": differ(again),
    "frozen": differ(usual, how=frozen),
}
half = differ(usual, precision="bf16")

# What comes out, and what becomes of it.
torch.manual_seed(0)
outer = put(Several())
out = outer(tokens(0))
kinds = [out["logits"].requires_grad, out["top"].requires_grad, list(out["mean"].shape)]
with torch.no_grad():
    kinds.append(torch.equal(out["top"], outer(tokens(0))["top"]))
loss = cross_entropy(out, tokens(0))
loss.backward()
refused = refusal(loss.backward, RuntimeError)
counts = [sum(p.grad is not None for p in outer.parameters())]
for _ in range(2):
    outer(tokens(1))  # no backward follows: nobody waits for one
counts.append(len(outer.module.layers))

# An error of the model, in forward of a shape that is known; the next step is right.
def fails(*_):
    raise ValueError("no more of this")

hook = outer.module.layers[3].register_forward_pre_hook(fails)
try:
    outer(tokens(2))
    failed = ""
except Exception as error:
    failed = f"{type(error).__name__}: {error}"
hook.remove()
cross_entropy(outer(tokens(2)), tokens(2)).backward()
done(fp32=fp32, half=half, kinds=kinds, refused=refused, counts=counts, failed=failed)
"""
)


def test_a_loss_outside_of_the_model_is_that_of_one_process(tmp_path: Path) -> None:
    """Any loss of any outputs: steps, gradients, retain_graph, errors; no mean is asked for."""
    results = run_ranks(tmp_path, 2, OUTER)

    for rank, result in enumerate(results):
        for name, difference in result["fp32"].items():
            assert difference < FP32, (name, difference)
        assert 0 < result["half"] < 2e-2
        assert result["kinds"] == [True, False, [10], True]
        assert "second time" in result["refused"]
        assert result["counts"][0] > 0
        expected = "ValueError: no more" if rank else "NbdistError: pipeline stage 1, on rank 1"
        assert result["failed"].startswith(expected)


@pytest.mark.parity
@pytest.mark.parametrize("size", [2, 4])
def test_outputs_of_products_and_more_stages(tmp_path: Path, size: int) -> None:
    """With data parallel ranks, whose gradients are averaged, and two stages of four ranks each."""
    for result in run_ranks(tmp_path, size, OUTER, MORE="1"):
        for name, difference in result["fp32"].items():
            assert difference < FP32, (name, difference)


ABSENT = (
    PP
    + """
import io
from transformers import GPT2Config, GPT2LMHeadModel
from torch.optim.swa_utils import AveragedModel

def said(call):
    try:
        return f"no error: {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

torch.manual_seed(0)
base = make(tied=False)
whole_state = copy.deepcopy(base.state_dict())
outer = put(base)
other = base.layers[0 if rank else 2]
p, name = other.out.weight, f"layers.{0 if rank else 2}.out.weight"
real = torch.ones(p.shape)
reads = {
    "item": said(lambda: p.norm().item()),
    "float": said(lambda: float(p.detach().abs().max())),
    "sum of all": said(lambda: sum(q.pow(2).sum() for q in base.parameters())),
    "average": said(lambda: real.lerp_(p, 0.1)),
    "cpu": said(lambda: p.cpu()),
    "tolist": said(lambda: p.tolist()),
    "equal": said(lambda: torch.equal(p, p)),
    "layer": said(lambda: other.out(torch.ones(2, WIDTH))),
    "base": said(lambda: base(tokens(0))),
    "deepcopy": said(lambda: copy.deepcopy(base)),
    "AveragedModel": said(lambda: AveragedModel(base)),
    "foreach": said(lambda: torch._foreach_norm(list(base.parameters()))),
}
saves = {
    "pipeline": said(outer.state_dict), "model": said(base.state_dict),
    "its part": said(other.state_dict), "list": said(lambda: torch.save([p], io.BytesIO())),
}
held = base.layers[2 if rank else 0]
fine = {
    "own part": list(held.state_dict()) == list(other.state_dict(keep_vars=True)),
    "attributes": [tuple(p.shape), str(p.dtype), p.requires_grad, p.grad is None, p.is_leaf,
                   p.numel(), p.is_meta, isinstance(p, nn.Parameter), "another stage" in repr(p)],
    "cheap": type(p).__torch_function__ is torch._C._disabled_torch_function_impl,
}
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
fine["moving"] = 0 < sum(not value.is_meta for value in moving.values()) < len(moving)
base.load_state_dict(whole_state)
back = pp_parameters(outer, base)
fine["loaded"] = all(torch.equal(back[key], whole_state[key]) for key in back)

torch.manual_seed(0)
gpt2 = GPT2LMHeadModel(GPT2Config(
    vocab_size=WORDS, n_embd=16, n_layer=2, n_head=4, n_positions=16, use_cache=False))
state = copy.deepcopy(gpt2.state_dict())
outer = put(gpt2)
saves["save_pretrained"] = said(lambda: gpt2.save_pretrained(run_dir / f"gpt2.{rank}"))
reads["generate"] = said(lambda: gpt2.generate(tokens(0)[:1], max_new_tokens=2))
if rank == 0:
    gpt2.save_pretrained(run_dir / "whole", state_dict=dict(state))
    loaded = GPT2LMHeadModel.from_pretrained(run_dir / "whole").state_dict()
    fine["save_pretrained"] = all(torch.equal(loaded[key], state[key]) for key in state)
done(reads=reads, saves=saves, fine=fine)
"""
)


def test_what_another_stage_holds_is_neither_read_nor_saved_as_nothing(tmp_path: Path) -> None:
    """One sentence, the same on all ranks, that waits for none; what does not read works."""
    results = run_ranks(tmp_path, 2, ABSENT)

    for result in results:
        for name, text in result["reads"].items():
            assert text.startswith("NbdistError: A rank of a pipeline holds one stage"), (
                name,
                text,
            )
        for name, text in result["saves"].items():
            assert text.startswith("NbdistError: state_dict() of a pipeline"), (name, text)
            assert "accelerator.get_state_dict(model)" in text
        fine = result["fine"]
        attributes = [[10, 10], "torch.float32", True, True, True, 100, True, True, True]
        assert fine.pop("attributes") == attributes
        assert all(value is True for value in fine.values()), fine


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_an_output_has_no_cache_by_either_of_its_names(name: str) -> None:
    """That of transformers before 5.24, and since; what a user calls so is no cache."""
    cache_utils = pytest.importorskip("transformers.cache_utils")
    output = {"logits": torch.ones(2), name: cache_utils.DynamicCache()}

    assert list(without_cache(output)) == ["logits"]
    assert without_cache({"cache": torch.ones(2)}).keys() == {"cache"}
