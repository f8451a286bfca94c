"""A plan as text with bars, and as HTML with a picture."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nbdist.planner.advice import advise
from nbdist.planner.devices import DEVICES, Device, with_memory
from nbdist.planner.models import model_of
from nbdist.planner.plan import SearchSpace, plan
from nbdist.planner.view.plan_view import PlanView, shown_plan, shown_time
from nbdist.planner.workload import Workload
from tests.support.pages import ClosedTags


def view(
    model: str = "7e9", n: int = 8, device: Device = DEVICES["h100"], **options: object
) -> PlanView:
    result = plan(
        SearchSpace(model_of(model), device, n, Workload(), given=options, assumed=("--gpu h100",))
    )
    return shown_plan(result, advise(result))


def test_head_and_columns() -> None:
    """The advice, what is planned, both sums with their recipes, the states in columns."""
    text = view().text

    assert text.startswith("Recommended: ")
    assert text.partition("\n\n")[2].startswith(
        "7e9: 7,000,000,000 parameters (assumed: 33 blocks of width 4224), on 8 ranks with NVIDIA "
        "H100 SXM, 80.0 GB each\nbatch 1 x 2048 tokens on each data-parallel rank, adamw\n"
        "unsharded: parameters 28.0 GB in fp32, 14.0 GB in bf16; with gradients and Adam 112.0 GB "
        "(16 B: fp32, autocast, or bf16 with a copy in fp32) or 84.0 GB (12 B: all in bf16, no "
        "copy)\nrecipe 16 B per parameter: fp32: parameters 4 + gradients 4 + Adam 8\n"
        "Assumed: --gpu h100\n"
    )
    assert re.search(r"^ddp +dp 8 +28\.0 +28\.0 +56\.0 +", text, re.MULTILINE)
    assert re.search(r"^fsdp +dp 8 +3\.5 +3\.5 +7\.0 +", text, re.MULTILINE)
    assert re.search(r"^Recommended: .*; about \S+ s per sample; \S+ GB sent per sample\.", text)
    assert "s per step: estimated for a step of all samples" in text
    assert "61 % of 989 TFLOPS (67 in fp32)" in text
    assert "over NVLink 4 in a host, 8 x InfiniBand NDR of a host between hosts" in text


def test_where_a_steps_time_goes() -> None:
    """A line for each row: a number, its range, compute and waits that make it up, MFU, tokens."""
    shown = view(bf16=True)
    assert shown.plan is not None
    [head, *lines] = shown_time(shown.plan, shown.plan.rows).text.splitlines()
    columns = re.split(r"  +", head)

    assert columns == [
        "strategy", "s per step", "all overlapped - none", "compute", "waits for dp",
        "waits for tp", "waits for cp", "waits for pp", "idle stages", "% of peak (MFU)",
        "tokens/s",
    ]  # fmt: skip
    rows = [row for row in shown.plan.rows if row.time is not None]
    assert [re.split(r"  +", line)[0] for line in lines] == [row.typed for row in rows]
    assert all(line in shown.text for line in lines)
    [line] = [line for line in lines if line.startswith("fsdp  ")]
    [time] = [row.time for row in rows if row.typed == "fsdp"]
    assert time is not None
    cells = re.split(r"  +", line)
    assert cells[1] == f"{time.step_s:.2g}"
    assert cells[-2:] == [f"{100 * time.mfu:.1f}", f"{8 * 2048 / time.step_s:,.0f}"]


def test_costs_by_hand() -> None:
    """500 million tokens at so many a second on 8 devices, at 2.50 an hour each."""
    plain = view(bf16=True).plan
    assert plain is not None
    priced = replace(plain, price=2.5, tokens=500e6)
    [row] = [row for row in priced.rows if row.typed == "fsdp"]
    assert row.time is not None
    hours = 500e6 / (8 * 2048 / row.time.step_s) * 8 / 3600
    text = shown_time(priced, priced.rows).text

    assert re.split(r"  +", text.splitlines()[0])[-2:] == ["GPU-hours for 5e8 tokens", "cost"]
    [line] = [line for line in text.splitlines() if line.startswith("fsdp  ")]
    assert re.split(r"  +", line)[-2:] == [f"{hours:,.1f}", f"{2.5 * hours:,.2f}"]
    only = shown_time(replace(plain, price=2.5), plain.rows).text
    assert "GPU-hours for 1e9 tokens" in only
    assert shown_time(plain, []).text == ""


def test_recipes_that_differ_are_told_with_their_strategies() -> None:
    text = view(bf16=True).text

    assert "recipe 16 B per parameter: bf16 or fp16 autocast" in text
    assert "copy 4 + Adam 8 (deepspeed --stage 1, deepspeed --stage 2, deepspeed --stage 3)" in text


def test_text_bars_are_as_long_as_the_peak() -> None:
    """40 characters are the device; what is over it stands behind the limit."""
    shown = view()
    assert shown.plan is not None
    lines = re.findall(r"^(\S.*?) +([pgoabc]+ *\|[pgoabc]*>?)$", shown.text, re.MULTILINE)
    bars = dict(lines)

    for row in shown.plan.rows:
        assert row.memory is not None
        bar = bars[row.typed]
        before, after = bar.replace(">", "").split("|")
        length = len(before.rstrip()) + len(after)
        assert length == min(round(40 * row.share), 64), row.typed
        assert bool(after) == (round(40 * row.share) > 40)
        assert bar.endswith(">") == (40 * row.share > 64)
        assert bar.count("p") == round(40 * row.memory.parameters / 80e9)


@pytest.mark.parametrize(
    "shown", [view(), view("gpt2", 1), view("llama-3-70b", 64, bf16=True), view(n=7)]
)
def test_html_is_closed_and_needs_nothing(shown: PlanView) -> None:
    """No scripts, nothing loaded; the pictures have a name and a bar for each row."""
    page = ClosedTags(shown.html)
    names = [tag for tag, _ in page.tags]
    assert shown.plan is not None
    counted = [row for row in shown.plan.rows if row.memory is not None]

    assert not {"script", "img", "link"} & {*names}
    pictures = [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"]
    assert all("beside the device's limit" in name for name in pictures)
    assert names.count("title") >= 4 * len(counted)
    for row in counted:
        assert f">{100 * row.share:.1f} %</text>" in shown.html


def test_what_does_not_fit_is_folded() -> None:
    """Its rows, and the strategies that the model cannot have; unless nothing fits."""
    mixed, none = view("llama-3-8b", bf16=True).html, view("70e9").html
    open_part = re.sub(r"<details>.*?</details>", "", mixed)
    rows = re.compile(r'<tr><td style="[^"]*">([^<]+)</td>')

    assert mixed.startswith('<div><div style="font-weight:600"><div>Recommended: ')
    assert "<summary>does not fit: single, ddp, zero1" in mixed
    assert "fsdp" in rows.findall(open_part)
    assert "ddp" not in rows.findall(open_part)
    assert "ddp" in rows.findall(mixed)
    assert "<summary>not possible: tp, cp, ulysses</summary>" in view("gpt2", 8).html
    assert "ddp" in rows.findall(re.sub(r"<details>.*?</details>", "", none))


def test_what_a_user_types_is_escaped() -> None:
    """A name comes from a config."""
    shape = model_of({"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2,
                      "vocab_size": 10, "_name_or_path": "<script>x</script>"})  # fmt: skip
    result = plan(SearchSpace(shape, DEVICES["h100"], 2, Workload()))
    page = ClosedTags(shown_plan(result, advise(result)).html)

    assert "script" not in [tag for tag, _ in page.tags]


def test_a_device_of_which_only_memory_is_known() -> None:
    """No time is made up."""
    text = view(device=with_memory("24GB")).text

    assert "with another device, 24.0 GB each" in text
    assert "Time: not estimated" in text
    assert re.search(r"^ddp .* -$", text, re.MULTILINE)


def test_strategies_that_do_not_go_with_the_model_are_told() -> None:
    """And have no numbers."""
    text = view("gpt2", 8).text

    assert "tp: tp over 8 ranks does not divide the 12 heads and 12 of keys and values" in text
    assert re.search(r"^tp +tp 8", text, re.MULTILINE) is None


def test_offload_tells_of_the_hosts_memory() -> None:
    text = view(offload="cpu").text

    assert "Offloaded: up to 28.0 GB in each rank's CPU memory" in text
    assert "ddp: ddp has no --offload" in text


def test_numbers_are_the_same_where_outputs_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed, not measured: notebooks can store them."""
    usual = view()
    monkeypatch.setenv("NBDIST_TEST", "1")

    assert view().text == usual.text
