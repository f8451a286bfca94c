"""An optimizer computes under a strategy what it computes in one process, or that is told."""

import contextlib
import functools
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nbdist.errors import OptionError
from nbdist.parallel.accelerator.accelerator import Accelerator
from nbdist.parallel.live import registry
from nbdist.parallel.optimizers import first_step, rules
from nbdist.strategy.choice import Strategy
from nbdist.strategy.choose import choose
from nbdist.strategy.tensor_layout import TensorLayout
from nbdist.switch.rank import switch as switching
from nbdist.switch.rank.switch import switch
from tests.programs import optimizers
from tests.programs.experts import Mixture
from tests.programs.rank import n, rank, refusal, user
from tests.programs.training import BATCH, Net, labels, tokens
from tests.support.torch_ranks import on_ranks

STEPS = 3
O = torch.optim  # noqa: E741


def make(*, has_experts: bool = False) -> Net:
    torch.manual_seed(0)
    net = Net(n_blocks=2)
    for block in net.blocks:
        # Its gradient is nothing but rounding, which a ratio of norms makes whole steps of.
        block.attention.k_proj.bias.requires_grad_(requires_grad=False)
        if has_experts:
            block.mlp = Mixture(16, 4)
    net.ep_plan = {"blocks.*.mlp.experts": "experts"} if has_experts else {}
    return net


def trained(net: Net) -> list[torch.nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def steps(model: Any, optimizer: Any, backward: Any, cut: Any) -> None:
    for step in range(STEPS):
        x, y = (cut(t[step * BATCH : (step + 1) * BATCH]) for t in (tokens, labels))

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = model(x, labels=y)
            backward(loss)
            return loss

        if isinstance(getattr(optimizer, "optimizer", optimizer), O.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def run(kind: Make, name: str, **given: Any) -> tuple[float, str]:
    """How far a training is from one process's, by what that has changed; what was said of it."""
    has_experts = "ep" in (name, *given)
    alone = make(has_experts=has_experts)
    before = {key: value.clone() for key, value in alone.state_dict().items()}
    steps(alone, kind(trained(alone)), torch.Tensor.backward, lambda tensor: tensor)
    choice = choose(name, given, n)
    registry.set_choice(choice)
    net, said = make(has_experts=has_experts), io.StringIO()
    shares = choice.degrees.dp
    with contextlib.redirect_stderr(said):
        accelerator = Accelerator()
        model, optimizer = accelerator.prepare(net, kind(trained(net)))
        state = torch.random.get_rng_state()
        steps(model, optimizer, accelerator.backward, lambda t: t.chunk(shares)[rank % shares])
        assert torch.equal(torch.random.get_rng_state(), state)
    after = accelerator.get_state_dict(model)
    del model, optimizer, accelerator, net
    gc.collect()
    pairs = [(value, after[key], before[key]) for key, value in alone.state_dict().items()]
    off, change = (
        max((a - b).abs().max().item() for a, b in each)
        for each in zip(*[((value, got), (value, old)) for value, got, old in pairs], strict=True)
    )
    return off / change, said.getvalue()


def right(kind: Make, name: str, limit: float = 3e-5, **given: Any) -> None:
    """As in one process, and nothing is said."""
    off, said = run(kind, name, **given)
    assert off < limit, (kind, name, off)
    assert said == "", (kind, name, said)


def told(kind: Make, name: str, least: float, **given: Any) -> str:
    """Not as in one process, and that is said once."""
    off, said = run(kind, name, **given)
    assert off > least, (kind, name, off)
    assert said.count(" does not step under ") == 1, (kind, name, said)
    return said


@on_ranks(2)
def test_what_looks_at_whole_tensors_is_right_where_it_has_them() -> None:
    """LAMB by DTensors' norms, Muon on matrices and experts, Shampoo's kind; nothing is said."""
    for strategy in ("zero1", "fsdp", "tp", "pp", "ep"):
        right(optimizers.PlainSGD, strategy)
        right(optimizers.Lamb, strategy)
        right(optimizers.TorchMuon, strategy)
    right(optimizers.Muon, "fsdp", ep=2)
    right(optimizers.HalfMuon, "fsdp", limit=0.1)
    right(optimizers.ByTotal, "fsdp")
    right(O.Adafactor, "zero1")
    right(O.Adafactor, "pp")
    right(functools.partial(O.LBFGS, lr=0.1, max_iter=3), "fsdp", limit=1e-4)
    right(O.Rprop, "pp")


@on_ranks(2)
def test_what_takes_a_part_for_the_whole_is_told_at_its_first_step() -> None:
    """With the parameter, both numbers, and what to write; once, and by the same words on all."""
    for strategy in ("fsdp", "tp", "ep"):
        told(optimizers.LambOfParts, strategy, 5e-3)
        said = told(optimizers.LambOfNumbers, strategy, 1e-3)
    right(optimizers.LambOfParts, "pp")
    right(optimizers.LambOfNumbers, "zero1")
    assert said.startswith(
        "LambOfNumbers does not step under ddp x ep as in one process: blocks.0.mlp.experts.up is "
        "off by "
    )
    assert "write .full_tensor().item(), on all ranks" in said
    for strategy in ("zero1", "pp"):
        assert "in sums over all parameters" in told(optimizers.ByTotal, strategy, 0.1)


@on_ranks(2)
def test_what_cannot_be_copied_is_told() -> None:
    """It keeps an optimizer that would step the parameters themselves, so nothing is run."""
    off, said = run(optimizers.AroundAnother, "pp")
    assert off < 1e-5
    assert said == (
        "AroundAnother's step under pp could not be compared with one process's: its attribute "
        "inner is a SGD, which is not copied. If it looks at norms or whole matrices, compare the "
        "losses of some steps with ddp's.\n"
    )


@on_ranks(2)
def test_a_rank_that_steps_no_sample_is_no_error() -> None:
    """Of few samples, matrices first; a sum over all parameters needs those of two ranks."""
    first_step._MOST_SAMPLES = 1
    for strategy in ("zero1", "pp"):
        off, said = run(optimizers.ByTotal, strategy)
        assert off > 0.1
        assert said == "", said
    told(optimizers.LambOfNumbers, "tp", 1e-3)


@on_ranks(2)
def test_what_is_too_large_is_named() -> None:
    """Nothing is left out without a word."""
    first_step._MOST_ELEMENTS = 500
    _, said = run(optimizers.Lamb, "ep")
    assert "(blocks.0.mlp.experts.up" in said.replace("process's: ", "(")
    assert said.count("would take too much memory") == 1


@on_ranks(2)
def test_an_optimizer_is_compared_once_under_each_strategy() -> None:
    """After a switch again, with the state that it has by then; its steps stay its own."""
    registry.set_choice(choose("ddp", {}, n))
    accelerator, net = Accelerator(), make()
    user.model, optimizer = accelerator.prepare(net, optimizers.LambOfNumbers(trained(net)))
    del net
    said: dict[str, list[int]] = {}
    for name in ("ddp", "fsdp", "zero1", "fsdp"):
        switch(choose(name, {}, n))
        with contextlib.redirect_stderr(io.StringIO()) as text:
            steps(user.model, optimizer, accelerator.backward, lambda t: t.chunk(n)[rank])
        said[name] = [*said.get(name, []), text.getvalue().count("does not step")]
    assert said == {"ddp": [0], "fsdp": [1, 1], "zero1": [0]}
    assert {state["step"] for state in optimizer.optimizer.state.values()} == {4 * STEPS}


@on_ranks(2)
def test_what_cannot_be_right_is_refused_by_prepare_and_by_a_switch() -> None:
    """Before a step, in a sentence that says what to take."""
    for kind, strategies in (
        (O.Adafactor, ("fsdp", "tp", "ep", "fsdp1")),
        (O.LBFGS, ("tp", "ep", "pp", "zero1", "fsdp1")),
        (O.Rprop, ("fsdp", "tp", "ep")),
        (O.Muon, ("fsdp1",)),
    ):
        for name in strategies:
            registry.set_choice(choose(name, {}, n))
            net = make(has_experts=name == "ep")
            model = Accelerator().prepare(net)
            matrices = [p for p in model.parameters() if p.ndim == 2 or kind is not O.Muon]
            lacking = torch.zeros(2, 2, requires_grad=True) if kind is O.Muon else None
            optimizer = kind(matrices if lacking is None else [lacking])
            if lacking is not None:
                optimizer.param_groups[0]["params"][:] = list(model.parameters())
            sentence = refusal(lambda optimizer=optimizer: Accelerator().prepare(optimizer))
            assert sentence.startswith(f"{kind.__name__} "), (kind, name, sentence)
            assert "Use " in sentence
            del net, model, optimizer, matrices
            gc.collect()
    registry.set_choice(choose("ddp", {}, n))
    accelerator, net = Accelerator(), make()
    held = accelerator.prepare(net, O.LBFGS(trained(net)))
    asked = switching.refusal(choose("pp", {}, n))
    sentence = refusal(lambda: switch(choose("pp", {}, n)))
    assert asked == sentence
    assert switching.refusal(choose("fsdp", {}, n)) == ""
    assert sentence.startswith("LBFGS looks at all gradients together, and pp gives a rank the")
    assert registry.current().name == "ddp"
    del held


def layouts(**dims: int) -> list[TensorLayout]:
    return [TensorLayout((4, 4)), TensorLayout((4, 4), **dims)]


@pytest.mark.parametrize(
    ("name", "parameters", "refused"),
    [
        ("fsdp", layouts(shard_dim=0), True),
        ("tp", layouts(tp_dim=1), True),
        ("ddp", layouts(), False),
        ("pp", layouts(), False),
    ],
)
def test_kernels_that_take_addresses_are_refused_where_parameters_are_dtensors(
    name: str, parameters: list[TensorLayout], refused: bool
) -> None:
    """Bitsandbytes' classes, by their package; it need not be there."""
    kind = type("AdamW8bit", (O.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    optimizer = kind([torch.zeros(2, requires_grad=True)])
    choice: Strategy = choose(name, {}, 2)
    sentence = r"AdamW8bit gives the addresses .* kernels of its own, and .* DTensors .* torchao"
    with pytest.raises(OptionError, match=sentence) if refused else contextlib.nullcontext():
        rules.check(optimizer, choice, parameters)


@pytest.mark.parametrize(
    ("off", "apart", "is_wrong"),
    [
        (1e-6, 0.5, False),  # sums in another order
        (2e-2, 0.5, False),  # Muon's in bf16
        (0.5, 0.5, True),
        (2e-2, 2e-2, True),
        (0.3, 0.5, True),
        (0.3, 0.0, True),
        (float("nan"), 0.0, True),
    ],
)
def test_rounding_is_told_from_parts(off: float, apart: float, is_wrong: bool) -> None:
    """By what a change of parts alone would be off."""
    assert first_step._Offset("w", off, apart, 1.0, 1e-7).is_wrong == is_wrong
