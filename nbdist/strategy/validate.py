"""Options set against a strategy: what does not belong, contradicts or would have no effect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from nbdist.errors import OptionError
from nbdist.strategy.choice import Strategy, rows_of
from nbdist.strategy.options import OPTIONS, OptionRow, listed, takers
from nbdist.strategy.table import StrategyRow


@dataclass(frozen=True, slots=True)
class _Case:
    """A choice with what a rule has to know besides.

    Attributes:
        choice: The strategy.
        rows: Its rows.
        typed: Names of the options that were typed.
        device_type: "cpu" or "cuda"; empty where it is not known.
        backend: "gloo" or "nccl"; empty where it is not known.
    """

    choice: Strategy
    rows: tuple[StrategyRow, ...]
    typed: Collection[str]
    device_type: str
    backend: str

    @property
    def steps(self) -> set[str]:
        """The steps that options can be for."""
        return {step for row in self.rows for step in (*row.steps, *row.common)}

    @property
    def name(self) -> str:
        """The rows' names, joined by x."""
        return " x ".join(row.name for row in self.rows)


def check(
    choice: Strategy,
    typed: Collection[str],
    device_type: str = "",
    backend: str = "",
) -> None:
    """Refuse options that do not belong to a choice, or that it would silently ignore.

    Args:
        choice: The strategy.
        typed: Names of the options that were typed, whatever their values.
        device_type: "cpu" or "cuda"; empty leaves open what depends on it.
        backend: "gloo" or "nccl"; likewise.

    Raises:
        OptionError: With the reason, and what takes the option.
    """
    case = _Case(choice, rows_of(choice), typed, device_type, backend)
    for name in typed:
        _check_place(case, OPTIONS[name])
    for name, rules in _RULES.items():
        for rule in rules if name in typed else ():
            problem = rule(case)
            if problem:
                raise OptionError(problem)


def _check_place(case: _Case, option: OptionRow) -> None:
    is_for_another = option.steps and not case.steps.intersection(option.steps)
    if is_for_another or any(row.name in option.never for row in case.rows):
        why = f": {option.why}" if option.why else ""
        raise OptionError(
            f"{case.name} has no {option.flag}{why}. It goes with {listed(takers(option))}."
        )


def _blocks(case: _Case) -> str:
    options = case.choice.options
    if case.steps & {"fsdp", "fsdp1", "pp"} or options.checkpoint or options.is_compiled:
        return ""
    return (
        f"{case.name} alone does not look at blocks, so --blocks would have no effect. It does "
        "with --checkpoint or --compile; fsdp and pp always do."
    )


def _offload(case: _Case) -> str:
    options, is_deepspeed = case.choice.options, case.choice.name == "deepspeed"
    if options.offload == "nvme" and not is_deepspeed:
        return f"{case.name} offloads only to the CPU. NVMe works with deepspeed --stage 3."
    if options.offload == "nvme" and options.stage != 3:
        return (
            f"DeepSpeed offloads to NVMe only in stage 3, not in stage {options.stage}. Use "
            "--stage 3, or --offload cpu."
        )
    return ""


def _static_graph(case: _Case) -> str:
    options = case.choice.options
    if not (options.has_static_graph and options.finds_unused):
        return ""
    return (
        "DDP ignores --find-unused with --static-graph, which finds unused parameters by itself "
        "in the first step. Use one of them."
    )


def _hook(case: _Case) -> str:
    options = case.choice.options
    if options.hook == "powersgd" and options.bucket_mb and case.backend == "gloo":
        return (
            "On Gloo, PowerSGD works only with one bucket for all gradients (several abort the "
            "process), so --bucket would have no effect. Leave it out."
        )
    return ""


def _sdpa(case: _Case) -> str:
    backend = case.choice.options.sdpa
    if case.device_type == "cpu" and backend in {"efficient", "cudnn"}:
        return f"There is no --sdpa {backend} on the CPU. Use flash or math."
    return ""


def _shard(case: _Case) -> str:
    choice = case.choice
    if choice.options.shard == "hybrid" and choice.degrees.pp > 1:
        return "--shard hybrid does not go with pp. Use --shard full, or fsdp --tp without pp."
    return ""


def _microbatches(case: _Case) -> str:
    options, stages = case.choice.options, case.choice.degrees.pp
    if options.schedule != "1f1b" or (options.microbatches or stages) >= stages:
        return ""
    return (
        f"--schedule 1f1b on {stages} stages needs {stages} micro-batches or more, "
        f"not {options.microbatches}. Use --microbatches {2 * stages}, or --schedule gpipe."
    )


# Option that was typed -> the rules that it may break.
_RULES: Mapping[str, tuple[Callable[[_Case], str], ...]] = {
    "blocks": (_blocks,),
    "offload": (_offload,),
    "finds_unused": (_static_graph,),
    "bucket_mb": (_hook,),
    "sdpa": (_sdpa,),
    "shard": (_shard,),
    "microbatches": (_microbatches,),
}
