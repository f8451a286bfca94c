"""Options set against a strategy: what does not belong, contradicts or would have no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nbdist.errors import OptionError
from nbdist.strategy.choice import Strategy, rows_of
from nbdist.strategy.options import OPTIONS, listed, takers

# Schedules in which each rank has two stages, where the model has blocks enough.
LOOPED = frozenset({"interleaved", "zb"})


def check(choice: Strategy, typed: Collection[str], device_type: str, backend: str) -> None:
    """Refuse options that do not belong to a choice, or that it would silently ignore.

    `typed` names those that were typed, whatever their values. An empty device type ("cpu", "cuda")
    or backend ("gloo", "nccl") leaves open what depends on it.

    Raises:
        OptionError: With the reason, and what takes the option.
    """
    rows = rows_of(choice)
    name = " x ".join(row.name for row in rows)
    steps = {step for row in rows for step in (*row.steps, *row.common)}
    for option in (OPTIONS[word] for word in typed):
        is_for_another = option.steps and not steps.intersection(option.steps)
        if is_for_another or any(row.name in option.never for row in rows):
            why = f": {option.why}" if option.why else ""
            raise OptionError(
                f"{name} has no {option.flag}{why}. It goes with {listed(takers(option))}."
            )
    looks_at_blocks = bool(steps & {"fsdp", "fsdp1", "pp"})
    for word, is_broken, problem in _rules(choice, name, looks_at_blocks, device_type, backend):
        if is_broken and word in typed:
            raise OptionError(problem)


def _rules(
    choice: Strategy, name: str, looks_at_blocks: bool, device_type: str, backend: str
) -> Iterator[tuple[str, bool, str]]:
    """(an option, whether what was typed breaks a rule about it, what is wrong and what works)."""
    options, stages = choice.options, choice.degrees.pp
    is_nvme, is_deepspeed = options.offload == "nvme", choice.name == "deepspeed"
    problem = (
        f"{name} alone does not look at blocks, so --blocks would have no effect. It does with "
        "--checkpoint or --compile; fsdp and pp always do."
    )
    yield "blocks", not (looks_at_blocks or options.checkpoint or options.is_compiled), problem
    problem = f"{name} offloads only to the CPU. NVMe works with deepspeed --stage 3."
    yield "offload", is_nvme and not is_deepspeed, problem
    problem = (
        f"DeepSpeed offloads to NVMe only in stage 3, not in stage {options.stage}. Use --stage 3, "
        "or --offload cpu."
    )
    yield "offload", is_nvme and options.stage != 3, problem
    problem = (
        "DDP ignores --find-unused with --static-graph, which finds unused parameters by itself in "
        "the first step. Use one of them."
    )
    yield "finds_unused", options.has_static_graph, problem
    is_split = options.hook == "powersgd" and bool(options.bucket_mb) and backend == "gloo"
    problem = (
        "On Gloo, PowerSGD works only with one bucket for all gradients (several abort the "
        "process), so --bucket would have no effect. Leave it out."
    )
    yield "bucket_mb", is_split, problem
    problem = f"There is no --sdpa {options.sdpa} on the CPU. Use flash or math."
    yield "sdpa", device_type == "cpu" and options.sdpa in {"efficient", "cudnn"}, problem
    problem = "--shard hybrid does not go with pp. Use --shard full, or fsdp --tp without pp."
    yield "shard", options.shard == "hybrid" and stages > 1, problem
    is_short = options.schedule == "1f1b" and (options.microbatches or stages) < stages
    problem = (
        f"--schedule 1f1b on {stages} stages needs {stages} micro-batches or more, not "
        f"{options.microbatches}. Use --microbatches {2 * stages}, or --schedule gpipe."
    )
    yield "microbatches", is_short, problem


def stages_per_rank(choice: Strategy, blocks: int) -> int:
    """Stages of a pipeline on each rank, of a model with so many blocks."""
    return 2 if choice.options.schedule in LOOPED and blocks >= 2 * choice.degrees.pp else 1


def check_pipeline(choice: Strategy, blocks: int) -> None:
    """Refuse what no pipeline of nbdist's runs, of a model with so many blocks.

    Plans count it all the same: other frameworks have it.

    Raises:
        OptionError: A schedule that does not exist, or does not go with another option.
    """
    for is_broken, problem in _pipeline_rules(choice, stages_per_rank(choice, blocks)):
        if is_broken:
            raise OptionError(problem)


def _pipeline_rules(choice: Strategy, per_rank: int) -> Iterator[tuple[bool, str]]:
    """(whether a schedule's rule is broken, what is wrong and what works)."""
    options, degrees = choice.options, choice.degrees
    schedule, count = options.schedule, options.microbatches
    every = OPTIONS["schedule"].choices
    yield (
        schedule not in every,
        f"There is no pipeline schedule {schedule}. Use one of {', '.join(every)}.",
    )
    what = "--compile" if options.is_compiled else f"--checkpoint {options.checkpoint}"
    problem = (
        f"--schedule zb runs each backward in two halves, which {what} does not allow: what it "
        "computes again is gone after the first half. Use another schedule: "
        f"{', '.join(name for name in every if name != 'zb')}."
    )
    yield schedule == "zb" and bool(options.is_compiled or options.checkpoint), problem
    if count is not None:
        yield count < 1, f"--microbatches {count}: a batch has at least one micro-batch."
        # What torch's schedules ask for: equal rounds over the ranks.
        below, above = count // degrees.pp * degrees.pp, (count // degrees.pp + 1) * degrees.pp
        problem = (
            f"--schedule {schedule} cannot deal {count} micro-batches out to {degrees.pp} "
            f"ranks in equal rounds. Use --microbatches {below} or {above}."
        )
        yield schedule in LOOPED and bool(count % max(1, count // degrees.pp)), problem
    others = " or ".join(name for name in every if name not in LOOPED)
    start = f"--schedule {schedule} puts two stages on each rank"
    problem = (
        f"{start}, and FSDP can gather and sum up only one. Use --schedule {others} with a data "
        f"parallel degree of {degrees.dp}."
    )
    yield per_rank == 2 and degrees.dp > 1, problem
    problem = (
        f"{start}, and --sequence-parallel splits the sequence once for all blocks of a rank. Use "
        f"--schedule {others} with it."
    )
    yield per_rank == 2 and options.has_sequence_parallel, problem
