"""Bandwidth as text, as HTML with a picture, and with placeholders."""

from __future__ import annotations

import base64
import functools
import io
import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread

from nbdist.bandwidth.results import OPS, BandwidthRow, Bench
from nbdist.bandwidth.view import bench
from nbdist.core.units import compared, visible
from nbdist.core.view import View
from tests.support.pages import ClosedTags, Tags

KIB, MIB, GIB = 2**10, 2**20, 2**30
CAVEAT = "These are not speeds of links between GPUs: messages go through the memory of one host."
SLOW = Bench(
    2, 1, "gloo", "CPU", CAVEAT,
    (
        BandwidthRow("all_gather", KIB, 100e-6, 90),
        BandwidthRow("all_gather", MIB, 1.1e-3, 20, wrong=(1,)),
        BandwidthRow("broadcast", KIB, 50e-6, 90),
    ),
    ("broadcast 1 MiB: no <time>",),
)  # fmt: skip
# Eight GPUs: 20 us of latency, 360 GB/s on the bus.
FAST = Bench(
    8, 1, "nccl", "NVIDIA H200", "",
    tuple(
        BandwidthRow(op, KIB * 4**k, 20e-6 + OPS[op].factor(8) * KIB * 4**k / 360e9, 20)
        for op in OPS for k in range(11)
    ),
)  # fmt: skip
ONE_ROW = replace(SLOW, rows=SLOW.rows[:1], left_out=())
drawn = functools.cache(bench)  # a picture takes a second


def test_text() -> None:
    """The caveat and the model first, rows with units, factors, what was left out, and links."""
    view = drawn(SLOW)
    before, model, rows, left_out, _ = view.text.split("\n\n")
    lines = rows.splitlines()

    assert before.splitlines() == ["2 ranks on 1 host, gloo, CPU", CAVEAT]
    assert model.startswith("model: time = latency + ")
    assert lines[:4] == [
        "op          size   time (us)  algbw (GB/s)  busbw (GB/s)  result",
        "all_gather  1 KiB      100.0        0.0102        0.0051  ok",
        "all_gather  1 MiB     1100.0        0.9533        0.4766  WRONG on rank 1",
        "broadcast   1 KiB       50.0        0.0205        0.0205  ok",
    ]
    assert "all_gather (n-1)/n = 0.5, broadcast 1." in lines[5]
    assert left_out == "left out: broadcast 1 MiB: no <time>"
    assert re.search(r"^all_gather +99\.\d +0\.52\d+ +0$", view.text, re.MULTILINE)
    assert "no model of broadcast: it needs two sizes or more" in view.text
    assert "direction of one device (not measured here)\n" in view.text
    assert re.search(
        r"^NVLink 4 +450\.00  H100, H200: 18 links x 25 GB/s$", view.text, re.MULTILINE
    )
    assert "highest bus bandwidth" not in view.text
    assert view.is_bad


def test_between_links() -> None:
    """Where links were measured, the fastest row stands between two of them."""
    view = drawn(FAST)
    best = max(row.busbw(8) for row in FAST.rows) / 1e9

    assert (
        f"highest bus bandwidth: {best:.1f} GB/s, all_reduce of 1 GiB (links of similar speed, "
        "one direction: NVLink 3 300.0, NVLink 4 450.0)" in view.text
    )
    assert "(not measured here)" not in view.text
    assert not view.is_bad


@pytest.mark.parametrize("result", [SLOW, FAST, replace(SLOW, rows=()), ONE_ROW])
def test_html_is_closed_and_safe(result: Bench) -> None:
    """Every tag is closed in its place; what comes from ranks is escaped; no scripts."""
    names = [name for name, _ in ClosedTags(drawn(result).html).tags]

    assert not {"time", "script"} & {*names}
    assert names.count("img") == bool(result.rows)


def test_rows_are_folded_below_the_picture_unless_one_is_wrong() -> None:
    """Model and picture are seen without a click."""
    page, wrong = drawn(FAST).html, drawn(SLOW).html

    assert page.index("model: time") < page.index("<img") < page.index("<details><summary>meas")
    assert f"<summary>measurements ({len(FAST.rows)})</summary>" in page
    assert "<details open><summary>measurements (3)</summary>" in wrong


def test_the_picture_shows_each_operation() -> None:
    """A PNG in the page, with a text for who cannot see it; each operation has its own colour."""
    image = Tags(drawn(FAST).html).one("img")
    kind, data = image["src"].split(",", 1)
    pixels = imread(io.BytesIO(base64.b64decode(data)))[..., :3]
    # matplotlib's first seven colours, in which lines are drawn.
    colours = ["1f77b4", "ff7f0e", "2ca02c", "d62728", "9467bd", "8c564b", "e377c2"]

    assert kind == "data:image/png;base64"
    assert all(op in image["alt"] for op in OPS)
    assert pixels.shape[1] > 1000
    assert len(data) < 200_000
    for colour in colours:
        wanted = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)]) / 255
        assert (np.abs(pixels - wanted).max(-1) < 0.01).sum() > 20, colour


def as_compared(result: Bench) -> View:
    view = bench(result)
    return replace(view, text=compared(view.text), html=compared(view.html))


def test_placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where outputs are compared, nothing that was measured counts, and no picture."""
    usual = bench(FAST).text[:40]
    monkeypatch.setenv("NBDIST_TEST", "1")
    view = as_compared(FAST)
    faster = replace(FAST, rows=tuple(replace(row, time_s=row.time_s / 3) for row in FAST.rows))

    assert view == as_compared(faster)
    noisy = replace(FAST, rows=tuple(replace(row, time_s=1 / row.size_bytes) for row in FAST.rows))
    assert not noisy.model.fits  # nothing grows with the size
    assert view == as_compared(noisy)
    on_cpus = replace(FAST, backend="gloo", device="CPU", caveat=CAVEAT)
    assert view == as_compared(on_cpus)
    assert re.search(r"^all_reduce +1 KiB +# +# +#  ok$", view.text, re.MULTILINE)
    assert "<img" not in view.html
    assert view.text.startswith("8 ranks on 1 host, #, #\n#\n")
    assert visible(bench(FAST).text).startswith(usual)
    assert "<img" in bench(FAST).html
