"""The ladder of remedies against numbers by hand, and its words."""

from dataclasses import replace
from typing import Any

import pytest

from nbdist.core.units import compared
from nbdist.memory.oom_message import DEVICE, HOST, UNKNOWN, OomMessage
from nbdist.memory.oom_remedies import Holder, OomReport, Remedy, remedies
from nbdist.memory.oom_text import MORE, block, block_without_report
from nbdist.memory.snapshot import (
    ACTIVATION,
    BACKWARD,
    CATEGORIES,
    FORWARD,
    PARAMETER,
    STEPPING,
)
from nbdist.strategy.choose import choose

GB = 10**9


def sizes(**by_name: float) -> tuple[int, ...]:
    """GB by category: sizes(parameters=2)."""
    by_category = {name.replace("_", " "): value for name, value in by_name.items()}
    assert by_category.keys() <= {*CATEGORIES}
    return tuple(round(GB * by_category.get(name, 0)) for name in CATEGORIES)


# A model of 2 GB in fp32 with Adam under DDP on four GPUs of 40 GB each.
TOLD = OomMessage("CUDA", DEVICE, 3 * GB, 2, 40 * GB, GB, UNKNOWN, 36 * GB, 2 * GB)
DDP = OomReport(
    rank=2,
    message=TOLD,
    phase=FORWARD,
    categories=sizes(
        parameters=2, gradients=2, optimizer_state=4, activations=24, temporary=2, communication=2,
    ),
    holders=(
        Holder("blocks.0.hidden", ACTIVATION, 4 * GB, 8), Holder("head.weight", PARAMETER, GB, 1),
    ),
    limit_bytes=40 * GB,
    free_bytes=GB,
    choice=choose("ddp", {}, 4),
    blocks=10,
)  # fmt: skip


def rungs(shortage: OomReport) -> dict[str, Remedy]:
    return {remedy.what: remedy for remedy in remedies(shortage)}


def gains(shortage: OomReport) -> dict[str, float]:
    return {what: remedy.gain_bytes / GB for what, remedy in rungs(shortage).items()}


def test_ladder_of_a_gpu() -> None:
    """In order, each gain by arithmetic; 2 GB lack."""
    predicted = gains(DDP)

    assert list(predicted) == [
        "half the batch",
        "half the batch with --accumulate 2",
        "--bf16",
        "--checkpoint full",
        "%dist_strategy deepspeed --stage 2",
        "%dist_strategy fsdp",
        "%dist_strategy fsdp --offload cpu",
        "%dist_strategy deepspeed --stage 3 --offload nvme",
    ]
    batch = (24 + 2 + 3) / 2  # with what was asked for
    assert predicted["half the batch"] == batch
    assert predicted["half the batch with --accumulate 2"] == batch
    assert predicted["--bf16"] == batch - 2 / 2  # copies of the weights in half as many bytes
    assert predicted["--checkpoint full"] == pytest.approx(26 * (1 - 1 / 10 - 2 / 34))
    assert predicted["%dist_strategy deepspeed --stage 2"] == (2 + 4) * 3 / 4
    gathered = 2 * 2 / 10
    assert predicted["%dist_strategy fsdp"] == pytest.approx((2 + 2 + 4) * 3 / 4 - gathered)
    assert predicted["%dist_strategy fsdp --offload cpu"] == pytest.approx(8 - gathered)
    assert all(remedy.fits for remedy in remedies(DDP))


def test_what_is_taken_is_left_out() -> None:
    """By the strategy's options; what is left splits what is not split yet."""
    choice = choose(
        "fsdp", {"bf16": True, "checkpoint": "full", "offload": "cpu", "accumulate": 4}, 4
    )
    rungs_left = rungs(replace(DDP, choice=choice))

    assert list(rungs_left) == [
        "half the batch",
        "half the batch with --accumulate 8",
        "%dist_strategy deepspeed --stage 3 --offload nvme",
    ]
    nvme = rungs_left["%dist_strategy deepspeed --stage 3 --offload nvme"]
    assert (nvme.gain_bytes, nvme.fits) == (0, False)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        # Stage 2 splits what zero1 leaves: gradients.
        ("zero1", {}, {"%dist_strategy deepspeed --stage 2": 2 * 3 / 4,
                       "%dist_strategy fsdp": (2 + 2) * 3 / 4 - 0.4}),
        ("deepspeed", {"stage": 2}, {"%dist_strategy fsdp": 2 * 3 / 4 - 0.4}),
        # Each rank has half of each layer already: two more ranks share it.
        ("tp", {"tp": 2}, {}),
        ("tp", {}, {}),
    ],
)  # fmt: skip
def test_states_by_the_shares_of_strategies(
    name: str, options: dict[str, object], expected: dict[str, float]
) -> None:
    """Of what a rank holds now: under zero1 its quarter of the optimizer's state, and so on."""
    predicted = gains(replace(DDP, choice=choose(name, options, 4)))
    states = {
        what: gain
        for what, gain in predicted.items()
        if "%dist_strategy" in what and "--offload" not in what
    }

    assert states == pytest.approx(expected)


def test_one_rank_needs_another() -> None:
    """Alone nothing can be split; the rung says how many ranks it takes."""
    predicted = gains(replace(DDP, choice=choose("single", {}, 1)))

    what = "%dist_strategy fsdp on 2 ranks (%dist_init -n 2)"
    assert predicted[what] == pytest.approx(8 / 2 - 0.4)


def test_allocator_only_where_it_holds_enough() -> None:
    """Its pieces have to come to what was asked for."""
    what = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before %dist_init"
    message = replace(TOLD, unused_bytes=4 * GB)

    assert what not in rungs(DDP)
    assert rungs(replace(DDP, message=message))[what].gain_bytes == 4 * GB
    assert what not in rungs(replace(DDP, message=replace(message, memory=HOST)))


def test_phases() -> None:
    """An optimizer's step asks for the same whatever the batch."""
    assert gains(replace(DDP, phase=BACKWARD))["half the batch"] == 14.5
    assert gains(replace(DDP, phase=STEPPING))["half the batch"] == 13
    assert gains(replace(DDP, phase=""))["half the batch"] == 13


def test_unknown_models_have_rungs_without_numbers() -> None:
    """Each says why."""
    unknown = rungs(replace(DDP, choice=None, categories=sizes(unknown=30), blocks=0, phase=""))

    assert {remedy.gain_bytes for remedy in unknown.values()} == {UNKNOWN}
    assert {remedy.fits for remedy in unknown.values()} == {None}
    assert "no activations were recorded" in unknown["half the batch"].why
    assert unknown["%dist_strategy fsdp"].why == "no prepared model to predict from"
    no_list = rungs(replace(DDP, blocks=0))["--checkpoint full"]
    assert (no_list.gain_bytes, "no list" in no_list.why) == (UNKNOWN, True)


def test_cpu_has_no_offload() -> None:
    """Its memory is the host's already; a limit behind which enough seems free says nothing."""
    message = OomMessage("CPU", HOST, 3 * GB)
    on_cpu = rungs(replace(DDP, message=message, free_bytes=4 * GB))

    assert not any("--offload" in what for what in on_cpu)
    assert {remedy.fits for remedy in on_cpu.values()} == {None}


def test_words(monkeypatch: Any) -> None:
    """Every number, and what to do, in one block."""
    shortage = replace(
        DDP,
        message=replace(TOLD, others_bytes=5 * GB),
        categories=sizes(parameters=2, gradients=2, optimizer_state=4, activations=2.5),
    )
    lines = block(shortage).splitlines()

    assert lines[0] == (
        "rank 2 ran out of memory of its GPU 2: 3.0 GB requested in forward; 1.0 GB free of 40.0 GB"
    )
    assert lines[1] == "other processes hold 5.0 GB of it"
    assert lines[2] == "torch's allocator holds 2.0 GB unused"
    assert lines[3] == (
        "in use by tensors: 10.5 GB: parameters 2.0 GB, gradients 2.0 GB, optimizer state 4.0 GB, "
        "activations 2.5 GB"
    )
    assert lines[4] == (
        "largest: blocks.0.hidden 4.0 GB in 8 blocks (activations); head.weight 1.0 GB (parameters)"
    )
    assert "no state yet" not in block(shortage)
    assert "no state yet" in block(replace(shortage, categories=sizes(parameters=2)))
    assert lines[5].endswith("predicted from what this rank held; short by 2.0 GB")
    assert lines[6].split() == [
        "half", "the", "batch", "-2.8", "GB", "fits", "half", "of", "the", "activations",
    ]  # fmt: skip
    assert lines[-1] == MORE
    assert "this tensor alone" not in block(shortage)
    assert "this tensor alone" in block(
        replace(shortage, message=replace(TOLD, asked_bytes=41 * GB))
    )
    monkeypatch.setenv("NBDIST_TEST", "1")
    assert " GB" not in compared(block(shortage))


def test_words_where_the_rank_could_not_be_asked() -> None:
    """What the message says is told all the same."""
    message = OomMessage("NCCL", DEVICE, 4 * GB)

    assert block_without_report(3, message, "the rank has ended") == (
        "rank 3 ran out of memory of its GPU: 4.0 GB requested by NCCL; what held it is unknown: "
        "the rank has ended"
    )
