"""Plans of experts: memory, messages and time, each against a number worked out by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from nbdist.errors import OptionError
from nbdist.planner.activations import block_bytes
from nbdist.planner.block_time import Pass, RankSpeed, block_pass, product_steps
from nbdist.planner.collective_time import Ring, all_to_all_bytes_per_s, ring_bytes_per_s, ring_of
from nbdist.planner.devices import DEVICES
from nbdist.planner.memory import Memory, memory_of
from nbdist.planner.models import ModelShape, model_of
from nbdist.planner.plan import SearchSpace
from nbdist.planner.search import candidates, search
from nbdist.planner.step_time import Flow, Time, flows, model_flops, time_of
from nbdist.planner.workload import Widths, Workload
from nbdist.strategy.choose import choose, typed_line
from tests.planner.test_time import PLAIN, SPEEDS

MIXTRAL, QWEN = model_of("mixtral-8x7b"), model_of("qwen3-30b-a3b")
SHAPE, H100 = MIXTRAL.shape, DEVICES["h100"]
# Numbers of one expert, of a block's experts and of all; of the rest.
ONE = 3 * 4096 * 14336
STACKED = 8 * ONE
EXPERTS = 32 * STACKED
REST = 46_702_792_704 - EXPERTS
BF16, FP32 = Widths(2, 2, 0, 2, 4), Widths(4, 4, 0, 4, 4)
LOAD = Workload(1, 2048)


def memory(name: str, n: int = 8, load: Workload = LOAD, **given: object) -> Memory:
    return memory_of(MIXTRAL, choose(name, given, n), load)


def sent(name: str, n: int = 8, load: Workload = LOAD, **given: object) -> dict[object, Flow]:
    choice = choose(name, given, n)
    return {(f.sent.what, f.sent.call, f.sent.axes): f for f in flows(MIXTRAL, choice, load)}


def timed(name: str, n: int = 8, load: Workload = LOAD, **given: object) -> Time:
    time = time_of(MIXTRAL, choose(name, given, n), load, H100)
    assert time is not None
    return time


# Memory


@pytest.mark.parametrize(
    ("name", "given", "held"),
    [
        ("ddp", {}, REST + EXPERTS),
        ("fsdp", {}, (REST + EXPERTS) / 8),
        ("ep", {}, REST + EXPERTS / 8),
        ("ep", {"ep": 2}, REST + EXPERTS / 2),
        ("fsdp", {"ep": 2}, (REST + EXPERTS) / 8),
        ("fsdp", {"ep": 8}, (REST + EXPERTS) / 8),
        ("tp", {}, REST / 8 + EXPERTS),
        ("fsdp", {"tp": 2}, REST / 8 + EXPERTS / 4),
        ("fsdp", {"tp": 2, "ep": 4}, REST / 8 + EXPERTS / 4),
    ],
)
def test_what_a_rank_holds(name: str, given: dict[str, object], held: float) -> None:
    """4 bytes of each number, of its gradient, and 8 of its moments: tp leaves experts whole."""
    parts = memory(name, **given)

    assert parts.parameters == parts.gradients == pytest.approx(4 * held, rel=1e-12)
    assert parts.optimizer == pytest.approx(8 * held, rel=1e-12)


def test_pipelines_have_the_experts_of_their_blocks() -> None:
    """Of 8 stages each has four blocks; with tp 2 half of what is not in experts."""
    block = SHAPE.block_parameters - STACKED
    largest = 4 * block + 32000 * 4096 + 4096

    assert memory("pp", load=Workload(8, 2048)).parameters == 4 * (largest + 4 * STACKED)
    split = memory("pp", 16, Workload(8, 2048), pp=8, tp=2)
    assert split.parameters == 4 * (largest / 2 + 4 * STACKED)


def test_ddps_buckets_are_without_experts_that_ranks_share() -> None:
    """And rows under way, and the gradients of a block's experts once more as their mean."""
    rows = 2048 * 2 * 4096 * 4

    assert memory("ddp").buffers == 4 * (REST + EXPERTS)
    assert memory("ep").buffers == 4 * REST + 2 * rows + 4 * STACKED / 8


def test_fsdp_gathers_no_experts_that_no_other_rank_has() -> None:
    """Of ep 2 a rank gathers half of a block's experts, over four; of ep 8 none."""
    block, rows = SHAPE.block_parameters - STACKED, 2048 * 2 * 4096 * 4
    root = REST - 32 * block

    def gathered(ep: int) -> float:
        return memory("fsdp", ep=ep).buffers - 2 * rows - 4 * STACKED / ep

    assert gathered(8) == pytest.approx(4 * (root + 2 * block) + 8 * block)
    part = block + STACKED / 2
    assert gathered(2) == pytest.approx(4 * (root + 2 * part) + 8 * part)
    whole = memory("fsdp", ep=8, shard="grad-op").buffers - 2 * rows - 4 * STACKED / 8
    assert whole == pytest.approx(4 * REST + 8 * block)


def test_experts_keep_rows_and_not_tokens() -> None:
    """Each (token, expert) two widths and four inside, 40 bytes of places; tp divides none."""
    tokens = 2048
    row = (2 * 4096 + 4 * 14336) * 2 + 40
    single, tp = (choose(name, {"bf16": True}, n) for name, n in (("single", 1), ("tp", 2)))
    # As in a dense block without its MLP: norms, two inputs, q, k, v and what attention makes.
    outside = 2 * (2 * 4096 + 4 * 4096) + 2 * 2 * 4096 + 8 * 4
    attention = (2 * 32 + 2 * 8) * 128 * 2

    assert block_bytes(SHAPE, LOAD, BF16, single) == tokens * (outside + attention + 2 * row)
    assert block_bytes(SHAPE, LOAD, BF16, tp) == tokens * (outside + attention / 2 + 2 * row)


def test_imbalance_is_of_ranks_that_share() -> None:
    """1.5 x as many rows on the rank that gets most; never more than all; without ep nothing."""
    even, uneven = Workload(1, 2048), Workload(1, 2048, imbalance=1.5)
    far = replace(uneven, imbalance=100.0)

    def kept(name: str, load: Workload, **given: object) -> float:
        return block_bytes(SHAPE, load, FP32, choose(name, given, 8))

    row = (2 * 4096 + 4 * 14336) * 4 + 40
    assert kept("ep", uneven) - kept("ep", even) == pytest.approx(2048 * row)
    assert kept("ep", far, ep=2) - kept("ep", even) == pytest.approx(2048 * 2 * row)
    assert kept("ddp", uneven) == kept("ddp", even)


# Messages


def test_a_token_travels_there_and_back_twice() -> None:
    """2 experts x 4096 numbers x 4 bytes, 7/8 of them elsewhere; in each block 4 times."""
    each = 2048 * 2 * 4096 * 4 * 7 / 8
    tokens = ("tokens", "all-to-all", ("ep",))

    assert sent("ep")[tokens].wire_bytes == pytest.approx(32 * 4 * each)
    assert sent("fsdp", ep=8, bf16=True)[tokens].wire_bytes == pytest.approx(32 * 4 * each / 2)
    uneven = replace(LOAD, imbalance=2.0)
    assert sent("ep", load=uneven)[tokens].wire_bytes == pytest.approx(32 * 8 * each)
    assert sent("ep")[tokens].messages == 32 * 4 * 2
    for how in ("full", "selective"):  # experts are computed again under both
        again = sent("ep", checkpoint=how)[tokens].wire_bytes
        assert again == pytest.approx(32 * 6 * each)


def test_gradients_of_experts_go_to_those_that_have_the_same() -> None:
    """Of ep 2 on 8 ranks four: 2 x 3/4 of half of them; the rest 2 x 7/8 over all."""
    both, alone = sent("ep", ep=2), sent("ep", ep=8)
    rest = ("gradients", "all-reduce", ("dp_replicate",))
    experts = ("gradients", "all-reduce", ("edp",))

    assert both[rest].wire_bytes == pytest.approx(2 * 7 / 8 * 4 * REST)
    assert both[experts].wire_bytes == pytest.approx(2 * 3 / 4 * 4 * EXPERTS / 2)
    assert alone[rest].wire_bytes == both[rest].wire_bytes
    assert experts not in alone
    again = sent("ep", ep=2, accumulate=3)  # in each backward; Megatron in the last one
    assert again[experts].wire_bytes == pytest.approx(3 * both[experts].wire_bytes)
    assert again[rest].wire_bytes == both[rest].wire_bytes
    mixed = sent("ep", ep=2, accumulate=3, bf16=True, load=replace(LOAD, recipe="mixed"))
    assert mixed[experts].wire_bytes == pytest.approx(both[experts].wire_bytes / 2)
    sharded = sent("fsdp", ep=2)
    assert sharded["parameters", "all-gather", ("edp",)].wire_bytes == pytest.approx(
        2 * 3 / 4 * 4 * EXPERTS / 2
    )


def test_tp_splits_the_gradients_of_all_but_experts() -> None:
    """dp 4 x tp 2: half of the rest, and all of the experts."""
    flow = sent("fsdp", tp=2)["gradients", "reduce-scatter", ("dp_shard",)]

    assert flow.wire_bytes == pytest.approx(3 / 4 * 4 * (REST / 2 + EXPERTS))


def test_rings_of_ranks_that_share_experts() -> None:
    """Neighbours among those that see different data; those with the same ones are apart."""
    ep8 = choose("ep", {"ep": 8}, 64)
    ep16 = choose("fsdp", {"ep": 16}, 64)
    beside = choose("fsdp", {"tp": 4, "ep": 8}, 64)

    assert (ring_of(ep8, ("ep",)), ring_of(ep8, ("edp",))) == (Ring(8, 8), Ring(8, 1))
    assert (ring_of(ep16, ("ep",)), ring_of(ep16, ("edp",))) == (Ring(16, 8), Ring(4, 1))
    assert (ring_of(beside, ("ep",)), ring_of(beside, ("edp",))) == (Ring(8, 2), Ring(2, 1))
    assert ring_of(choose("ep", {"ep": 2}, 8), ("edp",)) == Ring(4, 4)


def test_all_to_all_by_links() -> None:
    """In a host its link; of 16 ranks 8/15 go through one port, of 25 GB/s half."""
    within = ring_bytes_per_s(Ring(8, 8), PLAIN, SPEEDS)

    assert all_to_all_bytes_per_s(Ring(8, 8), PLAIN, SPEEDS) == within == pytest.approx(150e9)
    between = all_to_all_bytes_per_s(Ring(16, 8), PLAIN, SPEEDS)
    assert between == pytest.approx(12.5e9 * 15 / 8)
    assert all_to_all_bytes_per_s(Ring(8, 1), PLAIN, SPEEDS) == pytest.approx(12.5e9)


# Time


def test_products_of_experts_are_one_kernel() -> None:
    """Their tiles share waves: 8 of 40 tiles on 160 multiprocessors are 2 full waves."""
    together = product_steps(256 * 4, 128 * 10, 512, 160, 0.0, 8)
    small, eight_small = (product_steps(64, 64, 512, 160, 0.0, n) for n in (1, 8))

    assert together == 2 * 2 * 160 * 256 * 128 * 512
    assert small == eight_small


def _block(widths: Widths, name: str, **given: object) -> Pass:
    rank = RankSpeed(PLAIN, SPEEDS, "bf16", 2, rows_each=2.0)
    choice = choose(name, given, 1 if name == "single" else 8)
    return block_pass(SHAPE, choice, widths, 1, 2048, rank)


def test_a_block_of_experts_by_hand() -> None:
    """6 n k h f operations of experts at 100 TFLOPS, a router, rows moved 7 h + 5 f times."""
    n, h, f = 2048, 4096, 14336
    dense = block_pass(
        replace(SHAPE, experts=None), choose("single", {}, 1), BF16, 1, 2048,
        RankSpeed(PLAIN, SPEEDS, "bf16", 2),
    )  # fmt: skip
    experts_s = 2 * n * 2 * 3 * h * f / 100e12
    router_s = 2 * n * 8 * h / 100e12
    # The router reads its input and writes little: bytes take longer than operations.
    router_s = max(router_s, 2 * (n * h + 8 * h + 8 * n) / 1e12)
    moved_s = 2 * n * 2 * (7 * h + 5 * f) / 1e12
    without = dense.forward_s - 2 * n * 3 * h * f / 100e12 - n * 5 * f * 2 / 1e12

    routed = _block(BF16, "single")
    assert routed.forward_s == pytest.approx(without + experts_s + router_s + moved_s)
    shared = _block(BF16, "ep")
    assert shared.forward_s - routed.forward_s == pytest.approx(2 * n * 2 * 6 * h / 1e12)
    full = _block(BF16, "single", checkpoint="full")
    assert full.backward_s == pytest.approx(routed.backward_s + routed.forward_s)


def test_autocast_leaves_experts_in_fp32() -> None:
    """At 10 TFLOPS, where all else computes at 100."""
    half, autocast = (_block(widths, "single") for widths in (BF16, Widths(2, 4, 2, 4, 4)))
    operations = 2 * 2048 * 2 * 3 * 4096 * 14336

    more = autocast.forward_s - half.forward_s
    assert more > operations / 10e12 - operations / 100e12
    assert timed("ep", bf16=True).compute_s > 4 * timed("fsdp", ep=8, bf16=True).compute_s


def test_attention_with_sinks_keeps_and_moves_its_scores() -> None:
    """One of each pair and head kept, two more under way; 13 times moved in forward, 17 behind."""
    sinks = model_of("gpt-oss-20b")
    none = replace(sinks, shape=replace(sinks.shape, has_sinks=False))
    pairs, single = 64 * 2048 * 2048, choose("single", {}, 1)
    keys = 2 * (64 - 8) * 64 * 4  # keys and values for each head

    def buffers(model: ModelShape) -> float:
        return memory_of(model, single, LOAD).buffers

    more = block_bytes(sinks.shape, LOAD, FP32, single) - block_bytes(
        none.shape, LOAD, FP32, single
    )
    assert more == pairs * 4 + 2048 * keys
    assert buffers(sinks) - buffers(none) == 2 * pairs * 4
    rank = RankSpeed(PLAIN, SPEEDS, "bf16", 2, rows_each=4.0)
    both = block_pass(sinks.shape, single, BF16, 1, 2048, rank).attention_s
    assert both == pytest.approx(6 * 2 * pairs * 64 / 100e12 + 30 * pairs * 2 / 1e12, rel=0.1)


def test_active_parameters_are_what_counts_as_work() -> None:
    """6 of each that a token passes, and attention; MFU is of these."""
    counted = 2048 * (6 * 12_879_925_248 + 12 * 32 * 4096 * 2048)

    assert model_flops(MIXTRAL, choose("single", {}, 1), LOAD) == counted
    time = timed("fsdp", bf16=True, ep=8)
    assert time.mfu == pytest.approx(8 * counted / time.step_s / (8 * 989e12))


def test_tokens_are_waited_for_and_imbalance_costs() -> None:
    """All of their messages; the rank with most computes longer, and the others wait for it."""
    even = timed("fsdp", bf16=True, ep=8)
    uneven = timed("fsdp", bf16=True, ep=8, load=replace(LOAD, imbalance=1.5))

    assert even.exposed_s["ep"] > 0
    assert uneven.exposed_s["ep"] == pytest.approx(1.5 * even.exposed_s["ep"], rel=0.2)
    assert 1.1 * even.compute_s < uneven.compute_s < 1.5 * even.compute_s
    assert timed("fsdp", bf16=True).exposed_s.get("ep") is None
    # What is gathered of experts without ep takes longer than their tokens.
    assert even.communication_s < timed("fsdp", bf16=True).communication_s


def test_a_pipeline_of_dense_blocks_and_experts() -> None:
    """Each stage takes what its own blocks take: deepseek's first is shorter."""
    model = model_of({**_DEEPSEEK, "num_hidden_layers": 8})
    load = Workload(16, 2048)
    choice = choose("pp", {"bf16": True, "microbatches": 16}, 4)
    none = model_of({**_DEEPSEEK, "num_hidden_layers": 8, "first_k_dense_replace": 0})

    times = [time_of(each, choice, load, H100) for each in (model, none)]
    [first, second] = [time for time in times if time is not None]
    assert first.idle_s < second.idle_s


_DEEPSEEK = {**model_of("deepseek-v3").config, "vocab_size": 1000}


# Search


def test_a_search_has_every_degree_that_divides_experts_and_data() -> None:
    """6 experts on 12 ranks: 2, 3 and 6 of 12 data-parallel ranks, 2, 3 and 6 of 6 beside tp 2."""
    model = model_of({**MIXTRAL.config, "num_local_experts": 6, "num_hidden_layers": 2})
    space = SearchSpace(model, H100, 12, Workload(sequence=2048, samples=12), precisions=("bf16",))
    found = {
        (c.choice.degrees.dp_shard > 1, c.choice.degrees.tp, c.choice.degrees.ep)
        for c in candidates(space, [""])
        if c.choice.degrees.ep > 1
    }
    lines = [typed_line(c.choice) for c in candidates(space, [""])]

    every = {(False, 1, ep) for ep in (2, 3, 6)} | {(True, 1, ep) for ep in (2, 3, 6)}
    # tp 3 does not divide 32 heads.
    every |= {(True, 2, ep) for ep in (2, 3, 6)} | {(True, 4, 3)}
    assert found == every
    assert len(lines) == len({*lines})
    assert not any("--ep" in line and ("hybrid" in line or "pp" in line) for line in lines)


def test_a_search_keeps_ep_that_was_typed() -> None:
    load = Workload(sequence=2048, samples=16)
    space = SearchSpace(QWEN, H100, 16, load, given={"ep": 4, "precision": "bf16"})
    by_name = replace(space, given={"precision": "bf16"}, strategy="ep")
    rows, named = (search(each).rows for each in (space, by_name))

    assert {row.choice.degrees.ep for row in rows if row.choice} == {4}
    assert {row.choice.degrees.ep for row in named if row.choice} <= {2, 4, 8, 16}
    assert all(row.choice and row.choice.degrees.ep > 1 for row in named)
    with pytest.raises(OptionError, match="No configuration of 16 ranks"):
        search(replace(space, model=model_of("llama-3-8b")))


def test_the_best_over_ep_is_not_missed() -> None:
    """Against every ep that a plan takes, one by one, of the same micro-batches and recomputing."""
    load = Workload(sequence=2048, samples=32)
    space = SearchSpace(QWEN, H100, 16, load, strategy="fsdp", given={"precision": "bf16"})
    best: dict[object, float] = {}
    for ep, shard, checkpoint, batch in itertools.product(
        (1, 2, 4, 8, 16), ("full", "grad-op"), ("", "full", "selective", "2", "4"), (1, 2)
    ):
        given = {"bf16": True, "accumulate": 2 // batch, "shard": shard, "checkpoint": checkpoint}
        given |= {"ep": ep} if ep > 1 else {}
        choice = choose("fsdp", {k: v for k, v in given.items() if v}, 16)
        piece = replace(load, batch=batch)
        if memory_of(QWEN, choice, piece).peak < 0.8 * H100.memory_bytes:
            time = time_of(QWEN, choice, piece, H100)
            assert time is not None
            best[choice] = time.step_s

    fastest = search(space).ranked[0]
    assert fastest.time is not None
    assert fastest.time.step_s <= min(best.values()) * (1 + 1e-9)
    assert any(choice.degrees.ep > 1 for choice in best)  # type: ignore[attr-defined]
