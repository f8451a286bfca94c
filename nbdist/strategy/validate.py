"""Options set against a strategy: what does not belong, contradicts or would have no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nbdist.errors import OptionError
from nbdist.strategy.choice import Strategy, rows_of
from nbdist.strategy.options import OPTIONS, listed, takers


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
