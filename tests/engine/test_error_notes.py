"""Errors of a cell that only a strategy explains, and what is refused before torch's own words."""

import gc
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nbdist.engine import error_notes
from nbdist.parallel.accelerator import torch_grad
from nbdist.parallel.accelerator.accelerator import Accelerator
from tests.programs.rank import rank, refusal
from tests.programs.training import Net, labels, tokens, use
from tests.support.torch_ranks import on_ranks

X, Y = tokens[:8], labels[:8]
CLOSE = 2e-6


def note(call: Callable[[], Any]) -> str:
    """What a call's error is told to mean; nothing where none is raised."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return error_notes.explain(error)
    raise AssertionError("no error")


def prepared(name: str) -> Any:
    use(name)
    torch.manual_seed(0)
    return Accelerator().prepare(Net())


def gradients_alone() -> dict[str, torch.Tensor]:
    """Of the same model by itself, by parameter."""
    torch.manual_seed(0)
    model = Net()
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(model(X, Y), parameters), strict=True))


def assert_close(parameters: dict[str, Any], gradients: Any, wanted: dict[str, Any]) -> None:
    for name, gradient in zip(parameters, gradients, strict=True):
        assert (gradient - wanted[name]).abs().max() < CLOSE, name


def check_pp() -> None:
    """Another stage's attributes and hooks, a loss aside, autograd.grad of other stages."""
    pipeline = prepared("pp")
    blocks = pipeline.module.blocks
    number = 3 - 3 * rank
    own, other = blocks[3 * rank], blocks[number]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            handles = [block.register_forward_hook(lambda *_: None) for block in blocks]
            pipeline(X, Y).backward()
            for handle in handles:
                handle.remove()
    (hooks,) = [str(w.message) for w in caught if "forward hooks" in str(w.message)]
    assert f"blocks.{number}" in hooks
    assert "not called on this rank" in hooks
    kept = []
    own.register_forward_hook(lambda block, args, output: kept.append(output.square().mean()))
    side = pipeline(X, Y) + kept[-1]
    assert "let blocks hand it on and forward return it in its loss" in note(side.backward)
    assert f"blocks.{number} is of another stage of the pipeline" in note(lambda: other.aux)
    assert note(lambda: own.aux) == note(lambda: nn.Linear(2, 2).aux) == ""
    mine = {name: p for name, p in pipeline.module.named_parameters() if not p.is_meta}
    assert_close(mine, torch.autograd.grad(pipeline(X, Y), list(mine.values())), gradients_alone())
    refused = refusal(lambda: torch.autograd.grad(pipeline(X, Y), pipeline.parameters()))
    assert "parameters of other stages of the pipeline" in refused


def check_fsdp() -> None:
    """Adapters made from parts, autograd.grad, a functional call."""
    sharded = prepared("fsdp")
    values = dict(sharded.named_parameters())
    inputs, shape = list(values.values()), sharded.head.weight.to_local().shape
    refused = refusal(lambda: torch.autograd.grad(sharded(X, Y), inputs, allow_unused=True))
    assert "gives no gradients of parameters under fsdp" in refused
    refused = refusal(lambda: torch.func.functional_call(sharded, values, (X, Y)))
    assert "and not with those that it is given" in refused
    assert note(lambda: torch.ones(2) + torch.ones(3)) == ""
    sharded.head.adapter = nn.Linear(*shape)
    misfit = note(lambda: torch.ones(2) + torch.ones(3))
    assert "Net got 2 parameters after prepare (head.adapter.weight)" in misfit
    assert note(lambda: torch.ones(2).view(3)) == ""


def check_ddp() -> None:
    """autograd.grad is one process's; what a functional call is given is what it computes with."""
    copies = prepared("ddp")
    wanted = gradients_alone()
    assert_close(wanted, torch.autograd.grad(copies(X, Y), copies.parameters()), wanted)
    given = {f"module.{name}": torch.zeros_like(p) for name, p in wanted.items()}
    zeros = torch.func.functional_call(copies, given, (X, Y))
    assert abs(zeros.item() - math.log(24)) < CLOSE


@on_ranks(2)
def test_what_a_strategy_explains_is_said() -> None:
    """Another stage's attributes and hooks, adapters made from parts, autograd.grad under fsdp."""
    torch_grad.install()
    for check in (check_pp, check_fsdp, check_ddp):
        check()
        gc.collect()


def test_a_note_ends_the_message_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the shell is handed the error or finds it itself; other errors stay as they are."""
    shown: list[str] = []

    def show(exc_tuple: Any = None, **_options: Any) -> None:
        shown.append(str(error if exc_tuple is None else exc_tuple[1]))

    shell = SimpleNamespace(showtraceback=show)
    error_notes.install(shell)
    monkeypatch.setattr(error_notes, "explain", lambda e: "Why" if "known" in str(e) else "")
    for text in ("known", "other"):
        try:
            int(text)
        except ValueError as caught:
            error = caught
            shell.showtraceback()
        shell.showtraceback((ValueError, ValueError(text), None), tb_offset=1)

    literal = "invalid literal for int() with base 10:"
    assert shown == [f"{literal} 'known'. Why", "known. Why", f"{literal} 'other'", "other"]
