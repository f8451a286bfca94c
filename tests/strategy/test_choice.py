"""What is typed becomes a mesh, options and steps, or is refused with what works."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from nbdist.errors import OptionError
from nbdist.strategy import footprint
from nbdist.strategy.choice import Degrees, Options, Strategy, described, rows_of, steps_of
from nbdist.strategy.choose import choose, default_choice, settings_of
from nbdist.strategy.options import DEGREES, OPTIONS, SHORTHANDS, OptionRow, takers
from nbdist.strategy.table import HELD, ROWS, STEPS, StrategyRow

DOCS = Path(__file__).resolve().parents[2] / "docs" / "strategies.md"

_MESHES: list[tuple[str | None, dict[str, object], int, Degrees]] = [
    ("single", {}, 4, Degrees()),
    ("ddp", {}, 4, Degrees(dp_replicate=4)),
    ("ddp", {"dp": 4, "tp": 1}, 4, Degrees(dp_replicate=4)),
    ("fsdp", {}, 4, Degrees(dp_shard=4)),
    ("fsdp", {"shard": "grad-op"}, 2, Degrees(dp_shard=2)),
    ("fsdp", {"shard": "hybrid"}, 4, Degrees(dp_replicate=2, dp_shard=2)),
    ("fsdp", {"shard": "hybrid"}, 9, Degrees(dp_replicate=3, dp_shard=3)),
    ("fsdp", {"shard": "hybrid", "replicas": 4}, 8, Degrees(dp_replicate=4, dp_shard=2)),
    ("fsdp", {"shard": "hybrid", "tp": 2}, 8, Degrees(dp_replicate=2, dp_shard=2, tp=2)),
    ("fsdp1", {"shard": "hybrid"}, 4, Degrees(dp_replicate=2, dp_shard=2)),
    ("zero1", {}, 2, Degrees(dp_replicate=2)),
    ("deepspeed", {}, 2, Degrees(dp_replicate=2)),
    ("tp", {}, 4, Degrees(tp=4)),
    ("fsdp", {"tp": 2}, 8, Degrees(dp_shard=4, tp=2)),
    ("tp", {"dp": 2}, 8, Degrees(dp_shard=2, tp=4)),
    ("tp", {"tp": 2}, 8, Degrees(dp_shard=4, tp=2)),
    (None, {"tp": 2}, 8, Degrees(dp_shard=4, tp=2)),
    (None, {"dp": 4}, 4, Degrees(dp_replicate=4)),
    ("pp", {}, 4, Degrees(pp=4)),
    ("pp", {"tp": 2}, 4, Degrees(pp=2, tp=2)),
    ("pp", {"dp": 2, "tp": 2}, 8, Degrees(pp=2, dp_shard=2, tp=2)),
    ("fsdp", {"pp": 2, "tp": 2}, 8, Degrees(pp=2, dp_shard=2, tp=2)),
    (None, {"pp": 2, "dp": 2}, 4, Degrees(pp=2, dp_shard=2)),
    ("cp", {}, 2, Degrees(cp=2)),
    ("cp", {"dp": 2}, 4, Degrees(dp_replicate=2, cp=2)),
    ("ulysses", {"cp": 2}, 4, Degrees(dp_replicate=2, cp=2)),
    ("fsdp", {}, 1, Degrees()),
    ("ep", {}, 4, Degrees(dp_replicate=4, ep=4)),
    ("ep", {"ep": 2}, 4, Degrees(dp_replicate=4, ep=2)),
    ("fsdp", {"ep": 2}, 8, Degrees(dp_shard=8, ep=2)),
    ("tp", {"dp": 4, "ep": 2}, 8, Degrees(dp_shard=4, tp=2, ep=2)),
    ("fsdp", {"tp": 2, "ep": 2}, 8, Degrees(dp_shard=4, tp=2, ep=2)),
    (None, {"ep": 2}, 2, Degrees(dp_replicate=2, ep=2)),
]

# What was typed -> every piece that the message has to have.
_REFUSED: list[tuple[str | None, dict[str, object], int, tuple[str, ...]]] = [
    ("tp", {"tp": 3}, 8, ("8 ranks cannot form tp=3", "not a multiple of 3", "Use 1, 2, 4 or 8.")),
    ("ddp", {"dp": 2}, 4, ("4 ranks cannot form dp=2", "Use 4.")),
    (None, {"dp": 2, "tp": 2}, 8, ("dp=2 x tp=2: that is 4 ranks", "4 for dp, or 4 for tp")),
    ("fsdp", {"pp": 3, "tp": 2}, 8, ("pp=3", "1, 2 or 4 for pp")),
    ("pp", {"dp": 3, "tp": 5}, 8, ("Their product has to be 8",)),
    ("tp", {}, 1, ("tp needs 2 ranks or more, and there is 1", "%dist_reset -n 2", "ddp")),
    ("fsdp", {"tp": 2}, 2, ("tp=2 leaves 1 of 2 ranks for fsdp", "Use tp")),
    ("tp", {"tp": 1}, 2, ("dp=2 leaves 1 of 2 ranks for tp", "Use fsdp")),
    ("ddp", {"tp": 2}, 4, ("ddp and --tp 2 cannot be combined", "fsdp --tp 2")),
    ("ddp", {"pp": 2}, 4, ("ddp and --pp 2 cannot be combined", "pp --pp 2")),
    ("ep", {}, 1, ("ep needs 2 ranks or more",)),
    ("ep", {"ep": 1}, 4, ("ep would have no effect", "Use ddp, or --ep 2 or 4.")),
    ("fsdp", {"ep": 3}, 4, ("--ep 3 does not divide the 4 ranks that see different", "2 or 4.")),
    (
        "fsdp",
        {"ep": 2, "pp": 2},
        8,
        ("--ep 2 and --pp 2 cannot be combined yet", "pp without --ep"),
    ),
    ("tp", {"ep": 2}, 2, ("--ep 2 does not divide the 1 rank", "Use --dp 2 with it.")),
    ("fsdp", {"ep": 2, "shard": "hybrid"}, 4, ("--shard hybrid and --ep 2", "--shard full")),
    ("ddp", {"ep": 2}, 4, ("ddp and --ep 2 cannot be combined", "ep --ep 2")),
    ("fsdp", {"cp": 2}, 4, ("fsdp and --cp 2 cannot be combined", "cp --cp 2")),
    ("cp", {"tp": 2}, 4, ("cp and --tp 2 cannot be combined", "tp --sequence-parallel")),
    ("tp", {"cp": 2}, 4, ("tp and --cp 2 cannot be combined",)),
    ("zero1", {"tp": 2}, 4, ("zero1 and --tp 2", "zero1 takes --dp", "fsdp --tp 2")),
    ("deepspeed", {"pp": 2}, 4, ("deepspeed and --pp 2", "pp --pp 2")),
    ("single", {"dp": 2}, 2, ("single takes no degrees", "ddp --dp 2")),
    ("fsdp", {"shard": "hybrid"}, 2, ("2 data-parallel ranks cannot", "--shard full", "4 ranks")),
    ("fsdp", {"shard": "hybrid", "replicas": 3}, 8, ("cannot form 3 copies", "2 or 4")),
    ("fsdp", {"replicas": 2}, 4, ("--replicas", "--shard hybrid")),
    ("ddp", {"replicas": 2}, 4, ("--replicas goes with fsdp --shard hybrid, not with ddp",)),
    ("pp", {"dp": 4, "shard": "hybrid"}, 8, ("--shard hybrid does not go with pp",)),
    ("fdsp", {}, 2, ("no strategy 'fdsp'", "Did you mean fsdp?", "single, ddp, fsdp")),
    ("hsdp", {}, 4, ("no strategy 'hsdp'", "fsdp --shard hybrid")),
    ("nothing like it", {}, 4, ("Choose one of single, ddp",)),
    (None, {"bf16": True}, 4, ("No strategy was given", "single, ddp")),
    ("ddp", {"schedle": 1}, 2, ("no option 'schedle'", "Did you mean schedule?")),
    ("ddp", {"tp": 0}, 2, ("--tp 0", "Use 1 or more")),
    ("ddp", {"dp": "two"}, 2, ("--dp two", "Use 1 or more")),
    ("ddp", {"accumulate": "0"}, 2, ("--accumulate 0", "Use 1 or more")),
    ("ddp", {"bucket": "big"}, 2, ("--bucket big", "more than 0")),
    ("ddp", {"static_graph": "yes"}, 2, ("True or False, not 'yes'",)),
    ("ddp", {"precision": "fp8"}, 2, ("no --precision fp8", "fp32, bf16, fp16")),
    ("ddp", {"bf16": True, "fp16": True}, 2, ("precision is typed twice: bf16 and fp16",)),
    ("ddp", {"checkpoint": "half"}, 2, ("no --checkpoint half", "full, selective")),
    ("fsdp", {"blocks": 3}, 2, ("--blocks takes a name, not 3",)),
    # Options where they do not belong.
    ("fsdp", {"bucket": 50}, 2, ("fsdp has no --bucket", "only DDP", "ddp, zero1, cp and ulysses")),
    ("fsdp", {"hook": "fp16"}, 2, ("fsdp has no --hook", "ddp, zero1")),
    ("tp", {"static_graph": True}, 2, ("tp has no --static-graph", "ddp, zero1")),
    ("tp", {"shard": "full"}, 2, ("tp has no --shard", "fsdp and fsdp1")),
    ("ddp", {"schedule": "1f1b"}, 2, ("ddp has no --schedule", "goes with pp")),
    ("fsdp", {"microbatches": 4}, 2, ("fsdp has no --microbatches", "--accumulate", "with pp")),
    ("fsdp", {"stage": 2}, 2, ("fsdp has no --stage", "goes with deepspeed")),
    ("cp", {"sequence_parallel": True}, 2, ("cp has no --sequence-parallel", "goes with tp")),
    ("ddp", {"offload": "cpu"}, 2, ("ddp has no --offload", "fsdp and deepspeed")),
    # Options that would have no effect.
    ("fsdp", {"offload": "nvme"}, 2, ("only to the CPU", "deepspeed --stage 3")),
    ("deepspeed", {"offload": "nvme"}, 2, ("only in stage 3, not in stage 2",)),
    ("ddp", {"blocks": "h"}, 2, ("--blocks would have no effect", "--checkpoint")),
    ("ddp", {"static_graph": True, "find_unused": True}, 2, ("ignores --find-unused",)),
    ("cp", {"sdpa": "math"}, 2, ("cp has no --sdpa: it computes attention over all", "goes with")),
    ("ulysses", {"dp": 2, "sdpa": "flash"}, 4, ("no --sdpa",)),
    ("pp", {"microbatches": 2}, 4, ("4 stages needs 4 micro-batches or more", "--microbatches 8")),
]


def names(case: object) -> str | None:
    return " ".join(map(str, case)) if isinstance(case, tuple) else None


@pytest.mark.parametrize(("name", "settings", "world_size", "mesh"), _MESHES)
def test_what_is_typed_becomes_a_mesh_of_all_ranks(
    name: str | None, settings: Mapping[str, object], world_size: int, mesh: Degrees
) -> None:
    """The name takes the ranks that typed degrees leave, and the product is the world."""
    choice = choose(name, settings, world_size)

    assert choice.degrees == mesh
    assert mesh.product == (1 if name == "single" else world_size)


@pytest.mark.parametrize(("name", "settings", "world_size", "expected"), _REFUSED)
def test_what_cannot_be_had_is_refused_with_what_can(
    name: str | None, settings: Mapping[str, object], world_size: int, expected: tuple[str, ...]
) -> None:
    """The message has what was typed, the numbers, and the choices."""
    with pytest.raises(OptionError) as caught:
        choose(name, settings, world_size)

    assert [piece for piece in expected if piece not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("settings", "place", "expected"),
    [
        ({"sdpa": "cudnn"}, {"device_type": "cpu"}, "no --sdpa cudnn on the CPU"),
        ({"hook": "powersgd", "bucket": 5}, {"backend": "gloo"}, "only with one bucket"),
    ],
)
def test_what_only_some_machines_can_do_is_refused_on_the_others(
    settings: Mapping[str, object], place: Mapping[str, str], expected: str
) -> None:
    """Device and backend count where they are known."""
    with pytest.raises(OptionError, match=expected):
        choose("ddp", settings, 2, **place)

    assert choose("ddp", settings, 2, device_type="cuda", backend="nccl").name == "ddp"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("single", {}),
        ("ddp", {"hook": "bf16", "bucket": 50, "precision": "bf16"}),
        ("fsdp", {"shard": "hybrid", "replicas": 2, "checkpoint": "full"}),
        ("fsdp", {"tp": 2, "sequence_parallel": True}),
        ("pp", {"pp": 2, "tp": 2, "schedule": "gpipe", "microbatches": 4}),
        ("ulysses", {"cp": 4, "accumulate": 2}),
        ("deepspeed", {"stage": 3, "offload": "cpu"}),
    ],
)
def test_the_settings_of_a_choice_make_it_again(name: str, given: dict[str, object]) -> None:
    choice = choose(name, given, 8)

    assert choose(choice.name, settings_of(choice), 8) == choice


def test_one_mesh_is_one_choice_however_it_is_typed() -> None:
    """A switch between spellings of the same mesh is no switch."""
    spelled = [choose("fsdp", {"tp": 2}, 4), choose("tp", {"dp": 2}, 4),
               choose(None, {"dp": 2, "tp": 2}, 4), choose("tp", {"tp": 2}, 4)]  # fmt: skip

    assert len(set(spelled)) == 1
    assert described(spelled[0]) == "fsdp x tp, dp 2 x tp 2"


@pytest.mark.parametrize(
    ("name", "settings", "world_size", "steps"),
    [
        ("single", {}, 2, ()),
        ("ddp", {"fp16": True}, 2, ("precision", "ddp")),
        ("fsdp", {"tp": 2, "checkpoint": 2}, 4, ("tp", "options", "fsdp")),
        ("pp", {"dp": 2, "tp": 2, "bf16": True}, 8, ("pp", "tp", "fsdp", "precision", "pipeline")),
        ("pp", {}, 2, ("pp", "pipeline")),
        ("zero1", {"compile": True}, 2, ("options", "ddp", "zero1")),
        ("ulysses", {"dp": 2}, 4, ("ddp", "cp")),
        ("fsdp1", {"sdpa": "math"}, 2, ("options", "fsdp1")),
        ("fsdp", {}, 1, ("fsdp",)),
    ],
)
def test_steps_follow_the_mesh_and_the_options(
    name: str, settings: Mapping[str, object], world_size: int, steps: tuple[str, ...]
) -> None:
    """Each axis with ranks and each option that was asked for has its step, in order."""
    assert steps_of(choose(name, settings, world_size)) == steps


def test_options_arrive_by_either_name() -> None:
    """The typed word and the record's field mean the same; None and False mean nothing."""
    by_word = choose("ddp", {"fused": True, "bucket": 5, "find_unused": False, "tp": None}, 2)
    by_field = choose("ddp", {"is_fused": True, "bucket_mb": 5}, 2)

    assert by_word == by_field
    assert by_word.options == Options(is_fused=True, bucket_mb=5.0)


def test_a_choice_is_described_as_it_is_typed() -> None:
    """Its phrase has the rows, the mesh, and the options that are not at their defaults."""
    settings = {"bf16": True, "checkpoint": "full", "shard": "hybrid", "accumulate": 2}

    assert described(choose("fsdp", settings, 4)) == (
        "fsdp, dp 4 (2 copies on 2 ranks each), --bf16 --checkpoint full --accumulate 2 "
        "--shard hybrid"
    )
    assert described(choose("cp", {"dp": 2, "bucket": 2.5}, 4)) == (
        "ddp x cp, dp 2 x cp 2, --bucket 2.5"
    )
    assert described(choose("ulysses", {}, 2)) == "ulysses, cp 2"
    assert described(default_choice(1)) == "ddp"


def test_rows_use_words_that_exist() -> None:
    """Axes, steps, collectives and degrees of every row are known elsewhere."""
    axes = {field.name for field in fields(Degrees)}
    for row in ROWS.values():
        assert {*row.steps, *row.common} <= set(STEPS)
        assert row.axis in axes | {""}
        assert set(row.splits) <= axes
        split = {what for words in row.splits.values() for what in words}
        assert split <= {*HELD, "experts", "batch", "sequence"}
        assert {sent.call for sent in row.sends} <= set(footprint.CALLS)
        assert set(row.takes) <= set(DEGREES)
        assert row.source.startswith("https://")
    assert {step for row in ROWS.values() for step in (*row.steps, *row.common)} == set(STEPS)


def test_every_option_is_a_field_and_can_be_typed() -> None:
    """The table and the record name the same; only `context` is decided by a row's name."""
    defined = {field.name for field in fields(Options)}
    decided = {name for row in ROWS.values() for name in row.sets}
    words = [row.word for row in OPTIONS.values()]

    assert set(OPTIONS) == defined - decided
    assert len({*words, *DEGREES, *SHORTHANDS}) == len(words) + len(DEGREES) + len(SHORTHANDS)
    assert all(takers(row) for row in OPTIONS.values())


def sections() -> dict[str, str]:
    """Heading -> text of docs/strategies.md."""
    parts = DOCS.read_text(encoding="utf-8").split("\n## ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def facts(row: StrategyRow) -> str:
    """The table of a row's section, from its data and the formulas."""
    choice = choose(row.name, {}, 4)
    formula = footprint.held_formula(choice)
    cells = {
        "what": row.title,
        "a rank holds": f"`{formula}` bytes per parameter"
        + (f"; for a time also {row.gathered}" if row.gathered else ""),
        "a rank sends": "; ".join(footprint.sent_phrases(choice)) or "nothing",
        "needs": row.needs,
        "use it when": row.when,
        "with": ", ".join(f"`--{word}`" for word in row.takes) or "no other degree",
        "live switch": f"no: {row.fixed}" if row.fixed else "yes",
        "described in": f"<{row.source}>",
    }
    return "\n".join(f"| {name} | {text} |" for name, text in cells.items())


def option_line(row: OptionRow) -> str:
    """A line of the options' table in the docs."""
    typed = f"`{row.flag}`"
    for word, (name, _) in SHORTHANDS.items():
        if name == row.name:
            typed = f"{typed}, `--{word}`" if typed != f"`{row.flag}`" else f"`--{word}`"
    values = {"choice": ", ".join(row.choices), "count": "1, 2, ...", "number": "above 0",
              "switch": "", "text": "a name", "blocks": "full, selective, or K"}  # fmt: skip
    names = takers(row)
    where = "all" if len(names) == len(ROWS) else ", ".join(names)
    value = "" if row.name == "precision" else values[row.kind]
    return f"| {typed} | {value} | {row.default} | {where} | {row.help} |"


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_docs_have_a_section_with_the_facts_of_each_row(row: StrategyRow) -> None:
    """docs/strategies.md says of a strategy what its row says."""
    assert facts(row) in sections()[row.name]


@pytest.mark.parametrize("row", OPTIONS.values(), ids=lambda row: row.name)
def test_docs_have_a_line_for_each_option(row: OptionRow) -> None:
    """docs/strategies.md says of an option what its row says."""
    assert option_line(row) in sections()["Options"]


def test_docs_have_no_section_of_a_strategy_that_does_not_exist() -> None:
    """The sections are the rows, in their order, between others of their own."""
    after = ["Products", "Switching", "Code over all parameters", "Optimizers", "Comparing"]
    assert list(sections()) == ["Typing one", "Options", *ROWS, *after]


@pytest.mark.parametrize(
    "choice", [choose(name, {}, 4) for name in ROWS], ids=lambda choice: choice.name
)
def test_a_row_alone_is_itself(choice: Strategy) -> None:
    """A name alone gives its own row; experts are shared between ranks of ddp."""
    around = ["ddp"] if choice.name == "ep" else []
    assert [row.name for row in rows_of(choice)] == [*around, choice.name]
