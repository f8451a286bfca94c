"""Errors of a cell that only a strategy explains, and what is refused before torch's own words."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.engine import error_notes
from tests.support.torch_ranks import run_ranks
from tests.support.training import MODEL

TEXT = (
    MODEL
    + """
    import math, warnings
    from nbdist.engine.error_notes import explain
    from nbdist.parallel.accelerator import torch_grad
    torch_grad.install()

    def note(call):
        try:
            call()
        except Exception as error:
            return explain(error)

    def prepared(name):
        use(name)
        torch.manual_seed(0)
        return Accelerator().prepare(Net())

    x, y = tokens[:8], labels[:8]
    result = {}
    pipeline = prepared("pp")
    blocks = pipeline.module.blocks
    own, other = blocks[3 * rank], blocks[3 - 3 * rank]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            handles = [block.register_forward_hook(lambda *_: None) for block in blocks]
            pipeline(x, y).backward()
            for handle in handles:
                handle.remove()
    result["hooks"] = [str(w.message) for w in caught if "forward hooks" in str(w.message)]
    kept = []
    own.register_forward_hook(lambda block, args, output: kept.append(output.square().mean()))
    side = pipeline(x, y) + kept[-1]
    result["freed"] = note(lambda: side.backward())
    result["other"], result["own"] = note(lambda: other.aux), note(lambda: own.aux)
    result["free"] = note(lambda: nn.Linear(2, 2).aux)
    torch.manual_seed(0)
    alone = Net()
    wanted = dict(zip(dict(alone.named_parameters()),
                      torch.autograd.grad(alone(x, y), list(alone.parameters())), strict=True))
    mine = {k: p for k, p in pipeline.module.named_parameters() if not p.is_meta}
    found = torch.autograd.grad(pipeline(x, y), list(mine.values()))
    result["stage"] = max((a - wanted[k]).abs().max().item() for k, a in zip(mine, found))
    result["pp"] = refusal(lambda: torch.autograd.grad(pipeline(x, y), pipeline.parameters()))
    del pipeline, blocks, own, other, mine

    sharded = prepared("fsdp")
    inputs, shape = list(sharded.parameters()), sharded.head.weight.to_local().shape
    result["fsdp"] = refusal(lambda: torch.autograd.grad(sharded(x, y), inputs, allow_unused=True))
    values = dict(sharded.named_parameters())
    result["call"] = refusal(lambda: torch.func.functional_call(sharded, values, (x, y)))
    result["misfit before"] = note(lambda: torch.ones(2) + torch.ones(3))
    sharded.head.adapter = nn.Linear(*shape)
    result["misfit"] = note(lambda: torch.ones(2) + torch.ones(3))
    result["other error"] = note(lambda: torch.ones(2).view(3))
    del sharded.head.adapter, sharded, inputs, values
    gc.collect()

    copies = prepared("ddp")
    alone = copy.deepcopy(copies.module)
    parts = zip(torch.autograd.grad(copies(x, y), copies.parameters()),
                torch.autograd.grad(alone(x, y), list(alone.parameters())), strict=True)
    given = {f"module.{name}": torch.zeros_like(p) for name, p in alone.named_parameters()}
    zeros = torch.func.functional_call(copies, given, (x, y))
    result["call under ddp"] = abs(zeros.item() - math.log(24))
    result["ddp"] = max((a - b).abs().max().item() for a, b in parts)
    done(**result)
"""
)


def test_what_a_strategy_explains_is_said(tmp_path: Path) -> None:
    """Another stage's attributes and hooks, adapters made from parts, autograd.grad under fsdp."""
    first, second = run_ranks(tmp_path, 2, "    import copy\n" + TEXT)

    for end, there in ((first, "blocks.3"), (second, "blocks.0")):
        assert f"{there} is of another stage of the pipeline" in end["other"]
        assert end["own"] == end["free"] == ""
        assert "let blocks hand it on and forward return it in its loss" in end["freed"]
        (hooks,) = end["hooks"]
        assert there in hooks
        assert "not called on this rank" in hooks
        assert "gives no gradients of parameters under fsdp" in end["fsdp"]
        assert "and not with those that it is given" in end["call"]
        assert end["misfit before"] == end["other error"] == ""
        assert "Net got 2 parameters after prepare (head.adapter.weight)" in end["misfit"]
        assert "parameters of other stages of the pipeline" in end["pp"]
        assert max(end["ddp"], end["stage"], end["call under ddp"]) < 2e-6


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
