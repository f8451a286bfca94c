"""A plan as text with bars, and as HTML with a picture."""

from __future__ import annotations

import re

import pytest

from nbdist.planner.advice import advise
from nbdist.planner.devices import DEVICES, Device, with_memory
from nbdist.planner.models import model_of
from nbdist.planner.plan import plan
from nbdist.planner.view.plan_view import PlanView, shown_plan
from nbdist.planner.workload import Workload
from tests.support.pages import ClosedTags


def view(
    model: str = "7e9", n: int = 8, device: Device = DEVICES["h100"], **options: object
) -> PlanView:
    result = plan(model_of(model), device, n, Workload(), given=options, assumed=("--gpu h100",))
    return shown_plan(result, advise(result, options))


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
    assert "s per step: an estimate for a step of all samples" in text
    assert "40 % of 989 TFLOPS (67 in fp32)" in text


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
    result = plan(shape, DEVICES["h100"], 2, Workload())
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
