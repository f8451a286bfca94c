"""Adapters alone, saved under one strategy and loaded under another; 4-bit weights beside them."""

import functools
import gc
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import nn

from nbdist.checkpoint.rank.export_weights import export_model
from nbdist.checkpoint.rank.load import load
from nbdist.parallel.libraries import quantized
from nbdist.switch.rank.switch import switch
from tests.programs.rank import everyone, rank, refusal, run_dir, user
from tests.programs.saving import CLOSE, accelerator, save, values
from tests.programs.switching import pick
from tests.programs.training import BATCH, Net, labels, tokens, use
from tests.support.torch_ranks import NEEDS_PEFT, on_ranks

pytestmark = NEEDS_PEFT

Parts = tuple[Any, torch.optim.Optimizer]


def config(r: int, *layers: str) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=r, target_modules=list(layers), init_lora_weights=False)


def adapted(seed: int, kind: Callable[[], nn.Module] = Net, r: int = 2) -> Any:
    """The base is the same for each seed, as a pretrained one is."""
    from peft import get_peft_model

    torch.manual_seed(0)
    net = kind()
    torch.manual_seed(seed)
    return get_peft_model(net, config(r, "q_proj", "v_proj", "o_proj", "down_proj"))


def with_optimizer(model: nn.Module) -> Parts:
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def prepared(model: nn.Module) -> Parts:
    gc.collect()  # what was prepared before is saved no more
    return accelerator().prepare(*with_optimizer(model))


def losses(parts: Parts, first: int = 0, count: int = 2) -> list[float]:
    """Of steps on the ranks."""
    model, optimizer = parts
    means = []
    for at in range(first, first + count):
        batch = slice(BATCH * at, BATCH * (at + 1))
        split = accelerator().split_between_processes
        with split(tokens[batch]) as x, split(labels[batch]) as y:
            loss = model(x, labels=y)
        accelerator().backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        means.append(accelerator().reduce(loss.detach(), "mean").item())
    return means


def alone(parts: Parts, count: int = 2) -> list[float]:
    """Of steps in one process."""
    model, optimizer = parts
    means = []
    for x, y in [*zip(tokens.split(BATCH), labels.split(BATCH), strict=True)][:count]:
        loss = model(x, labels=y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(loss.item())
    return means


# Of each of 2 blocks: q, v and o from 16 to 16, down from 32 to 16, of rank 2: 8 matrices, each
# with two moments and a count of steps.
N_ADAPTERS = 2 * (3 * 2 * (16 + 16) + 2 * (32 + 16))
SIZE_BYTES = 4 * (3 * N_ADAPTERS + 2 * 8)


def saved_under(name: str, seed: int = 0) -> list[float]:
    use(name)
    parts = prepared(adapted(seed))
    before = losses(parts)
    begun = save(f"{run_dir}/{name}", is_adapters=True)
    assert sum(everyone(begun.copied_bytes)) == SIZE_BYTES
    return before + losses(parts, 2)


def loaded_under(name: str, source: str) -> list[float]:
    use(name)
    parts = prepared(adapted(5))
    load(f"{run_dir}/{source}")
    return losses(parts, 2)


# Saved under; saved under and loaded under.
_SHORT = (("fsdp", "pp"), (("fsdp", "tp"), ("pp", "ddp")))
_LONG = (
    ("fsdp", "tp", "pp", "zero1"),
    (("tp", "pp"), ("pp", "fsdp1"), ("zero1", "cp"), ("pp", "zero1"), ("tp", "ulysses")),
)


@pytest.mark.parametrize(
    ("names", "moves"),
    [_SHORT, pytest.param(*_LONG, marks=pytest.mark.parity)],
    ids=["some", "others"],
)
@on_ranks(2, BLOCKS="2")
def test_adapters_are_saved_and_loaded_under_each_strategy(names: Any, moves: Any) -> None:
    """Training goes on as that of one process; the files hold adapters and their moments alone."""
    wanted = alone(with_optimizer(adapted(0)), 4)
    for name in names:
        assert saved_under(name, rank and 7) == pytest.approx(wanted, abs=CLOSE), name
    for source, name in moves:
        later = loaded_under(name, source)
        assert later == pytest.approx(wanted[2:], abs=CLOSE), (source, name)


@pytest.mark.parametrize("source", ["pp", pytest.param("tp", marks=pytest.mark.parity)])
@on_ranks(2, BLOCKS="2")
def test_what_has_other_adapters_is_refused(source: str) -> None:
    """Another rank of the matrices, and a model without any."""
    saved_under(source)
    use("fsdp")
    parts = prepared(adapted(5, r=4))
    text = refusal(lambda: load(f"{run_dir}/{source}"))
    assert "q_proj.lora_A.default.weight is (2, 16) in the checkpoint and (4, 16) here" in text
    del parts
    parts = prepared(Net())
    assert "Net has no adapters of PEFT" in refusal(lambda: load(f"{run_dir}/{source}"))
    text = refusal(lambda: save(f"{run_dir}/none", is_adapters=True))
    assert "Net has no adapters of PEFT. Leave --adapters out" in text
    assert parts


def with_two() -> Any:
    """Two adapters, of which one is trained at a time."""
    model = adapted(0)
    model.add_adapter("other", config(1, "q_proj"))
    return model


def turns(steps: Callable[[Parts], list[float]], parts: Parts) -> list[float]:
    model = accelerator().unwrap_model(parts[0])
    means = []
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        means += steps(parts)
    return means


@pytest.mark.parametrize(
    "names",
    [("fsdp",), pytest.param(("ddp", "zero1", "pp"), marks=pytest.mark.parity)],
    ids=["some", "others"],
)
@on_ranks(2, BLOCKS="2")
def test_of_two_adapters_the_active_one_is_trained(names: tuple[str, ...]) -> None:
    """Under tp, and switched after prepare; both are saved, and each is exported by its name."""
    wanted = turns(alone, with_optimizer(with_two()))
    for name in names:
        use(name)
        means = turns(losses, prepared(with_two()))
        assert means == pytest.approx(wanted, abs=CLOSE), name
    use("tp")
    parts = prepared(with_two())
    for name in ("default", "other"):
        parts[0].set_adapter(name)
        before = values(parts[0])
        losses(parts)
        assert moved(parts[0], before) == [name]
    save(f"{run_dir}/two", is_adapters=True)
    kept = values(parts[0])
    losses(parts, 2)
    load(f"{run_dir}/two")
    assert moved(parts[0], kept) == []
    for name, count in (("default", 16), ("other", 4)):
        exported = export_model(parts[0], run_dir / name, adapter=name)
        assert len(load_file(exported.path)) == count
    text = refusal(lambda: export_model(parts[0], run_dir / "third", adapter="third"))
    assert "There is no adapter third. There are: default, other" in text


def moved(model: nn.Module, before: dict[str, torch.Tensor]) -> list[str]:
    """Adapters of which a value has changed."""
    now = values(model)
    changed = [key for key in now if not torch.equal(now[key], before[key])]
    return [name for name in ("default", "other") if any(f".{name}." in key for key in changed)]


class Packed(nn.Linear):
    """A layer of which bytes and constants are apart, as bitsandbytes' 4-bit layers are."""

    class Constants:
        def __init__(self, scale):
            self.scale = scale

        def as_dict(self, packed):
            return {"scale": self.scale}

    def pack(self):
        scale = self.weight.detach().abs().max() / 127
        packed = (self.weight.detach() / scale).round().to(torch.int8).view(torch.uint8)
        self.weight = nn.Parameter(packed.view(-1, 1), requires_grad=False)
        self.weight.quant_state = self.quant_state = self.Constants(scale)
        self.shape = self.out_features, self.in_features

    def forward(self, x):
        # As bitsandbytes does: what is in the layer stands in where the parameter has none.
        state = getattr(self.weight, "quant_state", None) or self.quant_state
        whole = self.weight.view(-1).view(torch.int8).view(self.shape)
        return F.linear(x, whole * state.scale, self.bias)


class FourBit(Net):
    def __init__(self, library: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        for block in self.blocks:
            block.mlp.up_proj = quantize(library, block.mlp.up_proj)


def quantize(library: str, old: nn.Linear) -> nn.Module:
    sizes = old.in_features, old.out_features
    if library:
        from bitsandbytes.nn import Linear4bit

        new = Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
        new.load_state_dict(old.state_dict())
        return new.to("cpu")
    new = Packed(*sizes)
    new.load_state_dict(old.state_dict())
    new.pack()
    return new


NEEDS_BITSANDBYTES = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@pytest.mark.parametrize("library", ["", pytest.param("bitsandbytes", marks=NEEDS_BITSANDBYTES)])
@on_ranks(2, BLOCKS="2")
def test_four_bit_weights_stay_as_they_are(library: str) -> None:
    """Under each strategy that takes them, through switches; the others say what to take."""
    build = functools.partial(FourBit, library)
    wanted = alone(with_optimizer(adapted(0, build)), 4)
    use("single")
    user.model, user.optimizer = prepared(adapted(rank and 7, build))
    parameters = dict(accelerator().unwrap_model(user.model).named_parameters())
    packed = {
        name: (p.clone(), quantized.constants(p))
        for name, p in parameters.items()
        if quantized.is_quantized(p)
    }
    del parameters
    assert len(packed) == 2
    for at, name in enumerate(("ddp", "fsdp", "pp", "cp")):
        switch(pick(name))
        (loss,) = losses((user.model, user.optimizer), at, 1)
        assert loss == pytest.approx(wanted[at], abs=CLOSE), name
    parameters = dict(accelerator().unwrap_model(user.model).named_parameters())
    for name, (value, constants) in packed.items():
        assert torch.equal(parameters[name], value)
        assert quantized.constants(parameters[name]) == constants
        kind = type(parameters[name]).__name__
        assert kind == ("Params4bit" if library else "Parameter")
    del parameters
    whole_weights_are_refused()
    del user.model, user.optimizer
    strategies_that_split_are_refused(build)


def whole_weights_are_refused() -> None:
    """By tp, a checkpoint and a merge; adapters alone are saved and loaded."""
    text = refusal(lambda: switch(pick("tp")))
    assert "tp does not split 4-bit weights, such as base_model" in text
    text = refusal(lambda: save(f"{run_dir}/whole"))
    assert "Save the adapters alone: %dist_save PATH --adapters" in text
    text = refusal(lambda: export_model(user.model, run_dir / "merged", is_merged=True))
    assert "is quantized, so nothing is merged into it" in text
    parts = user.model, user.optimizer
    save(f"{run_dir}/packed", is_adapters=True)
    before = losses(parts)
    load(f"{run_dir}/packed")
    assert losses(parts) == before


def strategies_that_split_are_refused(build: Callable[..., nn.Module]) -> None:
    use("ddp")
    text = refusal(lambda: prepared(adapted(0, functools.partial(build, rank))))
    assert "up_proj.weight was quantized from other weights" in text
    for name in ("tp", "fsdp1"):
        use(name)
        text = refusal(lambda: prepared(adapted(0, build)))
        assert f"{name} does not split 4-bit weights" in text
        assert "Use fsdp, ddp, zero1, pp, cp or ulysses" in text
