"""All configurations: legal ones alone, none missed, the best by the rules of every plan."""

import itertools
import re
from dataclasses import replace

import pytest

from nbdist.commands.plan import make_plan
from nbdist.commands.strategy import strategy_spec
from nbdist.errors import OptionError
from nbdist.planner.advice import best_of
from nbdist.planner.devices import DEVICES
from nbdist.planner.memory import memory_of
from nbdist.planner.models import model_of
from nbdist.planner.plan import NO, SAFE, SearchSpace, plan
from nbdist.planner.request import PlanRequest
from nbdist.planner.search import Search, advised, candidates, search, step_s
from nbdist.planner.step_time import time_of
from nbdist.planner.view.search_view import SearchView, shown_search
from nbdist.planner.workload import Workload
from nbdist.strategy import validate
from nbdist.strategy.choice import Degrees, Options, Strategy
from nbdist.strategy.choose import choose, typed_line

H100 = DEVICES["h100"]


def space(model: str = "llama-3.2-1b", n: int = 4, samples: int = 8, **more: object) -> SearchSpace:
    """A small space of H100; other fields of `SearchSpace` as they are named."""
    load = Workload(sequence=2048, samples=samples)
    return replace(SearchSpace(model_of(model), H100, n, load), **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def large() -> Search:
    """llama-2-70b on 64 ranks: thousands of configurations."""
    return search(replace(space("llama-2-70b", 64, 128), load=Workload(1, 4096, samples=128)))


# Against all


def brute_force(wanted: SearchSpace) -> dict[Strategy, tuple[float, float]]:
    """Each configuration that can be put together of words, with its share and seconds.

    Nothing is skipped: a pipeline accumulates as well.
    """
    n, samples = wanted.world_size, wanted.load.samples
    counts = [k for k in range(1, samples + 1) if samples % k == 0]
    results = {}
    meshes = [
        ("fsdp", {"pp": p, "tp": t}, more)
        for p, t in itertools.product((1, 2, 4), repeat=2)
        if n % (p * t) == 0
        for more in ({}, {"shard": "grad-op"}, {"shard": "hybrid", "replicas": 2})
    ]
    meshes += [(name, {"cp": c}, {}) for name in ("cp", "ulysses") for c in (2, 4)]
    meshes += [(name, {}, {}) for name in ("ddp", "zero1")]
    meshes += [("deepspeed", {}, {"stage": stage}) for stage in (1, 2, 3)]
    for (name, degrees, more), precision, checkpoint, schedule, split, pieces, accumulate in (
        itertools.product(
            meshes, ("bf16", "fp32"), ("", "full", "selective", "2", "4"),
            ("gpipe", "1f1b", "interleaved", "zb"), (False, True), counts, counts,
        )
    ):  # fmt: skip
        pp = degrees.get("pp", 1)
        if (pp == 1 and (pieces, schedule) != (1, "1f1b")) or (degrees.get("tp", 1) == 1 and split):
            continue
        word = "pp" if pp > 1 else "tp" if degrees.get("tp") == n else name
        settings = {
            **{degree: size for degree, size in degrees.items() if size > 1}, **more,
            "precision": precision, "accumulate": accumulate,
            **({"checkpoint": checkpoint} if checkpoint else {}),
            **({"schedule": schedule, "microbatches": pieces} if pp > 1 else {}),
            **({"sequence_parallel": True} if split else {}),
        }  # fmt: skip
        try:
            choice = choose(word, settings, n)
            validate.check_pipeline(choice, wanted.model.shape.layers)
            batch, rest = divmod(samples, choice.degrees.dp * accumulate)
            if rest or not batch:
                continue
            load = replace(wanted.load, batch=batch)
            memory = memory_of(wanted.model, choice, load)
        except OptionError:
            continue
        time = time_of(wanted.model, choice, load, H100)
        assert time is not None
        results[choice] = (memory.peak / H100.memory_bytes, time.step_s)
    return results


def test_nothing_that_is_better_is_missed() -> None:
    """Against every combination of words on 4 ranks: counts, the fastest, and the front."""
    wanted = space(samples=4)
    found = search(wanted)
    every = brute_force(wanted)
    counted = {candidate.choice for candidate in candidates(wanted, [""])}
    # A pipeline that accumulates is in the second alone.
    flat = {choice for choice in every if choice.degrees.pp == 1 or choice.options.accumulate == 1}
    safe = {choice: numbers for choice, numbers in every.items() if numbers[0] < 0.8}

    assert counted == flat
    assert found.counted == len(flat)
    assert found.safe == sum(1 for choice in flat if every[choice][0] < 0.8)
    assert step_s(found.ranked[0]) == pytest.approx(min(step for _, step in safe.values()))
    for share, step in safe.values():
        assert any(row.share <= share and step_s(row) <= step * (1 + 1e-9) for row in found.front)
    for row in found.ranked:
        assert row.choice is not None
        assert every[row.choice] == pytest.approx((row.share, step_s(row)))


def test_memory_by_hand() -> None:
    """Two rows: states, buffers and activations worked out from docs/plan.md.

    llama-3.2-1b: P = 1,235,814,400, of that 16 blocks of 60,821,504 and 262,670,336 others; width
    2048, 32 heads of 64, 8 of keys and values, 8192 in the MLP, 128,256 words, 2048 tokens.
    """
    p, block, root, tokens = 1_235_814_400, 60_821_504, 1_235_814_400 - 16 * 60_821_504, 2048
    shares = {
        typed_line(candidate.choice): candidate.share * 80e9
        for candidate in candidates(space(samples=8), [""])
    }
    # ddp, two backwards: 16 P, a copy of all gradients, bf16 weights that autocast keeps, 1 GB.
    # A block of one sample: 4 b s (h, norms and inputs) as autocast has it, q k v, four in the MLP.
    kept = 2 * (4 * 2048 + 4 * 2048) + 5 * 2 * 2048 + (2 * 32 + 2 * 8) * 64 * 2 + 4 * 8192 * 2
    ends = (4 + 2) * 2048 + 4 * 2048 + 128_256 * 12
    forward = tokens * (16 * kept + ends) + 2 * p
    ddp = 16 * p + 4 * p + max(forward, 4 * p) + 1e9
    # fsdp on 4: a quarter of 16 P; two backwards of 4 bytes of each gradient, whole.
    kept = 2 * (2 * 2048 + 4 * 2048) + 2 * 2 * 2048 + (2 * 32 + 2 * 8) * 64 * 2 + 4 * 8192 * 2
    ends = (2 + 2) * 2048 + 4 * 2048 + 128_256 * 12
    buffers = (root + 2 * block) * 2 + block * 4 + 4 * p
    forward = tokens * 16 * kept + max(tokens * ends + root * 2, buffers)
    fsdp = 16 * p / 4 + max(forward, buffers + tokens * kept) + 1e9

    assert shares["ddp --bf16 --accumulate 2"] == pytest.approx(ddp, rel=1e-9)
    assert shares["fsdp --bf16 --accumulate 2"] == pytest.approx(fsdp, rel=1e-9)


def test_a_plan_is_a_part_of_a_search() -> None:
    """Each row of a plan has the same numbers there, and both choose by the same rules."""
    wanted = space(n=8, samples=8, given={"precision": "bf16"})
    rows = plan(
        SearchSpace(wanted.model, H100, 8, Workload(samples=8), given={"precision": "bf16"})
    ).rows
    by_choice = {candidate.choice: candidate for candidate in candidates(wanted, [""])}
    found = search(wanted)
    fits = [row for row in rows if row.verdict == SAFE and row.typed not in {"single", "fsdp1"}]

    for row in fits:
        assert row.choice is not None
        pieces = 1 if row.choice.degrees.pp > 1 else None
        again = replace(row.choice, options=replace(row.choice.options, microbatches=pieces))
        if row.choice.degrees.dp == 8:  # others train fewer samples at once in a plan
            assert by_choice[again].memory == row.memory
    assert advised(found).row is best_of(found, found.ranked)
    fastest = min(row.time.cost_s for row in fits if row.time is not None)
    assert step_s(found.ranked[0]) / 8 <= fastest * (1 + 1e-9)


# What is typed


def test_every_row_is_a_line_that_is_read(large: Search) -> None:
    """By the parser of %dist_strategy, as the same choice, with the samples that were asked for."""
    for row in large.rows:
        assert row.choice is not None
        assert strategy_spec(row.typed).choose(64) == row.choice
        assert row.samples == 128
    for typed in ("tp --tp 4", "fsdp --tp 2", "fsdp --shard hybrid --replicas 2 --bf16",
                  "cp --cp 2", "pp --pp 2 --schedule zb --microbatches 4",
                  "deepspeed --stage 1"):  # fmt: skip
        choice = strategy_spec(typed).choose(4)
        assert strategy_spec(typed_line(choice)).choose(4) == choice


def test_what_was_typed_is_kept() -> None:
    given = {"tp": 2, "checkpoint": "full", "precision": "bf16"}
    found = search(space(n=8, given=given))
    fsdp = search(space(n=8, strategy="fsdp", given={"precision": "bf16"}))
    stages = {c.choice.degrees.pp for c in candidates(space(n=8, given=given), [""])}

    for row in found.rows:
        assert row.choice is not None
        assert row.choice.degrees.tp == 2
        assert row.choice.options.checkpoint == "full"
        assert row.choice.options.precision == "bf16"
    assert stages == {1, 2, 4}
    assert all("fsdp" in row.mesh or row.choice.degrees.dp_shard > 1  # type: ignore[union-attr]
               for row in fsdp.rows)  # fmt: skip


def test_what_no_pipeline_runs_is_not_searched() -> None:
    """zb with recomputation, two stages on a rank with fsdp: the words of the rank that refuses."""
    stages = Degrees(pp=2, dp_shard=2)
    for options, text in (
        (Options(schedule="zb", checkpoint="full"), "--checkpoint full does not allow"),
        (Options(schedule="interleaved"), "FSDP can gather and sum up only one"),
    ):
        with pytest.raises(OptionError, match=text):
            validate.check_pipeline(Strategy("pp", stages, 4, options), 16)
    for candidate in candidates(space(), [""]):
        if candidate.choice.options.schedule in validate.LOOPED:
            assert candidate.choice.degrees.dp == 1


# What is shown


def test_the_ten_best_and_the_picture(large: Search) -> None:
    advice = advised(large)
    view = shown_search(large, advice, ("%dist_strategy x",))
    assert advice.row is not None
    best = re.findall(r"^(?:> )?\d+ +\w+ .*$", view.text, re.MULTILINE)
    titles = re.findall(r"<title>([^<]*)</title>", view.html)

    assert len(best) in (10, 11)
    assert sum(line.startswith(">") for line in best) == 1
    assert [row.share for row in large.front] == sorted(
        (row.share for row in large.front), reverse=True
    )
    assert any(title.startswith(f"{advice.row.typed}, batch") for title in titles)
    assert any(", no), " in title for title in titles)
    assert all(f"{row.typed}, batch" in view.html for row in large.front)
    assert view.text.count("\n") < 60
    assert len(view.html) < 100_000


# Constraints, and bad input


def shown(model: object = "llama-3.2-1b", samples: int = 0, batch: int = 1, **asked: object
          ) -> SearchView:  # fmt: skip
    given = {word: asked.pop(word) for word in ("tp", "checkpoint", "bf16") if word in asked}
    asked = {"gpu": "h100", "samples": samples, "batch": batch, **asked}
    view = make_plan(model, PlanRequest(is_search=True, **asked), given)  # type: ignore[arg-type]
    assert isinstance(view, SearchView)
    return view


def test_hosts_of_four_ranks() -> None:
    """tp 8 leaves them: the row says what that costs, and is not chosen."""
    inside = shown("llama-3-8b", ranks=16, samples=16, tp=8, bf16=True, nodes=2)
    across = shown("llama-3-8b", ranks=16, samples=16, tp=8, bf16=True, nodes=4)
    free = shown("llama-3-8b", ranks=16, samples=16, bf16=True, nodes=4)
    assert inside.search is not None
    assert across.search is not None
    assert free.advice is not None
    assert free.advice.row is not None
    assert free.advice.row.choice is not None

    assert "crosses hosts" not in inside.text
    assert re.search(r"\n1 \([\d.]+ s, \d+ %\), 2 .*: tp crosses hosts, and a step", across.text)
    assert step_s(across.search.ranked[0]) > 1.5 * step_s(inside.search.ranked[0])
    assert free.advice.row.choice.degrees.tp <= 4
    assert "--nodes 4" in free.text or "nbdist run" in free.text
    with pytest.raises(OptionError, match=r"60 ranks cannot be spread evenly over 8 hosts\. Use"):
        shown(ranks=60, nodes=8)


def test_what_has_to_stay_free() -> None:
    """Up to 95 % with 5 % free, up to half with 50 %."""
    shares = {}
    for free in ("5%", "50%"):
        view = shown("llama-3-8b", ranks=8, samples=64, bf16=True, keep_free=free)
        assert view.search is not None
        shares[free] = max(row.share for row in view.search.ranked)
    assert 0.8 < shares["5%"] < 0.95
    assert 0.4 < shares["50%"] < 0.5
    for wrong in ("10", "100%", "-5%", "x", "٣%"):
        with pytest.raises(OptionError, match=r"is not a percentage from 0% to below 100%"):
            shown(ranks=8, keep_free=wrong)


def test_nothing_fits() -> None:
    """The nearest miss, and what would make room: less that was typed, more ranks, the host."""
    typed = shown("llama-3-8b", ranks=2, gpu="rtx-4090", strategy="ddp", checkpoint="full")
    moved = shown("70e9", ranks=2, gpu="a100-40gb")

    assert typed.advice is not None
    assert typed.advice.row is None
    assert typed.advice.sentences[0].startswith("Nothing fits: the smallest, ddp ")
    assert typed.advice.sentences[1].startswith("With 16 ranks and no strategy, degrees")
    assert moved.text.startswith("Without offloading nothing is safe: the smallest, ")
    assert "needs 1752.7 % of the device. With 64 ranks, pp --pp 8 --tp 8 " in moved.text
    assert "Needs 1,120.0 GB of each host's memory" in moved.text


def test_odd_numbers_of_ranks() -> None:
    """One, a prime number, and a model of which only the size is known."""
    single, seven = shown(ranks=1, samples=4), shown("7e9", ranks=7)
    assert single.search is not None
    assert seven.search is not None

    assert {row.choice.name for row in single.search.rows} == {  # type: ignore[union-attr]
        "single"
    }
    assert all(
        size in (1, 7)
        for row in seven.search.rows
        for size in row.choice.degrees.by_word.values()  # type: ignore[union-attr]
    )
    assert "Assumed: --samples 7, 1 for each rank" in seven.text
    assert all(row.verdict != NO for row in seven.search.ranked)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"memory": "24GB", "gpu": None}, "the speed of another device is not known"),
        ({"copies": True}, "Leave --copies out"),
        ({"engine": "fake"}, "Leave --engine fake out"),
        ({"samples": 64, "batch": 2}, "Type --samples 64 or --batch 2 .a step of 16 samples., not"),
        ({"samples": 3, "strategy": "ddp"}, "of 3 samples 1 data-parallel ranks get equally many"),
        ({"strategy": "fdsp"}, "Did you mean fsdp"),
    ],
)
def test_a_mistake_says_what_to_type(asked: dict[str, object], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        shown(**{"ranks": 8, **asked})  # type: ignore[arg-type]
