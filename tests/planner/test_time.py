"""The model of time: each formula against a number worked out by hand."""

import math
from dataclasses import replace

import pytest

from nbdist.bandwidth.latency import Fit
from nbdist.bandwidth.results import LinkModel
from nbdist.errors import OptionError
from nbdist.planner import pipeline_time
from nbdist.planner.block_time import (
    Pass,
    RankSpeed,
    Speeds,
    block_pass,
    embedding_pass,
    head_pass,
    product_steps,
)
from nbdist.planner.collective_time import Ring, latency_s, ring_bytes_per_s, ring_of
from nbdist.planner.devices import DEVICES, Device, with_memory
from nbdist.planner.models import model_of, of_config
from nbdist.planner.pipeline_time import makespan_s, simulated_s
from nbdist.planner.plan import SearchSpace, as_copies, plan
from nbdist.planner.step_time import Flow, Time, flows, model_flops, time_of
from nbdist.planner.workload import Widths, Workload, is_megatron
from nbdist.strategy.choice import Strategy, label, steps_of
from nbdist.strategy.choose import choose

H100 = DEVICES["h100"]
LLAMA = model_of("llama-3-8b")
# Round numbers: 100 TFLOPS reached, 1 TB/s reached, one multiprocessor's tiles cost nothing.
PLAIN = Device(
    "plain", "round", 80e9, 2e12, 200e12, 20e12, "NVLink 3", "InfiniBand HDR", sustained=0.5,
    ports=8,
)  # fmt: skip
SPEEDS = Speeds(
    attention=0.5, streams=0.5, network=0.5, contention=0.0, k_fill=0.0, kernel_s=0.0,
    launch_s=0.0, nvlink=0.5,
)  # fmt: skip
RANK = RankSpeed(PLAIN, SPEEDS, "bf16", 2)
SMALL = of_config(
    {"model_type": "gpt2", "n_embd": 1024, "n_head": 8, "n_layer": 4, "n_positions": 512,
     "vocab_size": 8000, "resid_pdrop": 0.0}
)  # fmt: skip
BF16 = Widths(2, 2, 0, 2, 4)


def chosen(name: str, n: int = 8, **given: object) -> Strategy:
    return choose(name, {"bf16": True, **given}, n)


def timed(choice: Strategy, load: Workload | None = None, **more: object) -> Time:
    time = time_of(LLAMA, choice, load or Workload(), H100, **more)  # type: ignore[arg-type]
    assert time is not None
    return time


# Products


@pytest.mark.parametrize(
    ("m", "n", "k", "sms", "steps"),
    [
        (1024, 1024, 512, 0, 2 * 1024 * 1024 * 512),
        # 32 tiles of 256 x 128 in one wave of 32: nothing is wasted.
        (1024, 1024, 512, 32, 2 * 1024 * 1024 * 512),
        # One row more is a fifth row of tiles: 36 of 128 x 128 at 0.95 would be 72 of 32 x 3
        # waves; 40 of 256 x 128 are 2 waves, of which the second is nearly empty.
        (256 * 4 + 1, 1024, 4096, 40, 2 * 40 * 256 * 128 * 4096),
    ],
)
def test_products_fill_tiles_and_waves(m: int, n: int, k: int, sms: int, steps: float) -> None:
    assert product_steps(m, n, k, sms, 0.0) == steps


def test_a_product_waits_for_its_last_wave_and_its_begin() -> None:
    """33 tiles on 32 multiprocessors are two waves; a short sum has the begin of a long one."""
    full = product_steps(256 * 32, 128, 4096, 32, 0.0)
    more = product_steps(256 * 33, 128, 4096, 32, 0.0)

    assert full == 2 * 256 * 32 * 128 * 4096
    assert 1.05 < more / full < 2
    assert product_steps(1024, 1024, 128, 0, 128.0) == 2 * product_steps(1024, 1024, 128, 0, 0.0)


def test_a_few_tiles_are_cut_along_the_sum() -> None:
    """A gradient of weights: 4 tiles for 32 multiprocessors, and 8 cuts of a long sum."""
    assert product_steps(512, 256, 65536, 32, 0.0) == 2 * 512 * 256 * 65536


def test_a_small_product_takes_as_long_as_its_bytes() -> None:
    """One token: 1024 x 4096 weights of 2 bytes at 1 TB/s, not 8.4 MFLOP at 100 TFLOPS."""
    assert RANK.product_s(1, 4096, 1024) == pytest.approx(2 * (1024 + 1024 * 4096 + 4096) / 1e12)
    assert RANK.product_s(4096, 4096, 1024) == pytest.approx(2 * 4096 * 4096 * 1024 / 100e12)


# A block


def test_a_block_by_hand() -> None:
    """4 samples of 512 tokens, 1024 wide: products 24 n h^2, attention 2 n s h, bytes.

    Norms read and write 2 + 2 bytes twice, sums 2 + 2 + 2 twice, gelu 2 + 2 of 4 h.
    """
    n, h = 2048, 1024
    products = 24 * n * h * h / 100e12
    attention = 2 * n * 512 * h / 50e12
    moved = n * (2 * 4 + 2 * 6 + 2 * 2 * 4) * h / 1e12
    block = block_pass(SMALL.shape, chosen("single", 1), BF16, 4, 512, RANK)

    assert block.forward_s == pytest.approx(products + attention + moved)
    assert block.backward_s == pytest.approx(2 * products + 2.5 * attention + 2 * moved)
    assert block.attention_s == pytest.approx(3.5 * attention)


def test_what_checkpointing_adds_to_a_block() -> None:
    """A whole forward, or that of what is elementwise."""
    plain, full, selective = (
        block_pass(SMALL.shape, chosen("single", 1, checkpoint=how), BF16, 4, 512, RANK)
        for how in (None, "full", "selective")
    )

    assert full.backward_s - plain.backward_s == pytest.approx(plain.forward_s)
    moved = 2048 * 36 * 1024 / 1e12
    assert selective.backward_s - plain.backward_s == pytest.approx(moved)


def test_tensor_parallelism_divides_products_and_not_norms() -> None:
    """With sequence parallelism it divides these too."""
    n, h = 2048, 1024
    divided = 24 * n * h * h / 100e12 + 2 * n * 512 * h / 50e12 + n * 16 * h / 1e12
    whole = n * 20 * h / 1e12
    for more, outside in (({}, whole), ({"sequence_parallel": True}, whole / 4)):
        block = block_pass(SMALL.shape, chosen("tp", 4, **more), BF16, 4, 512, RANK)
        assert block.forward_s == pytest.approx(divided / 4 + outside)


def test_scores_that_are_kept_are_moved() -> None:
    """--sdpa math: all pairs of 8 heads, and their scores 4 times in forward and 7 in backward."""
    flash, kept_scores = (
        block_pass(SMALL.shape, chosen("single", 1, **way), BF16, 4, 512, RANK)
        for way in ({}, {"sdpa": "math"})
    )
    pairs = 4 * 8 * 512 * 512
    product_s = 2 * pairs * 128 / 100e12
    moved = pairs * 2 / 1e12

    assert kept_scores.attention_s == pytest.approx(6 * product_s + 11 * moved)
    assert kept_scores.forward_s - flash.forward_s == pytest.approx(
        2 * product_s + 4 * moved - 2 * pairs * 128 / 50e12
    )


def test_launches_are_the_least_that_a_block_takes() -> None:
    """One token: 4 products, attention and 5 other kernels at 10 us each, twice in backward."""
    rank = replace(RANK, speeds=replace(SPEEDS, launch_s=10e-6))
    block = block_pass(SMALL.shape, chosen("single", 1), BF16, 1, 1, rank)

    assert block.forward_s == pytest.approx(100e-6)
    assert block.backward_s == pytest.approx(200e-6)


def test_head_and_embedding_by_hand() -> None:
    """2 n V h and its two gradients; 16 and 18 bytes for each logit; rows of the table."""
    n, h, vocab = 2048, 1024, 8000
    head = head_pass(SMALL.shape, chosen("single", 1), BF16, n, RANK)
    embedding = embedding_pass(SMALL.shape, chosen("single", 1), BF16, n, RANK)
    product = 2 * n * vocab * h / 100e12

    assert head.forward_s == pytest.approx(product + n * (4 * h + 16 * vocab) / 1e12)
    assert head.backward_s == pytest.approx(2 * product + n * (8 * h + 18 * vocab) / 1e12)
    assert embedding.forward_s == pytest.approx(n * 4 * h / 1e12)
    assert embedding.backward_s == pytest.approx((n * 8 * h + 8 * vocab * h) / 1e12)


def test_megatron_divides_its_loss_and_fuses_dropout() -> None:
    """--recipe mixed beside copies, of tp 4: 34 bytes for a quarter of the logits; 4 h less twice.

    The product that dropout reads and writes is neither written nor read again.
    """
    n, h, vocab = 2048, 1024, 8000
    megatron = replace(RANK, is_megatron=True)
    tp = chosen("tp", 4)
    whole, divided = (head_pass(SMALL.shape, tp, BF16, n, rank) for rank in (RANK, megatron))

    assert whole.forward_s - divided.forward_s == pytest.approx(n * vocab * 16 * 3 / 4 / 1e12)
    assert whole.backward_s - divided.backward_s == pytest.approx(n * vocab * 18 * 3 / 4 / 1e12)
    dropped = replace(SMALL.shape, has_dropout=True)
    eager, fused = (block_pass(dropped, tp, BF16, 4, 512, rank) for rank in (RANK, megatron))
    assert eager.forward_s - fused.forward_s == pytest.approx(n * 2 * 4 * h / 1e12)
    assert eager.backward_s - fused.backward_s == pytest.approx(2 * n * 2 * 4 * h / 1e12)
    # Without dropout there is nothing that it saves.
    assert block_pass(SMALL.shape, tp, BF16, 4, 512, megatron) == block_pass(
        SMALL.shape, tp, BF16, 4, 512, RANK
    )


# Collectives


def test_megatron_sends_each_tp_rank_a_part_and_gathers_it() -> None:
    """Between stages 1/8 of b s h over the network, 7/8 within the host; others send all of it."""
    choice = as_copies(chosen("pp", 64, tp=8, dp=2, microbatches=4))
    [whole] = [f for f in flows(LLAMA, choice, Workload(4)) if f.sent.what == "boundary"]
    sends = [
        flow
        for flow in flows(LLAMA, choice, Workload(4, recipe="mixed"))
        if flow.sent.what == "boundary"
    ]

    assert whole.wire_bytes == 2 * 4 * 2048 * 4096 * 2
    assert [(flow.sent.call, flow.sent.axes, flow.messages) for flow in sends] == [
        ("send", ("pp",), 8), ("all-gather", ("tp",), 8),
    ]  # fmt: skip
    assert [flow.wire_bytes / whole.wire_bytes for flow in sends] == [1 / 8, 7 / 8]


def test_what_is_planned_as_megatron() -> None:
    """tp and pp whose states are stored as Megatron does, and that shard nothing over dp."""
    mixed = Workload(recipe="mixed")
    beside = chosen("tp", 8, dp=2)

    assert is_megatron(chosen("tp", 8), mixed)
    assert is_megatron(as_copies(beside), mixed)
    assert not is_megatron(beside, mixed)
    assert not is_megatron(as_copies(beside), Workload())
    assert not is_megatron(chosen("ddp", 8), mixed)
    slow, fast = (timed(chosen("tp", 8), load) for load in (Workload(), mixed))
    assert fast.compute_s < slow.compute_s


def test_rings_by_where_ranks_are() -> None:
    """Of dp 8 x tp 4 on four hosts each ring of dp has two ranks in a host; tp has all four."""
    choice = chosen("fsdp", 32, tp=4)

    assert ring_of(choice, ("tp",)) == Ring(4, 4)
    assert ring_of(choice, ("dp_shard",)) == Ring(8, 2)
    assert ring_of(chosen("ddp", 64), ("dp_replicate",)) == Ring(64, 8)
    assert ring_of(chosen("pp", 32, tp=8), ("pp",)) == Ring(4, 1)
    # Hosts of 4 ranks; and tp 3 on hosts of 8, which cut its third group after two ranks.
    assert ring_of(chosen("fsdp", 32, tp=8), ("tp",), 4) == Ring(8, 4)
    assert ring_of(chosen("fsdp", 12, tp=3), ("tp",)) == Ring(3, 1)
    assert ring_of(chosen("ddp", 12), ("dp_replicate",)) == Ring(12, 4)
    assert ring_of(chosen("fsdp", 6, tp=3), ("tp",)) == Ring(3, 3)


def test_a_ring_has_as_many_ports_as_ranks_in_a_host() -> None:
    """8 x 25 GB/s of a host, half of it reached: 100 for 8 ranks, 12.5 for one; 150 in a host."""
    assert ring_bytes_per_s(Ring(64, 8), PLAIN, SPEEDS) == pytest.approx(100e9)
    assert ring_bytes_per_s(Ring(64, 1), PLAIN, SPEEDS) == pytest.approx(12.5e9)
    assert ring_bytes_per_s(Ring(8, 8), PLAIN, SPEEDS) == pytest.approx(150e9)
    typed = replace(PLAIN, host_bytes_per_s=40e9)
    assert ring_bytes_per_s(Ring(64, 8), typed, SPEEDS) == pytest.approx(20e9)
    assert ring_bytes_per_s(Ring(8, 8), with_memory("24GB"), SPEEDS) == math.inf


def test_latency_of_rings_and_trees() -> None:
    """NCCL's numbers: 8.4 us, 3.4 for each step over NVLink, 14 between hosts."""
    assert latency_s("all-reduce", Ring(8, 8), PLAIN) == pytest.approx(8.4e-6 + 14 * 3.4e-6)
    assert latency_s("all-gather", Ring(16, 8), PLAIN) == pytest.approx(
        8.4e-6 + 13 * 3.4e-6 + 2 * 14e-6
    )
    # Of 64 hosts a tree has 6 levels up and down: less than 128 steps of a ring.
    assert latency_s("all-reduce", Ring(512, 8), PLAIN) == pytest.approx(
        8.4e-6 + 2 * (7 * 3.4e-6 + 6 * 14e-6)
    )
    assert latency_s("send", Ring(4, 1), PLAIN) == pytest.approx(22.4e-6)
    assert latency_s("all-reduce", Ring(1, 1), PLAIN) == 0


# Pipelines


@pytest.mark.parametrize(
    ("schedule", "chunks", "idle"),
    [("gpipe", 1, 9), ("1f1b", 1, 9), ("interleaved", 2, 4.5), ("zb", 1, 3)],
)
@pytest.mark.parametrize("pieces", [4, 8, 64])
def test_equal_stages_idle_as_the_papers_say(
    schedule: str, chunks: int, idle: float, pieces: int
) -> None:
    """Forward 1 and backward 2 on 4 stages: 3 x 3 of gpipe and 1f1b, half of it, a third of it."""
    total = makespan_s(schedule, (1.0,) * 4, (2.0,) * 4, 0.0, pieces, chunks)

    assert total == pytest.approx(3 * pieces + idle)


def test_unequal_stages_wait_for_the_slowest() -> None:
    """Two stages of 1 + 1 and 2 + 2, three pieces: first forward 1, last backward 1, 3 x 4."""
    assert makespan_s("1f1b", (1.0, 2.0), (1.0, 2.0), 0.0, 3) == pytest.approx(1 + 12 + 1)


def test_messages_between_stages() -> None:
    """gpipe waits twice for each boundary; 1f1b also in the middle, where little is in flight."""
    assert makespan_s("gpipe", (1.0,) * 4, (2.0,) * 4, 0.1, 8) == pytest.approx(33.6)
    assert makespan_s("1f1b", (1.0,) * 4, (2.0,) * 4, 0.1, 8) == pytest.approx(34.6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb", "interleaved"])
def test_many_pieces_are_as_if_simulated(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last round has added, others add."""
    monkeypatch.setattr(pipeline_time, "MOST_EVENTS", 1000)
    chunks = 2 if schedule == "interleaved" else 1
    times = (1.0, 1.3, 1.0, 1.7), (2.0, 2.6, 2.0, 3.1)
    for pieces in (200, 240, 400):
        every = simulated_s(schedule, *times, 0.2, pieces, chunks)
        some = makespan_s.__wrapped__(schedule, *times, 0.2, pieces, chunks)
        assert some == pytest.approx(every)


# A step


def test_a_step_is_the_sum_of_where_it_goes() -> None:
    """Between all overlapped and none."""
    for choice in (chosen("fsdp"), chosen("ddp"), chosen("tp"), chosen("fsdp", 64, tp=8)):
        time = timed(choice)
        assert time.step_s == pytest.approx(
            time.compute_s + time.idle_s + sum(time.exposed_s.values())
        )
        assert time.least_s <= time.step_s <= time.most_s
        assert time.cost_s == pytest.approx(time.step_s / time.samples)
    assert time.mfu == pytest.approx(
        model_flops(LLAMA, choice, Workload()) / time.step_s / (64 * 989e12)
    )
    assert time.tokens_per_s == pytest.approx(8 * 2048 / time.step_s)


def test_the_models_operations_by_an_independent_count() -> None:
    """6 per parameter and token, 12 per block, width and pair of tokens; again is not counted."""
    load = Workload(batch=2, sequence=4096)
    counted = 2 * 4096 * (6 * 8_030_261_248 + 12 * 32 * 4096 * 4096)

    assert model_flops(LLAMA, chosen("single", 1), load) == counted
    assert model_flops(LLAMA, chosen("single", 1, checkpoint="full"), load) == counted


def test_one_rank_waits_for_nothing() -> None:
    time = timed(chosen("single", 1))

    assert (time.communication_s, time.idle_s, time.exposed_s) == (0, 0, {})
    assert time.least_s == time.step_s == time.most_s == time.compute_s


def test_tensor_parallelism_hides_nothing_and_buckets_hide_in_backward() -> None:
    """ddp waits for its last bucket and for what backward does not cover."""
    speeds = Speeds(contention=0.0)
    tp = timed(chosen("tp"), speeds=speeds)
    ddp = timed(chosen("ddp"), Workload(sequence=16384), speeds=speeds)

    assert tp.exposed_s["tp"] == pytest.approx(tp.communication_s)
    short = timed(chosen("ddp"), Workload(batch=1, sequence=1), speeds=speeds)
    assert ddp.exposed_s["dp"] == pytest.approx(ddp.communication_s / 32)
    assert short.exposed_s["dp"] > 0.5 * short.communication_s


def test_a_fast_backward_does_not_hide_what_fsdp_sends() -> None:
    """Of one token nearly all is waited for, of many only the root and one block."""
    speeds = Speeds(contention=0.0)
    few, many = (
        timed(chosen("fsdp", 16), Workload(sequence=tokens), speeds=speeds) for tokens in (1, 16384)
    )
    root = LLAMA.root_parameters / LLAMA.parameters
    alone = root + (1 - root) / 32
    [gather, reduce] = [
        flow.messages * latency_s(flow.sent.call, Ring(16, 8), H100)
        + flow.wire_bytes / ring_bytes_per_s(Ring(16, 8), H100, speeds)
        for flow in flows(LLAMA, chosen("fsdp", 16), Workload())
    ]

    assert many.exposed_s["dp"] == pytest.approx((gather / 2 + reduce) * alone)
    assert few.exposed_s["dp"] > 0.85 * few.communication_s


def test_copies_beside_tp_and_pp_reduce_once_and_hold_all() -> None:
    """As Megatron: one all-reduce of 1/8 of the gradients along rings of one rank in a host."""
    sharded = chosen("tp", 64, dp=8)
    copies = as_copies(sharded)
    [reduce, _] = flows(LLAMA, copies, Workload())

    assert (label(sharded), label(copies)) == ("fsdp x tp", "ddp x tp")
    assert "fsdp" not in steps_of(copies)
    assert (reduce.sent.call, reduce.sent.what) == ("all-reduce", "gradients")
    assert reduce.wire_bytes == pytest.approx(2 * 7 / 8 * 4 * LLAMA.parameters / 8)
    rows = [
        plan(
            SearchSpace(
                LLAMA, H100, 64, Workload(), given={"tp": 8, "dp": 8, "bf16": True}, copies=way
            )
        ).rows[0]
        for way in (False, True)
    ]
    assert [row.typed for row in rows] == ["fsdp x tp", "ddp x tp"]
    held = [row.memory.states for row in rows if row.memory]
    assert held[1] == pytest.approx(8 * held[0])
    with pytest.raises(OptionError, match="fsdp has no such dp"):
        plan(SearchSpace(LLAMA, H100, 8, Workload(), strategy="fsdp", copies=True))


def test_accumulated_pieces_add_up_and_small_ones_cost() -> None:
    """Eight backwards instead of one: seven times gradients are added, two read and one written."""
    many = timed(chosen("ddp", accumulate=8), Workload(batch=1))
    whole = timed(chosen("ddp"), Workload(batch=8))
    adding_s = 7 * 3 * 4 * LLAMA.parameters / (3.35e12 * Speeds().streams)

    assert many.samples == whole.samples
    assert whole.compute_s + adding_s < many.compute_s < 1.4 * whole.compute_s
    assert many.communication_s == pytest.approx(whole.communication_s)


def test_a_pipelines_time_by_its_parts() -> None:
    """Two stages, four pieces: the last one has the head, and the first one waits for it."""
    load = Workload(batch=8, sequence=1024)
    time = timed(chosen("pp", 2, microbatches=4), load)
    alone = timed(chosen("single", 1), load)

    assert time.idle_s > 0
    assert time.exposed_s["pp"] > 0
    # More than half of all the blocks' work, as the head is on one stage.
    assert 0.5 < time.compute_s / alone.compute_s < 0.65
    assert timed(chosen("pp", 2, microbatches=8), load).idle_s < time.idle_s


def test_a_measurement_counts_before_the_data_sheet() -> None:
    """Its latency for each message, its bandwidth for the bytes."""
    measured = LinkModel({"all_reduce": Fit(1e-3, 1 / 10e9, 0.01, 9)}, 8)
    [flow] = flows(LLAMA, chosen("ddp"), Workload())
    time, other = timed(chosen("ddp"), measured=measured), timed(chosen("fsdp"), measured=measured)

    assert time.communication_s == pytest.approx(flow.messages * 1e-3 + flow.wire_bytes / 10e9)
    assert (time.source, other.source) == ("measurement", "links")


def test_passes_add_up() -> None:
    assert Pass(1.0, 2.0, 0.5).both_s == 3.0


def test_muons_matrices_are_sent_to_their_owners_and_back() -> None:
    """Llama-3-8B's, by hand: what others own of a rank's part, and what it owns of theirs."""
    llama, load = model_of("llama-3-8b"), Workload(1, 2048, optimizer="muon")

    def sent(name: str, **given: object) -> list[Flow]:
        found_flows = flows(llama, choose(name, given, 4), load)
        return [flow for flow in found_flows if flow.sent.what == "matrices"]

    h, kv, f = 4096, 1024, 14336
    numbers = 32 * (2 * h * h + 2 * kv * h + 3 * h * f)
    for name, given in (("fsdp", {}), ("tp", {}), ("fsdp", {"tp": 2})):
        [flow] = sent(name, **given)
        assert flow.wire_bytes == pytest.approx(2 * 4 * numbers / 4 * 3 / 4)
        assert (flow.sent.call, flow.messages) == ("all-to-all", 2)
    [flow] = sent("fsdp", pp=2)
    assert flow.wire_bytes == pytest.approx(2 * 4 * numbers / 2 / 2 * 1 / 2)
    assert not any(sent(name) for name in ("ddp", "zero1", "pp", "deepspeed"))

    for name, axis in (("fsdp", "dp"), ("tp", "tp")):
        muon, adamw = (
            time_of(llama, choose(name, {"bf16": True}, 4), each, DEVICES["h100"])
            for each in (load, replace(load, optimizer="adamw"))
        )
        assert muon is not None
        assert adamw is not None
        assert muon.communication_s > adamw.communication_s
        assert muon.exposed_s[axis] - adamw.exposed_s[axis] == pytest.approx(
            muon.communication_s - adamw.communication_s
        )
