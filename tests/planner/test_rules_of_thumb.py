"""What rules of thumb choose: answers worked by hand, and what a disagreement costs."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from nbdist.planner.advice import advise
from nbdist.planner.devices import DEVICES, with_memory
from nbdist.planner.memory import memory_of
from nbdist.planner.models import model_of
from nbdist.planner.plan import UNKNOWN, Plan, SearchSpace, plan
from nbdist.planner.rules_of_thumb import RULES
from nbdist.planner.view.plan_view import shown_plan, shown_rules
from nbdist.planner.workload import Workload

OP, ZERO2, ZERO3 = "fsdp --shard grad-op", "deepspeed --stage 2", "deepspeed --stage 3"
OFF, TWO, FOUR = f"{ZERO3} --offload cpu", "pp --tp 8 --pp 2", "pp --tp 8 --pp 4"

# Model, ranks, device, tokens of a sample; what the three rules choose, and the arithmetic in GB.
# P is billions of parameters. One device: 16 P of states, 4 P while the optimizer steps, and 1.
# Parameters: 4 P. DeepSpeed on n: 2 P + 14 P / n in stage 2 and 16 P / n in stage 3, 4 P / n while
# the optimizer steps, buffers of 1 and 3, and 1 more. Activations go where the optimizer steps.
CASES = {
    ("gpt2", 8, "h100", 2048): ("ddp", "ddp", "ddp"),  # 2 on one; 0.5 of parameters
    ("gpt2", 2, "t4", 2048): ("ddp", "ddp", "ddp"),  # 2.5 and some activations of 16
    ("gpt2", 64, "a100-80gb", 2048): ("ddp", "ddp", "ddp"),  # the same on any number
    ("gpt2-medium", 8, "h100", 2048): ("ddp", "ddp", "ddp"),  # 0.355: 5.7; parameters 1.4
    ("gpt2-large", 8, "h100", 2048): ("ddp", OP, "ddp"),  # 0.774: 12.4; parameters 3.1
    ("gpt2-xl", 8, "h100", 2048): ("ddp", OP, "ddp"),  # 1.56: 25; parameters 6.2
    ("gpt2-xl", 2, "rtx-4090", 512): ("fsdp", OP, ZERO2),  # 31 > 24; 3.1 + 10.9 + 3.1 + 2
    ("llama-3.2-1b", 8, "h100", 2048): ("ddp", OP, "ddp"),  # 1.24: 25.7; parameters 4.9
    ("llama-3.2-1b", 2, "rtx-4090", 512): ("fsdp", OP, ZERO2),  # 25.7 > 24; 2.5 + 8.7 + 2.5 + 2
    ("llama-3.2-1b", 8, "t4", 2048): ("fsdp", OP, ZERO2),  # 25.7 > 16; 2.5 + 2.2 + 2, activations 7
    ("3e9", 8, "h100", 2048): ("ddp", OP, "ddp"),  # 61 of 80; parameters 12
    ("3e9", 4, "a100-40gb", 2048): ("fsdp", OP, ZERO2),  # 61 > 40; 6 + 10.5 + 3 + 2
    ("3e9", 4, "v100", 2048): ("fsdp", OP, OFF),  # 48 of 64; 21.5 > 16; 12 + 3 + 4 > 16
    ("5e9", 8, "h200", 2048): ("ddp", OP, "ddp"),  # 101 of 141; parameters 20
    ("7e9", 8, "b200", 2048): ("ddp", OP, "ddp"),  # 141 of 180; parameters 28
    ("7e9", 8, "h100", 2048): ("fsdp", OP, ZERO2),  # 141 > 80; 112 of 640; 14 + 12.3 + 3.5 + 2
    ("7e9", 8, "rtx-4090", 512): ("fsdp", "fsdp", ZERO3),  # 28 > 24; 26 > 24; 14 + 3.5 + 4
    ("7e9", 2, "rtx-4090", 512): (OFF, "fsdp", OFF),  # 112 > 48; 63 > 24; 56 > 24
    ("mistral-7b", 4, "l40s", 256): ("fsdp", OP, ZERO3),  # 116 of 192; 14.5 + 25.3 + 7.2 + 2 > 48
    ("mistral-7b", 2, "l40s", 256): (OFF, OP, OFF),  # 116 > 96; 29 of 48; 65 > 48; 58 > 48
    ("qwen2.5-7b", 4, "h100", 512): ("fsdp", OP, ZERO2),  # 122 of 320; 15.2 + 26.7 + 7.6 + 2
    ("llama-3-8b", 8, "h100", 2048): ("fsdp", OP, ZERO2),  # 128 of 640; 32; 16 + 14 + 4 + 2
    ("llama-3-8b", 16, "l4", 256): (
        "fsdp",
        "fsdp",
        ZERO3,
    ),  # 32 > 24; 16 + 7 + 2 + 2 > 24; 8 + 2 + 4
    ("llama-2-13b", 8, "h100", 2048): ("fsdp", OP, ZERO2),  # 208; 52; 26 + 22.8 + 6.5 + 2
    ("llama-2-13b", 8, "a100-40gb", 512): (
        "fsdp",
        "fsdp",
        ZERO3,
    ),  # 52 > 40; 48.8 > 40; 26 + 6.5 + 4
    ("22e9", 8, "h100", 512): ("fsdp", "fsdp", ZERO3),  # 88 > 80; 44 + 38.5 > 80; 44 + 11 + 4
    ("34e9", 8, "h100", 2048): ("fsdp", "fsdp", OFF),  # 544 of 640; 136; 68 + 17 + 4 > 80
    ("70e9", 8, "h100", 2048): (OFF, "fsdp", OFF),  # 1120 > 640; 280; 140 > 80 for one rank
    ("70e9", 128, "a100-80gb", 512): ("fsdp", "fsdp", ZERO3),  # not more than 70; 8.75 + 4 + 15
    ("llama-3-70b", 8, "h100", 2048): (OFF, "fsdp", OFF),  # 70.6; tp: 141 > 80
    ("llama-3-70b", 64, "h100", 2048): ("fsdp", "fsdp", TWO),  # 1129 of 5120; 282; 17.6 and 12
    ("llama-3-70b", 64, "a100-40gb", 512): ("fsdp", "fsdp", TWO),  # 1129 of 2560; 17.6 and 5
    ("llama-3-70b", 8, "b200", 512): (
        "fsdp",
        "fsdp",
        "tp",
    ),  # 1129 of 1440; tp: 141 + 35.3 + 1 of 180
    ("72e9", 64, "l40s", 512): ("fsdp", "fsdp", ZERO3),  # no NVLink; 144 > 48; 18 + 4 + 16
    ("175e9", 8, "h100", 512): (OFF, "fsdp", OFF),  # one host: no 3D; 350 > 80
    ("175e9", 16, "h100", 512): (OFF, TWO, OFF),  # 2800 > 1280; two hosts; 175 > 80
    ("175e9", 64, "h100", 512): ("fsdp", FOUR, TWO),  # 2800 of 5120; eight hosts; 43.8 and 10
    ("llama-3.1-405b", 512, "h100", 512): ("fsdp", FOUR, TWO),  # 6.5 TB of 41; 12.7 and 12
}


def planned(model: str, n: int, gpu: str, tokens: int) -> Plan:
    device = DEVICES[gpu]
    given = {"precision": device.usual_precision}
    return plan(SearchSpace(model_of(model), device, n, Workload(sequence=tokens), given=given))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_what_each_rule_chooses(case: tuple[str, int, str, int]) -> None:
    result = planned(*case)
    rules = advise(result).rules

    assert tuple(answer.typed for answer in rules) == CASES[case]
    assert tuple(answer.rule for answer in rules) == tuple(rule.name for rule in RULES)


def test_there_are_enough_cases_and_any_two_rules_disagree_in_some() -> None:
    """And in some all three choose something else."""
    assert len(CASES) >= 30
    for first, second in itertools.combinations(range(3), 2):
        assert any(answer[first] != answer[second] for answer in CASES.values())
    assert any(len({*answer}) == 3 for answer in CASES.values())
    assert any(len({*answer}) == 1 for answer in CASES.values())


def test_what_a_disagreement_costs() -> None:
    """Seconds of a sample and peak bytes, each beside the choice's."""
    result = planned("llama-3-8b", 8, "h100", 2048)
    advice = advise(result)
    rows = {row.typed: row for row in result.rows}
    best, stage = advice.row, rows[ZERO2]
    view, shown = shown_rules(result, advice), shown_plan(result, advice)
    lines = view.text.splitlines()

    assert best is not None
    assert (best.typed, advice.rules[0].typed) == ("fsdp", "fsdp")
    assert best.memory is not None
    assert best.time is not None
    assert stage.memory is not None
    assert stage.time is not None
    more = (stage.memory.peak - best.memory.peak) / 1e9
    share = 100 * (stage.time.cost_s / best.time.cost_s - 1)
    assert lines[0].startswith("Rules of thumb beside fsdp: ")
    assert re.search("the same +the same$", lines[2])
    assert lines[4].startswith("ddp, then ZeRO from stage 2  deepspeed --stage 2 ")
    assert f"({share:+.0f} %)" in lines[4]
    assert lines[4].endswith(f"{stage.memory.peak / 1e9:.1f} GB (+{more:.1f} GB)")
    assert view.text in shown.text
    assert view.html in shown.html


def test_what_costs_no_time_that_is_known() -> None:
    """Transfers of what is offloaded are not estimated; without a speed bytes are told."""

    def line(result: Plan, number: int) -> str:
        return shown_rules(result, advise(result)).text.splitlines()[2 + number]

    offloaded = planned("70e9", 8, "h100", 2048)
    given = offloaded.given
    unknown = plan(SearchSpace(model_of("7e9"), with_memory("80GB"), 8, Workload(), given=given))
    uneven = planned("175e9", 20, "h100", 512)

    assert "  not counted  " in line(offloaded, 0)
    assert " GB sent  " in line(unknown, 2)
    assert re.search(r"parameters +pp --tp 8 --pp 2 .* not possible +- +-$", line(uneven, 1))


def test_where_nothing_can_be_asked() -> None:
    """One rank, one strategy, and a model whose activations nobody counted."""
    result = planned("gpt2", 8, "h100", 2048)
    on_one_rank = plan(replace(result, world_size=1))
    typed = plan(replace(result, strategy="ddp"))
    partial = plan(replace(result, engine=lambda *case: replace(memory_of(*case), is_partial=True)))

    assert partial.rows[0].verdict == UNKNOWN
    assert [advise(each).rules for each in (on_one_rank, typed, partial)] == [(), (), ()]
    assert "Rules of thumb" not in shown_plan(on_one_rank, advise(on_one_rank)).text
