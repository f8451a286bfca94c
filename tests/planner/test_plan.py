"""Plans: numbers that are known, verdicts, and what is recommended."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.core.topology import HostRanks
from nbdist.errors import OptionError
from nbdist.planner.advice import advise
from nbdist.planner.devices import DEVICES, device_of, known_as, link_of, with_memory
from nbdist.planner.memory import Memory
from nbdist.planner.models import ModelShape, model_of
from nbdist.planner.plan import NO, RISKY, SAFE, Plan, PlanRow, SearchSpace, plan, verdict
from nbdist.planner.rules_of_thumb import RULES
from nbdist.planner.step_time import flows, samples
from nbdist.planner.view.plan_view import shown_plan
from nbdist.planner.workload import OPTIMIZERS, Workload
from nbdist.strategy import footprint
from nbdist.strategy.choose import choose
from nbdist.strategy.table import ROWS

GB = 1e9
H100 = DEVICES["h100"]
SEVEN, SEVENTY = model_of("7e9"), model_of("70e9")
LLAMA = model_of("llama-3-8b")
MIXTRAL = model_of("mixtral-8x7b")


def planned(model: ModelShape, n: int, load: Workload | None = None, **options: object) -> Plan:
    return plan(SearchSpace(model, H100, n, load or Workload(), given=options))


def row(result: Plan, typed: str) -> PlanRow:
    [match] = [row for row in result.rows if row.typed == typed]
    return match


def gigabytes(result: Plan, typed: str) -> Memory:
    memory = row(result, typed).memory
    assert memory is not None
    return memory


# Numbers that are known


def test_zero_stages_of_7e9_on_8_ranks() -> None:
    """38.5, 26.25 and 14 GB of states; 2.91 x, 4.27 x and 8 x, not the limits 4 x and 8 x."""
    result = planned(SEVEN, 8, Workload(recipe="mixed"))
    states = [gigabytes(result, f"deepspeed --stage {stage}").states / GB for stage in (1, 2, 3)]

    assert states == [38.5, 26.25, 14.0]
    assert [round(112 / size, 2) for size in states] == [2.91, 4.27, 8.0]
    assert gigabytes(result, "zero1").states == 38.5 * GB
    assert gigabytes(result, "fsdp").states == 14.0 * GB
    assert gigabytes(planned(model_of("20e9"), 8), "fsdp").states == 40.0 * GB


@pytest.mark.parametrize("name", ["ddp", "zero1", "deepspeed", "fsdp", "cp"])
def test_what_is_sent_of_the_model_is_footprints(name: str) -> None:
    """The same bytes, by whichever way they are asked for, of fp32 and of bf16."""
    choice = choose(name, {}, 8)
    for load, width in ((Workload(), 4), (Workload(recipe="bf16"), 2)):
        sent = [flow for flow in flows(LLAMA, choice, load) if flow.sent.what in footprint.HELD]

        assert sum(flow.wire_bytes for flow in sent) == pytest.approx(
            footprint.sent_bytes(
                choice, LLAMA.parameters, parameter_bytes=width, gradient_bytes=width
            )
        )


def test_what_tensor_parallelism_sends_counted_by_hand() -> None:
    """32 blocks, four all-reduces of 2048 x 4096 numbers each; two more where it is done again."""
    [flow] = flows(LLAMA, choose("tp", {}, 8), Workload())
    [again] = flows(LLAMA, choose("tp", {"checkpoint": "full"}, 8), Workload())

    assert flow.messages == 128
    assert flow.wire_bytes == pytest.approx(128 * 2 * 7 / 8 * 2048 * 4096 * 4)
    assert again.wire_bytes == pytest.approx(1.5 * flow.wire_bytes)


def test_keys_and_values_of_a_ring_counted_by_hand() -> None:
    """K and V of 2048 tokens, 8 heads of 128, past all ranks three times in each of 32 blocks."""
    ring = flows(LLAMA, choose("cp", {}, 8), Workload())[0]

    assert ring.wire_bytes == pytest.approx(32 * 3 * 7 / 8 * 2 * 2048 * 1024 * 4)


# Errors that are often repeated


def test_checkpointing_costs_a_third_more_and_saves_no_states() -> None:
    """One more forward of three parts, less head and optimizer; half of parameters it is not."""
    load = Workload(4, 4096)
    plain, full = (
        row(planned(LLAMA, 1, load, **way), "single") for way in ({}, {"checkpoint": "full"})
    )
    memory, less = plain.memory, full.memory

    assert plain.time is not None
    assert full.time is not None
    assert memory is not None
    assert less is not None
    assert 1.25 < full.time.compute_s / plain.time.compute_s < 4 / 3
    assert less.states == memory.states
    assert less.activations < memory.activations / 2


def test_the_effective_batch_counts_data_parallel_ranks() -> None:
    """64 ranks as 8 x 2 x 4 are 4 times the batch, not 64 times."""
    mesh = choose("pp", {"tp": 8, "dp": 4, "accumulate": 2}, 64)

    assert samples(mesh, Workload(batch=3)) == 3 * 4 * 2
    assert samples(choose("single", {}, 64), Workload(batch=3)) == 3
    assert samples(choose("cp", {"dp": 2}, 8), Workload(batch=3)) == 6


def test_an_effective_batch_that_cannot_be_formed_is_refused() -> None:
    """2048 of 25 data-parallel ranks with 4 each is 20.48 backwards."""
    with pytest.raises(OptionError, match=r"2048 is 20\.48 x 100 .*Use 2000 or 2100"):
        plan(SearchSpace(SEVEN, H100, 800, Workload(4, samples=2048), strategy="pp",
             given={"tp": 8, "pp": 4, "dp": 25}))  # fmt: skip
    with pytest.raises(OptionError, match="is 3 x 8, so it needs --accumulate 3, not 2"):
        plan(
            SearchSpace(
                SEVEN, H100, 8, Workload(1, samples=24), strategy="ddp", given={"accumulate": 2}
            )
        )

    result = plan(SearchSpace(SEVEN, H100, 8, Workload(1, samples=24), strategy="ddp"))
    assert result.rows[0].samples == 24
    assert result.rows[0].choice is not None
    assert result.rows[0].choice.options.accumulate == 3


# Verdicts and rows


def test_verdicts() -> None:
    """Safe below 80 %, risky to 100 %."""
    shares = (0, 0.799, 0.8, 1.0, 1.001)
    assert [*map(verdict, shares)] == [SAFE, SAFE, RISKY, RISKY, NO]


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_every_strategy_has_a_row(n: int) -> None:
    """With numbers, or with the reason why it does not go with so many ranks."""
    rows = planned(MIXTRAL, n).rows

    assert {row.typed.split()[0] for row in rows} == ({"single"} if n == 1 else {*ROWS})
    for row in rows:
        assert (row.memory is None) == bool(row.problem) == (row.verdict == "")
    assert any(row.memory is not None for row in rows)


def test_one_strategy_or_degrees_are_one_row() -> None:
    by_name = plan(SearchSpace(LLAMA, H100, 8, Workload(), strategy="fsdp", given={"tp": 2}))
    other = plan(SearchSpace(LLAMA, H100, 8, Workload(), given={"dp": 4, "tp": 2}))

    assert by_name.rows == other.rows
    assert [(r.typed, r.mesh) for r in by_name.rows] == [("fsdp x tp", "dp 4 x tp 2")]


def test_another_engine_fills_the_same_rows() -> None:
    """Memory may come from elsewhere than formulas; the record says from where."""
    fixed = Memory(1, 1, 1, activations=77e9, buffers=0, engine="a run")
    result = plan(SearchSpace(LLAMA, H100, 8, Workload(), engine=lambda model, choice, load: fixed))

    assert {plan_row.memory for plan_row in result.rows if plan_row.memory} == {fixed}
    assert {plan_row.verdict for plan_row in result.rows if plan_row.memory} == {RISKY}


@pytest.mark.parametrize(
    ("options", "load", "expected"),
    [
        ({"tp": 3}, Workload(), "8 ranks cannot form tp=3"),
        ({"tp": 16}, Workload(), "8 ranks cannot form tp=16"),
        ({"nope": 1}, Workload(), "no option 'nope'"),
        ({"checkpoint": "half"}, Workload(), "no --checkpoint half"),
        ({}, Workload(optimizer="lamb"), "no --optimizer lamb. Choose one of adamw, "),
        ({}, Workload(recipe="fp8"), "no --recipe fp8. Choose one of fp32, "),
        ({}, Workload(batch=0), "--batch 0 is nothing to train on"),
        ({}, Workload(sequence=-1), "--seq -1 is nothing to train on"),
        ({}, Workload(samples=2.5), "--samples 2.5 is nothing"),  # type: ignore[arg-type]
    ],
)
def test_wrong_words_are_refused_once(
    options: Mapping[str, object], load: Workload, expected: str
) -> None:
    with pytest.raises(OptionError, match=expected):
        plan(SearchSpace(LLAMA, H100, 8, load, given=options))


def test_bf16_on_a_device_without_it_is_refused() -> None:
    for way in ({"bf16": True}, {"precision": "bf16"}):
        with pytest.raises(OptionError, match=r"NVIDIA T4 cannot compute in bf16\. Use --fp16"):
            plan(SearchSpace(LLAMA, DEVICES["t4"], 8, Workload(), given=way))
    plan(SearchSpace(LLAMA, DEVICES["t4"], 8, Workload(), given={"fp16": True}))


def test_accumulation_sends_gradients_once_and_gathers_each_time() -> None:
    """ddp sends the same in a step; fsdp gathers anew, DeepSpeed below stage 3 does not."""

    def sent(name: str, k: int, **options: object) -> float:
        choice = choose(name, {"accumulate": k, **options}, 8)
        return sum(flow.wire_bytes for flow in flows(LLAMA, choice, Workload()))

    assert sent("ddp", 4) == sent("ddp", 1)
    assert sent("fsdp", 4) / sent("fsdp", 1) == pytest.approx((4 * 2 + 1) / 3)
    assert sent("deepspeed", 4) == sent("deepspeed", 1)
    assert sent("deepspeed", 4, stage=3) == pytest.approx(sent("fsdp", 4))
    assert sent("tp", 4) == pytest.approx(4 * sent("tp", 1))


# Devices


def test_the_catalogue() -> None:
    """Each has a source and links that exist; a few numbers as everyone knows them."""
    for device in DEVICES.values():
        assert device.source
        assert device.single_flops < device.half_flops
        assert link_of(device, 8)
        assert link_of(device, 9)
        assert known_as(f"NVIDIA {' '.join(device.driver)}".upper()) == device
    assert DEVICES["h200"].memory_bytes == 141e9
    assert DEVICES["a100-80gb"].half_flops == 312e12
    assert DEVICES["t4"].memory_bytes == 16e9


@pytest.mark.parametrize(
    ("driver", "name"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("Tesla T4", "t4"),
     ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
     ("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA L40S", "l40s"),
     ("NVIDIA A10", "a10"), ("NVIDIA RTX A6000", "a6000"), ("Tesla V100-PCIE-16GB", "v100")],
)  # fmt: skip
def test_devices_by_the_drivers_name(driver: str, name: str) -> None:
    assert known_as(driver) == DEVICES[name]


def test_unknown_devices() -> None:
    """Close names are told; another GPU of the machine is simply not known."""
    assert device_of("NVIDIA H100") == device_of("H100") == H100
    assert device_of("a100") == DEVICES["a100-80gb"]
    with pytest.raises(OptionError, match=r"no --gpu h10 in the catalogue\. Did you mean h100"):
        device_of("h10")
    with pytest.raises(OptionError, match=r"Choose one of b200, .*--memory 24GB"):
        device_of("abacus")
    assert known_as("Quadro K620") is None
    assert known_as("") is None


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 24e9), ("24", 24e9), ("24 gb", 24e9), ("80GiB", 80 * 2**30),
                       ("500MB", 500e6), ("1.5TB", 1.5e12), ("15.9", 15.9e9)]
)  # fmt: skip
def test_memory(text: str, size: float) -> None:
    assert with_memory(text).memory_bytes == size


@pytest.mark.parametrize("text", ["0", "0GB", "-3", "much", "24PB", ""])
def test_what_is_no_memory(text: str) -> None:
    with pytest.raises(OptionError, match="is not a valid memory size"):
        with_memory(text)


# The page


_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DEVICES)
def test_the_page_has_each_device_with_its_numbers(name: str) -> None:
    device = DEVICES[name]
    half = "" if device.has_bf16 else " (fp16)"
    flops = f"{device.half_flops / 1e12:g}{half}, {device.single_flops / 1e12:g}"
    memory = f"{device.memory_bytes / GB:g} | {device.bandwidth / 1e12}"

    assert f"| {name} | {memory} | {flops} | {device.link} | {device.network} |" in _PAGE


def test_the_page_has_each_rule_optimizer_and_recipe() -> None:
    for rule in RULES:
        assert f"| {rule.name} | " in _PAGE
        assert rule.source in _PAGE
    assert f"| {', '.join(OPTIMIZERS)} |" in _PAGE
    for word in footprint.RECIPES:
        assert word in _PAGE.partition("| `--recipe` |")[2].partition("\n")[0]


def test_it_tells_which_row_it_counts() -> None:
    """Each strategy once, in order, with how many there are."""
    calls: list[tuple[str, float, float, str]] = []
    result = plan(SearchSpace(SEVEN, H100, 8, Workload()), lambda *call: calls.append(call))

    assert calls == [
        (f"counting {row.typed}", number, len(result.rows), "strategies")
        for number, row in enumerate(result.rows)
    ]


def test_layers_and_sequences_stay_within_hosts_that_were_named() -> None:
    """As %dist_strategy does on such hosts; copies of hybrid shards are on one each."""
    here = tuple(HostRanks(f"n{k}", tuple(range(4 * k, 4 * k + 4))) for k in range(4))
    device = replace(DEVICES["h100"], per_host=4)
    rows = plan(SearchSpace(model_of("llama-3-8b"), device, 16, Workload(), ranks_on=here)).rows
    meshes = {row.typed: row.mesh for row in rows}

    assert meshes["tp"] == meshes["fsdp --tp 4"] == "dp 4 x tp 4"
    assert meshes["cp"] == "dp 4 x cp 4"
    assert meshes["fsdp --shard hybrid"] == "dp 16 (4 copies on 4 ranks each)"


@pytest.mark.parametrize(
    ("model", "strategy", "given", "text"),
    [
        (LLAMA, "ep", {}, "llama-3-8b has no experts that nbdist knows, so ep has nothing"),
        (LLAMA, "fsdp", {"ep": 2}, "llama-3-8b has no experts"),
        (MIXTRAL, "ep", {"ep": 16}, "16 ranks cannot share the 8 experts .* --ep 2, 4 or 8"),
        (MIXTRAL, "fsdp", {"ep": 2, "pp": 2}, "--ep 2 and --pp 2 cannot be combined yet"),
        (MIXTRAL, "fsdp", {"ep": 2, "offload": "cpu"}, "--offload and --ep cannot be combined"),
        (MIXTRAL, "fsdp", {"ep": 2, "shard": "hybrid"}, "hybrid and --ep 2 cannot be combined"),
        (model_of("gpt-oss-20b"), "tp", {}, "does not know how to split self_attn of gpt-oss"),
    ],
)
def test_what_ranks_refuse_of_experts_a_plan_refuses(
    model: ModelShape, strategy: str | None, given: dict[str, object], text: str
) -> None:
    """In the same words, with what works."""
    with pytest.raises(OptionError, match=text):
        plan(SearchSpace(model, H100, 16, Workload(), strategy=strategy, given=given))


def test_a_plan_of_experts_has_rows_for_them() -> None:
    """Over as many ranks as divide both; within hosts; none of a dense model."""

    def shares(n: int, model: ModelShape = MIXTRAL) -> list[str]:
        rows = plan(SearchSpace(model, H100, n, Workload())).rows
        return [row.typed for row in rows if "ep" in row.typed.replace("deepspeed", "")]

    assert shares(4) == ["ep --ep 4", "fsdp --ep 4"]
    assert shares(6) == ["ep --ep 2", "fsdp --ep 2"]
    assert shares(64, model_of("qwen3-30b-a3b")) == ["ep --ep 8", "fsdp --ep 8"]
    assert shares(7) == shares(8, LLAMA) == []


def test_experts_and_their_imbalance_are_stated() -> None:
    """How many a token passes, and what is assumed of their loads."""
    plans = (plan(SearchSpace(MIXTRAL, H100, 8, Workload(imbalance=x))) for x in (1.0, 1.5))
    even, uneven = (shown_plan(result, advise(result)).text for result in plans)

    assert "experts: 8 in 32 of 32 blocks, 2 for each token, which passes 12,879,925,248" in even
    assert "under ep ranks get equally many rows (--imbalance)" in even
    assert "ranks get up to 1.5 x as many rows as the mean (--imbalance)" in uneven
    with pytest.raises(OptionError, match=r"--imbalance 0\.5 is less than even"):
        plan(SearchSpace(MIXTRAL, H100, 8, Workload(imbalance=0.5)))
