"""What a plan recommends, and why not another: rules that docs/plan.md states."""

import functools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from nbdist.bandwidth.latency import Fit
from nbdist.bandwidth.results import LinkModel
from nbdist.planner.advice import COPIES_MARGIN, MARGIN, Advice, advise
from nbdist.planner.devices import DEVICES, Device, with_memory
from nbdist.planner.live_model import LiveModel, ParameterKind, by_kinds, shape_of
from nbdist.planner.memory import Memory
from nbdist.planner.models import ModelShape, model_of
from nbdist.planner.plan import NO, SAFE, Plan, PlanRow, SearchSpace, plan
from nbdist.planner.step_time import Time
from nbdist.planner.workload import Workload
from nbdist.strategy.choice import Strategy

NET = LiveModel("net", "Net", (ParameterKind("float32", True, 2000, 8000),), optimizer_word="adamw")


def advised(
    model: str, n: int, device: Device, load: Workload | None = None, **options: object
) -> tuple[Plan, Advice]:
    result = plan(SearchSpace(model_of(model), device, n, load or Workload(), given=options))
    return result, advise(result)


def chosen(advice: Advice) -> PlanRow:
    assert advice.row is not None, advice.sentences
    return advice.row


def with_times(result: Plan, seconds: Mapping[str, float]) -> Plan:
    """The plan with the rows that are named alone, and these times of a sample."""
    rows = [row for row in result.rows if row.typed in seconds]
    return replace(
        result,
        rows=tuple(
            replace(row, time=Time(seconds[row.typed] * row.samples, 0, 0, row.samples))
            for row in rows
        ),
    )


# What was not counted


def test_bytes_that_were_not_counted_are_not_none() -> None:
    """Where only tp, pp and cp fit, nobody knows what they send: none is recommended for 0 B."""

    def count(shape: ModelShape, choice: Strategy, load: Workload) -> Memory:
        memory = replace(by_kinds(NET, shape, choice, load), is_partial=False)
        return memory if choice.degrees.product > choice.degrees.dp else replace(memory, step=9e9)

    result = plan(SearchSpace(shape_of(NET), with_memory("8GB"), 2, Workload(), engine=count))
    advice = advise(result)

    assert {row.typed for row in result.rows if row.verdict == SAFE} == {
        "tp", "pp", "cp", "ulysses",
    }  # fmt: skip
    assert advice.row is None
    [sentence] = advice.sentences
    assert sentence == (
        "No strategy is recommended: safe are tp, pp, cp, ulysses, and what they send is not "
        "known. %dist_compare measures them."
    )


# What is compared


@pytest.mark.parametrize("model", ["gpt2", "llama-3.2-1b"])
def test_gradients_in_two_bytes_are_no_advantage(model: str) -> None:
    """It fits on one H100: copies. DeepSpeed sends half only because it sums in bf16."""
    load = Workload(batch=4)  # in a short step the optimizer weighs more: there fsdp is faster
    result, advice = advised(model, 8, DEVICES["h100"], load, precision="bf16")
    widths = {row.typed: row.recipe.gradients for row in result.rows if row.recipe is not None}

    assert (widths["deepspeed --stage 1"], widths["ddp"]) == (2, 4)
    assert chosen(advice).typed == "ddp"
    assert "It fits on one device: more ranks only add speed." in advice.sentences


def test_what_sums_in_two_bytes_is_chosen_where_nothing_else_fits() -> None:
    """And where all do, with --recipe bf16, it is compared as the others are."""
    result, _ = advised("7e9", 8, DEVICES["h100"], precision="bf16")
    seconds = {"deepspeed --stage 2": 0.1, "fsdp": 0.2}
    both = with_times(result, seconds)
    alone = with_times(result, {"deepspeed --stage 2": 0.1})
    mixed, _ = advised("7e9", 8, DEVICES["h100"], Workload(recipe="mixed"), precision="bf16")
    advice = advise(both)

    assert chosen(advice).typed == "fsdp"
    assert advice.sentences[1] == (
        "deepspeed --stage 2 takes, by estimate, 50 % less, but it sums gradients in 2 bytes, the "
        "others in 4."
    )
    assert chosen(advise(alone)).typed == "deepspeed --stage 2"
    assert chosen(advise(with_times(mixed, seconds))).typed == ("deepspeed --stage 2")


@pytest.mark.parametrize("model", ["1e9", "llama-3.2-1b"])
def test_tensor_parallelism_is_not_for_pcie(model: str) -> None:
    """Two RTX 4090: four sums in each block would wait for PCIe."""
    result, advice = advised(model, 2, DEVICES["rtx-4090"], precision="bf16")
    [safe_tp] = [row for row in result.rows if row.typed == "tp"]
    fast = with_times(result, {"tp": 0.1, "fsdp": 0.2})
    forced = plan(SearchSpace(
        model_of(model), DEVICES["rtx-4090"], 2, Workload(), strategy="tp",
        given={"precision": "bf16"},
    ))  # fmt: skip

    assert safe_tp.verdict == SAFE
    assert chosen(advice).choice is not None
    assert chosen(advice).choice.degrees.tp == 1  # type: ignore[union-attr]
    assert chosen(advise(fast)).typed == "fsdp"
    assert (
        advise(fast)
        .sentences[1]
        .endswith("but the sums of tp go over PCIe 4 x16 in every block, and nothing hides them.")
    )
    assert "go over PCIe 4 x16 in every block" in advise(forced).sentences[1]


def test_tensor_parallelism_over_a_link_that_was_measured_or_is_fast() -> None:
    """Then the estimate knows what its sums cost."""
    result, _ = advised("llama-3.2-1b", 2, DEVICES["rtx-4090"], precision="bf16")
    fast = with_times(result, {"tp": 0.1, "fsdp": 0.2})
    rows = tuple(
        replace(row, time=replace(row.time, source="measurement")) if row.time else row
        for row in fast.rows
    )
    nvlink = replace(fast, device=replace(fast.device, link="NVLink 4"))
    across = replace(nvlink, world_size=16)
    measured = LinkModel({"all_reduce": Fit(1e-5, 1 / 50e9, 0.01, 9)}, 2)
    again = plan(SearchSpace(
        fast.model, fast.device, 2, Workload(), strategy="tp", given={"precision": "bf16"},
        measured=measured,
    ))  # fmt: skip

    assert chosen(advise(replace(fast, rows=rows))).typed == "tp"
    assert chosen(advise(nvlink)).typed == "tp"
    assert chosen(advise(across)).typed == "tp"
    assert len(advise(again).sentences) == 1


@pytest.mark.parametrize(
    ("seconds", "typed"),
    [
        ({"ddp": 1.45, "fsdp": 1.0}, "ddp"),
        ({"ddp": 1.55, "fsdp": 1.0}, "fsdp"),
        ({"fsdp": 1.2, "pp": 1.0}, "fsdp"),
        ({"fsdp": 1.3, "pp": 1.0}, "pp"),
        ({"zero1": 1.1, "fsdp": 1.0}, "fsdp"),
        ({"ddp": 1.6, "fsdp": 1.2, "pp": 1.0}, "fsdp"),
        ({"ddp": 1.4, "fsdp": 1.2, "pp": 1.0}, "ddp"),
        ({"fsdp --shard grad-op": 1.0, "fsdp": 1.04}, "fsdp"),
    ],
)
def test_a_simpler_strategy_that_is_nearly_as_fast(
    seconds: Mapping[str, float], typed: str
) -> None:
    """Copies, then what torch shards, then a split model; of equals the fastest, or smallest."""
    result, _ = advised("gpt2", 4, DEVICES["h100"])
    advice = advise(with_times(result, seconds))

    assert (MARGIN, COPIES_MARGIN) == (0.25, 0.5)
    assert chosen(advice).typed == typed
    is_fastest = seconds[typed] == min(seconds.values())
    assert (f"the fastest of {len(seconds)}" in advice.sentences[0]) == is_fastest
    why = ("is no reason for more than", "too little to tell")
    assert any(word in line for word in why for line in advice.sentences) != is_fastest


def test_without_a_speed_the_simplest_is_chosen() -> None:
    """Bytes are no time: most hide behind backward. Of equally simple ones the least decide."""
    _, small = advised("gpt2", 4, with_memory("24GB"), precision="bf16")
    result, large = advised("7e9", 8, with_memory("80GB"), precision="bf16")
    sharded = {row.typed: row.sent_bytes for row in result.rows if row.verdict == SAFE}

    assert chosen(small).typed == "ddp"
    assert chosen(large).typed in {"fsdp --shard grad-op", "fsdp", "fsdp1", "zero1"}
    assert chosen(large).sent_bytes == min(
        sent for typed, sent in sharded.items() if typed.startswith(("fsdp", "zero1"))
        and "--tp" not in typed
    )  # fmt: skip


# The host's memory


def test_offloading_says_what_the_host_needs() -> None:
    """16 bytes of 70e9 parameters lie there, by 8 ranks: 1,120 GB."""
    needs = "Needs 1,120.0 GB of each host's memory (8 ranks x 140.0 GB)."
    options = {"offload": "cpu", "checkpoint": "full"}
    result, advice = advised("70e9", 8, DEVICES["a100-80gb"], **options)
    _, without = advised("70e9", 8, DEVICES["a100-80gb"], checkpoint="full")
    alone = plan(SearchSpace(model_of("70e9"), DEVICES["a100-80gb"], 8, Workload(), strategy="fsdp",
                 given=options))  # fmt: skip

    assert chosen(advice).memory is not None
    assert chosen(advice).verdict == SAFE
    assert advice.sentences[0].endswith(needs)
    assert without.sentences[1].startswith("With --")
    assert without.sentences[1].endswith(needs)
    assert advise(alone).sentences[0].endswith(needs)
    [tp] = [row for row in result.rows if row.typed == "tp"]
    assert tp.memory is None


def test_offloading_to_nvme_says_what_the_disk_needs() -> None:
    options = {"offload": "nvme", "stage": 3, "checkpoint": "full"}
    nvme = plan(
        SearchSpace(
            model_of("70e9"),
            DEVICES["a100-80gb"],
            8,
            Workload(),
            strategy="deepspeed",
            given=options,
        )
    )
    [sentence, *_] = advise(nvme).sentences

    assert sentence.endswith("Needs 1,120.0 GB of each host's NVMe (8 ranks x 140.0 GB).")


def test_a_host_that_has_too_little() -> None:
    """Where its memory is known it counts: 140 GB of a rank in 64 or in 256."""
    options = {"offload": "cpu", "checkpoint": "full", "precision": "bf16"}
    small = replace(DEVICES["a100-80gb"], host_memory_bytes=64e9)
    large = replace(DEVICES["a100-80gb"], host_memory_bytes=256e9)
    refused, advice = advised("70e9", 8, small, **options)
    _, fits = advised("70e9", 8, large, **options)
    full = next(row for row in refused.rows if row.typed == "fsdp")

    assert full.host_share == pytest.approx(140 / 64)
    assert full.verdict == NO
    assert full.share < 0.8
    assert advice.row is None
    assert "of each host's memory" in advice.sentences[0]
    assert "which has 512.0 GB" in advice.sentences[0]
    assert chosen(fits).verdict == SAFE


# What would help


def test_what_would_help_does() -> None:
    """Nothing fits: what the advice names makes it safe when it is planned."""
    device = DEVICES["a100-40gb"]
    result = plan(
        SearchSpace(
            model_of("llama-3-70b"), device, 64, Workload(sequence=4096), given={"bf16": True}
        )
    )
    advice = advise(result)

    assert {row.verdict for row in result.rows if row.memory} == {NO}
    assert advice.row is None
    assert advice.sentences[0].startswith("Nothing fits: the smallest,")
    assert advice.sentences[1].startswith("With --checkpoint full, fsdp --tp 2 is safe (")
    options = {"bf16": True, "checkpoint": "full"}
    again = plan(
        SearchSpace(model_of("llama-3-70b"), device, 64, Workload(sequence=4096), given=options)
    )
    assert {row.typed: row.verdict for row in again.rows}["fsdp --tp 2"] == SAFE


def test_more_ranks_where_nothing_else_helps() -> None:
    """Or not even many."""
    [_, helps] = advise(
        plan(SearchSpace(model_of("70e9"), with_memory("24GB"), 2, Workload()))
    ).sentences
    [*_, nothing] = advise(
        plan(SearchSpace(model_of("70e9"), with_memory("0.5GB"), 2, Workload()))
    ).sentences

    assert helps.startswith("With ")
    assert "--bf16 --checkpoint full" in helps
    assert " is safe (" in helps
    assert "Not even 4096 ranks" in nothing


def test_help_for_the_strategy_that_was_typed() -> None:
    """The same degrees first; another strategy where nothing makes that one safe."""
    options = {"tp": 8, "pp": 2, "dp": 4, "bf16": True}
    load, device = Workload(sequence=4096), DEVICES["a100-40gb"]
    result = plan(SearchSpace(model_of("llama-3-70b"), device, 64, load, given=options))
    copies = plan(
        SearchSpace(model_of("llama-3-70b"), device, 64, load, strategy="ddp", given={"bf16": True})
    )

    assert result.rows[0].verdict == NO
    assert advise(result).sentences[1].startswith("With --checkpoint full, pp x fsdp x tp is")
    helps = advise(copies).sentences[1]
    assert helps.startswith("With --checkpoint full")
    assert "ddp" not in helps


def test_help_names_the_smallest_change() -> None:
    """Another strategy as it is comes before options, and those of the same strategy first."""
    copies = plan(SearchSpace(model_of("7e9"), DEVICES["h100"], 8, Workload(), strategy="ddp"))
    long = Workload(batch=4, sequence=4096)
    shards = plan(SearchSpace(
        model_of("llama-3-8b"), DEVICES["h100"], 8, long, strategy="fsdp",
        given={"precision": "bf16"},
    ))  # fmt: skip

    assert advise(copies).sentences[1].startswith("Instead, fsdp")
    assert shards.rows[0].verdict == NO
    assert advise(shards).sentences[1].startswith("With --checkpoint full, fsdp is safe")


def test_another_engine_counts_what_would_help() -> None:
    """A live model's frozen parameters have no state: the help is of that model."""
    frozen = replace(
        NET,
        kinds=(
            ParameterKind("float32", True, 10, 40),
            ParameterKind("float32", False, 10**9, 4 * 10**9),
        ),
    )
    engine = functools.partial(by_kinds, frozen)
    shape = replace(model_of("1e9"), name="net")
    result = plan(SearchSpace(shape, with_memory("6GB"), 2, Workload(sequence=64), engine=engine))
    advice = advise(result)

    assert chosen(advice).memory is not None
    assert chosen(advice).memory.optimizer < 100  # type: ignore[union-attr]
