"""The process that counts with fake tensors: what it answers, and how it ends."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nbdist.errors import OptionError
from nbdist.planner.fake import pickle_by_value
from nbdist.planner.fake.models import PickledModel
from nbdist.planner.fake_protocol import NAME, Source
from nbdist.planner.kernel.fake_process import FakeEngine
from nbdist.planner.memory import FORMULAS, Memory, memory_of
from nbdist.planner.models import ModelShape, of_config
from nbdist.planner.workload import Workload
from nbdist.strategy.choice import Strategy
from nbdist.strategy.choose import choose
from tests.support.kernel import notebook_env

_ROOT = Path(__file__).resolve().parents[2]
_CONFIG = {
    "model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 640, "vocab_size": 500, "num_hidden_layers": 4,
}  # fmt: skip
TINY = of_config(_CONFIG)
LOAD = Workload(batch=2, sequence=256, has_gpu=False)
# Embedding, head, last norm; four blocks of q, k, v, o, three of the MLP, two norms.
BLOCK = 256 * (256 + 128 + 128 + 256) + 3 * 256 * 640 + 2 * 256
NUMBERS = 2 * 500 * 256 + 256 + 4 * BLOCK


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    """One process for all cases."""
    with FakeEngine(Source(config=_CONFIG)) as fake_engine:
        yield fake_engine


def run_of(engine: FakeEngine, name: str, n: int = 2, **options: object) -> Memory:
    memory = engine(TINY, choose(name, options, n), LOAD)
    assert (memory.engine, memory.note) == (NAME, ""), memory
    return memory


@pytest.mark.parametrize(
    ("name", "n", "options", "parts"),
    [("fsdp", 8, {}, 8), ("fsdp1", 4, {}, 4),
     pytest.param("ddp", 2, {}, 1, marks=pytest.mark.parity),
     pytest.param("fsdp", 8, {"shard": "hybrid"}, 4, marks=pytest.mark.parity)],
)  # fmt: skip
def test_states_are_exact(
    engine: FakeEngine, name: str, n: int, options: dict[str, object], parts: int
) -> None:
    """Every parameter of this model can be split by 8 but the vocabulary's, whose first chunk has
    63 of 500 rows.
    """
    memory = run_of(engine, name, n, **options)
    rows = 0 if name == "fsdp1" else 2 * 256 * (-(-500 // parts) - 500 / parts)
    wanted = 4 * (NUMBERS / parts + rows)

    assert memory.parameters == memory.gradients == wanted
    assert memory.optimizer == 2 * wanted
    assert memory.overhead == 0


def test_what_checkpointing_and_bf16_leave(engine: FakeEngine) -> None:
    """Activations of one block go to its input: 2 x 256 tokens of 256 numbers."""
    plain, full, half = (
        run_of(engine, "single", **options)
        for options in ({}, {"checkpoint": "full"}, {"bf16": True})
    )
    formula = memory_of(TINY, choose("single", {}, 2), LOAD)

    assert full.activations < plain.activations / 4
    assert full.activations > 4 * 2 * 256 * 256 * 4
    assert half.activations < plain.activations
    assert plain.peak == pytest.approx(formula.peak, rel=0.01)
    assert plain.states == formula.states


def test_accumulated_gradients_are_there_in_the_next_forward(engine: FakeEngine) -> None:
    once, twice = (run_of(engine, "single", **options) for options in ({}, {"accumulate": 2}))

    assert twice.most - once.most == pytest.approx(twice.gradients, rel=0.2)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [("pp", {}, "a pipeline's stages wait"), ("cp", {}, "compared with the whole one by value"),
     ("deepspeed", {}, "DeepSpeed has its own"), ("fsdp", {"offload": "cpu"}, "in the host's"),
     ("ddp", {"compile": True}, "torch.compile")],
)  # fmt: skip
def test_what_is_not_run_is_counted_by_formulas(
    engine: FakeEngine, name: str, options: dict[str, object], why: str
) -> None:
    """And says why; the states are the run's where it has them."""
    choice = choose(name, options, 2)
    memory = engine(TINY, choice, LOAD)

    assert memory.engine == FORMULAS
    assert why in memory.note
    assert memory.activations == memory_of(TINY, choice, LOAD).activations > 0


_LOOKS = """
from torch import nn
class Looks(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else x
"""


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((torch.ones(32, 16),), "the run failed with DataDependentOutputException"),
        (None, "its inputs are not known"),
    ],
)
def test_states_of_what_cannot_be_run_are_counted(
    engine: FakeEngine, args: tuple[torch.Tensor] | None, why: str
) -> None:
    """Where the model looks at values, and without inputs; the reason is told."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(_LOOKS, cell)  # as a cell runs
    sent = PickledModel(cell["Looks"](16, 16), args)
    engine._source = Source(pickled=pickle_by_value.dumps(sent))
    memory = engine(TINY, choose("ddp", {}, 2), LOAD)
    engine._source = Source(config=_CONFIG)  # goes with the next request

    assert memory.engine == FORMULAS
    assert why in memory.note
    assert memory.parameters == 4 * (16 * 16 + 16)


def test_a_strategy_that_does_not_go_with_the_model_is_refused(engine: FakeEngine) -> None:
    """As prepare refuses it."""
    with pytest.raises(OptionError, match="tp"):
        engine(TINY, choose("tp", {}, 64), LOAD)


def test_a_count_has_its_own_states(engine: FakeEngine) -> None:
    """The assumed shape has other parameters than were typed."""
    assumed = ModelShape("1e6", 1_000_000, TINY.shape, is_assumed=True)
    memory = engine(assumed, choose("fsdp", {}, 2), LOAD)

    assert memory.parameters == 4 * 1_000_000 / 2
    assert memory.engine == NAME


def _otherwise(model: ModelShape, choice: Strategy, load: Workload) -> Memory:
    return Memory(1.0, 1.0, 1.0, 1.0, 1.0)


def test_a_deadline() -> None:
    """The process is ended, and everything that is left is counted otherwise."""
    fake_engine = FakeEngine(Source(config=_CONFIG), otherwise=_otherwise, limit_s=0.05)
    with fake_engine:
        memories = [fake_engine(TINY, choose(name, {}, 2), LOAD) for name in ("ddp", "fsdp")]
        assert fake_engine._process is None

    assert {memory.note for memory in memories} == {
        "the process of the fake run did not answer within 0 s"
    }
    assert memories[0].parameters == 1.0


def test_a_process_that_ends(engine: FakeEngine) -> None:
    with FakeEngine(Source(config=_CONFIG), otherwise=_otherwise) as fake_engine:
        fake_engine._start().kill()
        memory = fake_engine(TINY, choose("ddp", {}, 2), LOAD)

    assert memory.note.startswith("the process of the fake run ended (exit code -9")


def test_a_config_that_makes_no_model(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is told; nothing is raised."""
    monkeypatch.setattr(engine, "_otherwise", _otherwise)
    engine._source = Source(config={"model_type": "no-such-type"})
    memory = engine(TINY, choose("ddp", {}, 2), LOAD)
    engine._source = Source(config=_CONFIG)  # goes with the next request

    assert "the run failed with" in memory.note


def test_it_ends_with_the_notebook() -> None:
    """Whoever started it is killed: its input ends, and so does it, amid a run as well."""
    text = (
        "import os, sys, time\n"
        "from nbdist.planner.kernel.fake_process import FakeEngine\n"
        "from nbdist.planner.fake_protocol import Source\n"
        "one = FakeEngine(Source())\n"
        "print(one._start().pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", text],
        env=notebook_env({"PYTHONPATH": str(_ROOT)}),
        stdout=subprocess.PIPE,
    ) as parent:
        try:
            assert parent.stdout is not None
            child = psutil.Process(int(parent.stdout.readline()))
        finally:
            parent.kill()
        _, alive = psutil.wait_procs([child], timeout=60)

    assert alive == []
