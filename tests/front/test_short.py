"""The least that has to work with a torch: steps, a hang, recovery, a switch, a checkpoint."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.front.conftest import start_ranks
from tests.support.kernel import Kernel

pytestmark = pytest.mark.versions

_SETUP = """%%distributed
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                     num_attention_heads=4, num_key_value_heads=4)
words = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))

def begin():
    global model, optimizer, losses
    torch.manual_seed(0)
    made = LlamaForCausalLM(config)
    model, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters(), 1e-2))
    losses = []

def step():
    loss = model(input_ids=words, labels=words).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(round(loss.item(), 4))
"""
_HANG = "%%distributed\nstep()\nif rank == 0: torch.distributed.all_reduce(torch.ones(1))"
N_STEPS = 4


@pytest.fixture(scope="module")
def trained() -> Iterator[Kernel]:
    """Two ranks with a model to train."""
    with Kernel() as kernel:
        start_ranks(kernel)
        _ok(kernel, _SETUP)
        yield kernel


def _ok(kernel: Kernel, code: str) -> str:
    cell = kernel.run(code)
    assert cell.status == "ok", cell.visible
    return cell.text


def _losses(kernel: Kernel) -> list[float]:
    """What the steps gave so far, which is equal on both ranks."""
    text = _ok(kernel, "%%distributed\nprint(losses)")
    assert text.startswith("[0-1] "), text
    losses: list[float] = ast.literal_eval(text.removeprefix("[0-1] ").strip())
    return losses


@pytest.fixture(scope="module")
def expected(trained: Kernel) -> list[float]:
    """The losses of each rank by itself."""
    _ok(trained, "%dist_strategy single")
    _ok(trained, f"%%distributed\nbegin()\nfor _ in range({N_STEPS}): step()")
    return _losses(trained)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tp", "pp"])
def test_a_hang_leaves_the_losses_as_they_were(
    trained: Kernel, expected: list[float], strategy: str
) -> None:
    """A collective of one rank alone is told and broken off, and the training goes on."""
    _ok(trained, f"%dist_strategy {strategy}")
    _ok(trained, "%%distributed\nbegin()\nstep()")
    hung = trained.run(_HANG)
    _ok(trained, f"%%distributed\nfor _ in range({N_STEPS - 2}): step()")

    hung.check_failure("Deadlock", r"rank 0 .*all_reduce\(float32\[1\]\)")
    assert _losses(trained) == pytest.approx(expected, abs=2e-3)


def test_switches_and_a_checkpoint_leave_the_losses_as_they_were(
    trained: Kernel, expected: list[float], tmp_path: Path
) -> None:
    """fsdp, saved, stepped, loaded, switched to tp and to ddp."""
    _ok(trained, "%dist_strategy fsdp")
    _ok(trained, "%%distributed\nbegin()\nstep()")
    _ok(trained, f"%dist_save {tmp_path / 'saved'}")
    _ok(trained, "%%distributed\nstep()\nlosses.pop()")
    _ok(trained, f"%dist_load {tmp_path / 'saved'}")
    _ok(trained, "%%distributed\nstep()")
    for strategy in ("tp", "ddp"):
        _ok(trained, f"%dist_strategy {strategy}")
        _ok(trained, "%%distributed\nstep()")

    assert _losses(trained) == pytest.approx(expected, abs=2e-3)
