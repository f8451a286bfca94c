"""Live models as records: alike on all ranks or not, their shape, batch, and formulas."""

import functools
import re
from dataclasses import replace

import pytest

from nbdist.errors import NbdistError, OptionError
from nbdist.planner.advice import advise
from nbdist.planner.devices import DEVICES, with_memory
from nbdist.planner.live_model import (
    LiveModel,
    ParameterKind,
    alike,
    by_kinds,
    described,
    load_of,
    shape_of,
)
from nbdist.planner.memory import Memory, memory_of
from nbdist.planner.models import CONFIGS, ModelShape, model_of
from nbdist.planner.plan import NO, UNKNOWN, Plan, SearchSpace, plan
from nbdist.planner.view.plan_view import shown_plan
from nbdist.planner.workload import Workload
from nbdist.strategy.choice import Strategy
from nbdist.strategy.choose import choose

NET = LiveModel(
    "net", "Net",
    (ParameterKind("float32", True, 600, 2400), ParameterKind("bfloat16", False, 1400, 2800)),
    buffers_bytes=40, n_buffers=1, digest="a", optimizer="AdamW", optimizer_word="adamw",
    tied=(("a.weight", "b.weight"),), blocks="layers (4 x Block)",
)  # fmt: skip
FROZEN = replace(NET, kinds=(ParameterKind("float32", False, 600, 2400),))
GPT = LiveModel(
    "gpt", "GPT2LMHeadModel",
    (ParameterKind("float32", True, model_of("gpt2").parameters, 4 * model_of("gpt2").parameters),),
    config=CONFIGS["gpt2"], is_language_model=True, inputs=("(3, 7) int64",), inputs_shape=(3, 7),
)  # fmt: skip


def planned(device: str = "h100", strategy: str | None = None) -> Plan:
    """Of NET on two ranks, by its kinds of parameters."""
    engine = functools.partial(by_kinds, NET)
    on = DEVICES.get(device) or with_memory(device)
    return plan(SearchSpace(shape_of(NET), on, 2, Workload(), engine=engine, strategy=strategy))


def test_ranks_have_the_same_model() -> None:
    """And it has parameters."""
    assert alike([NET, replace(NET, name="net")]) == NET
    with pytest.raises(
        NbdistError, match=r"differs between ranks: rank 1-2 has Net \(600 parameters\)"
    ):
        alike([NET, replace(FROZEN, digest="b"), replace(FROZEN, digest="b")])
    with pytest.raises(OptionError, match=r"net \(Net\) has no parameters"):
        alike([replace(NET, kinds=())])


def test_a_config_speaks_for_its_own_model_alone() -> None:
    """An adapter adds a few parameters; another head or depth does not pass for the config."""
    more = replace(GPT, kinds=(*GPT.kinds, ParameterKind("float32", True, 10**6, 4 * 10**6)))
    other = replace(GPT, kinds=(ParameterKind("float32", True, 10**6, 4 * 10**6),))
    unknown = replace(GPT, config={"model_type": "bert"})

    assert shape_of(GPT).has_shape
    assert shape_of(GPT).shape == model_of("gpt2").shape
    assert shape_of(more).has_shape
    assert not shape_of(other).has_shape
    assert not shape_of(unknown).has_shape
    assert not shape_of(NET).has_shape
    assert shape_of(NET).parameters == 2000


def test_the_batch_is_that_of_the_inputs() -> None:
    """And the sequence, of tokens; the optimizer is the model's unless one was typed."""
    load = load_of(GPT, Workload(batch=9))
    assert (load.batch, load.sequence) == (3, 7)
    assert load_of(replace(NET, inputs_shape=(5, 4)), Workload()) == Workload(batch=5)
    assert load_of(replace(NET, optimizer_word="sgd"), Workload()).optimizer == "sgd"
    assert load_of(replace(NET, optimizer_word="sgd"), Workload(), "adam").optimizer == "adam"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("single", (5200, 2400, 4800)), ("fsdp", (2600, 1200, 2400)), ("zero1", (5200, 2400, 2400))],
)
def test_what_is_frozen_has_no_gradient_and_no_state(name: str, wanted: tuple[float, ...]) -> None:
    """600 trained numbers of 4 bytes, 1400 frozen ones of 2."""
    memory = by_kinds(NET, shape_of(NET), choose(name, {}, 2), Workload())

    assert (memory.parameters, memory.gradients, memory.optimizer) == wanted
    assert memory.is_partial


def test_all_frozen() -> None:
    memory = by_kinds(FROZEN, shape_of(FROZEN), choose("ddp", {}, 2), Workload())

    assert (memory.gradients, memory.optimizer, memory.step) == (0, 0, 0)


def test_a_shape_gives_activations() -> None:
    choice = choose("fsdp", {}, 4)
    memory, formula = (
        by_kinds(GPT, shape_of(GPT), choice, Workload()),
        memory_of(model_of("gpt2"), choice, Workload()),
    )  # fmt: skip

    assert not memory.is_partial
    assert memory.activations == formula.activations
    assert memory.parameters == pytest.approx(formula.parameters)


def test_a_partial_count_is_no_verdict() -> None:
    """Unless what is counted is too much already."""

    def rows(device: str) -> set[str]:
        result = planned(device)
        assert all(row.time is None for row in result.rows)
        assert advise(result).row is None
        return {row.verdict for row in result.rows if row.memory}

    assert rows("24GB") == {UNKNOWN}
    assert rows("0.5GB") == {NO}


def test_what_ddp_copies_counts_without_a_step() -> None:
    """Its buckets are as large as the gradients; fsdp has none."""
    rows = {row.typed: row.memory for row in planned().rows if row.memory is not None}

    assert {name: rows[name].buffers for name in ("single", "ddp", "zero1", "fsdp")} == {
        "single": 40, "ddp": 40 + 600 * 4, "zero1": 40 + 600 * 4, "fsdp": 40,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "sent_bytes"), [("ddp", 4 * 600), ("tp", 0)])
def test_what_a_shapeless_model_sends(name: str, sent_bytes: int) -> None:
    """Gradients of what is trained: 2 x 1/2 of 4 bytes each; what tp sends nobody knows."""
    assert planned(strategy=name).rows[0].sent_bytes == sent_bytes


def test_what_is_not_known_is_no_advantage() -> None:
    """tp, whose sums over activations are not counted, does not win by 0 bytes."""

    def count(shape: ModelShape, choice: Strategy, load: Workload) -> Memory:
        return replace(by_kinds(NET, shape, choice, load), is_partial=False)

    result = plan(SearchSpace(shape_of(NET), DEVICES["h100"], 2, Workload(), engine=count))
    [tp] = plan(
        SearchSpace(shape_of(NET), DEVICES["h100"], 2, Workload(), engine=count, strategy="tp")
    ).rows
    advice = advise(result)
    alone = advise(replace(result, rows=(tp,)))

    assert advice.row is not None
    assert advice.row.typed == "ddp"
    assert advice.sentences[1] == "tp, pp and cp are not compared: what they send is not known."
    assert alone.sentences[0].endswith("; what it sends is not known.")
    assert re.search(r"^tp .* \?  +-$", shown_plan(result, advice).text, re.MULTILINE)


def test_it_is_described() -> None:
    first, second = described(NET)

    assert first.startswith("net is a Net: 600 float32 trained (0.0 MB), 1,400 bfloat16 frozen")
    assert "1 buffers" in second
    assert "tied: a.weight and b.weight; blocks: layers (4 x Block); AdamW" in second
    assert "no list of blocks" in described(GPT)[1]
    assert "called with (3, 7) int64" in described(GPT)[1]


def test_what_is_gathered_counts_without_a_shape() -> None:
    """Under --shard grad-op all 2000 parameters until backward ends, in bf16 where it computes so.

    A CPU's optimizers step parameter by parameter, without lists of all.
    """
    full, whole, half = (
        by_kinds(NET, shape_of(NET), choose("fsdp", given, 2), Workload())
        for given in ({}, {"shard": "grad-op"}, {"shard": "grad-op", "precision": "bf16"})
    )
    on_cpu = by_kinds(NET, shape_of(NET), choose("fsdp", {}, 2), Workload(has_gpu=False))

    assert whole.buffers - full.buffers == 4 * 2000
    assert half.buffers - full.buffers == 2 * 2000
    assert full.step == 4 * 600 / 2
    assert on_cpu.step == 0


STACK = replace(
    NET, experts=4, kinds=(
        ParameterKind("float32", True, 600, 2400),
        ParameterKind("float32", True, 4000, 16000, is_stacked=True),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given", "held"),
    [
        ("ddp", {}, 2400 + 16000),
        ("ep", {"ep": 2}, 2400 + 8000),
        ("ep", {}, 2400 + 4000),
        ("fsdp", {"ep": 2}, 600 + 4000),
        ("tp", {}, 600 + 16000),
        ("fsdp", {"tp": 2, "ep": 2}, 600 + 8000),
    ],
)
def test_experts_of_a_live_model(name: str, given: dict[str, object], held: int) -> None:
    """ep shares them, tp leaves them whole; DDP copies the gradients of all that is not shared."""
    memory = by_kinds(STACK, shape_of(STACK), choose(name, given, 4), Workload())

    assert (memory.parameters, memory.gradients, memory.optimizer) == (held, held, 2 * held)
    if name == "ep":
        assert memory.buffers == 40 + 2400
    assert "4,000 float32 trained in experts (0.0 MB)" in described(STACK)[0]


def test_experts_that_are_not_there_or_do_not_divide_are_refused() -> None:
    """In the words of the ranks; what they would send is not known without a shape."""
    for live, text in ((NET, "net has no experts that"), (STACK, "3 ranks cannot share the 4 exp")):
        with pytest.raises(OptionError, match=text):
            by_kinds(live, shape_of(live), choose("ep", {}, 3), Workload())
    engine = functools.partial(by_kinds, STACK)
    result = plan(
        SearchSpace(shape_of(STACK), DEVICES["h100"], 4, Workload(), engine=engine, strategy="ep")
    )
    assert not result.counts_sent(result.rows[0])
