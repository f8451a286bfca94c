"""The same steps under several strategies: what each took, held and sent, a row for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.strategy import footprint
from nbdist.strategy.choice import Strategy, described
from nbdist.trace.breakdown import TimeBreakdown

# Of a step, in the order in which they are drawn; trace.breakdown says what each is.
PARTS = ("compute", "communication", "copy", "data", "idle")


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Bytes that one rank holds of the models that a cell trains.

    Attributes:
        gradients_bytes: Of gradients right after an optimizer's step.
        optimizer_bytes: Of the optimizers' tensors, their counts of steps aside.
    """

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of the three."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class CellMemory:
    """A rank's memory over one cell.

    Attributes:
        held: The most that it held after a step; at the end of the cell, where none was made.
        peak_bytes: Of torch's allocator on a GPU; resident memory of the process on the CPU. None
            where the system does not tell.
        is_device: Whether the peak is a GPU's.
        n_parameters: Of the whole models, whatever lies here.
        has_adam: All optimizers that stepped keep two moments for each parameter.
    """

    held: HeldMemory
    peak_bytes: int | None
    is_device: bool
    n_parameters: int
    has_adam: bool


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """The results of one strategy.

    Attributes:
        asked: As typed: "fsdp --bf16".
        problem: Why there are no numbers, as a sentence; empty where there are.
        dp: Ranks that see different data: a step takes so many of the loader's batches.
        step_ns: As TimeBreakdown.step_ns; of the whole cell, where it makes no steps.
        parts: Share of each of PARTS in that, over all ranks.
        overlap: Share of communication under which something computes; None without any.
        sent_bytes: What a rank sends per step, measured.
        sent_formula_bytes: The strategy's formula for the same, activations left out; None where
            it says nothing.
        held: Of the rank that holds the most.
        held_formula_bytes: The strategy's formula for the same; None where it says nothing.
        peak_bytes: Of the rank with the highest; None where it is unknown.
        is_device: Whether that is a GPU's memory.
    """

    asked: str
    problem: str = ""
    strategy: str = ""
    dp: int = 1
    step_ns: int = 0
    has_steps: bool = False
    parts: tuple[float, ...] = (0.0,) * len(PARTS)
    overlap: float | None = None
    sent_bytes: float = 0.0
    sent_formula_bytes: float | None = None
    held: HeldMemory = HeldMemory()
    held_formula_bytes: float | None = None
    peak_bytes: int | None = None
    is_device: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same cell under several strategies.

    Attributes:
        rows: In the order in which they were asked for.
        before: The strategy before and after, as `strategy.choice.described` says it.
        models: Live models that were put under each; empty where the cell made its own.
    """

    rows: tuple[ComparedRow, ...]
    before: str
    models: tuple[str, ...] = ()


def row(
    asked: str,
    choice: Strategy,
    shares: TimeBreakdown,
    warm: Sequence[CellMemory],
    recorded: Sequence[CellMemory],
) -> ComparedRow:
    """Build the row of a strategy from the shares and each rank's memory of its recorded run.

    `warm` is the memory while the cell ran outside the record: a profiler's own is in the resident
    memory of a process. Of a GPU the peak is from the recorded run.
    """

    def total_ns(name: str) -> int:
        return sum(getattr(rank, f"{name}_ns") for rank in shares.ranks)

    # Of communication its part that nothing is computed beside.
    parts = ("compute", "exposed", "copy", "data", "idle")
    communication_ns = total_ns("communication")
    is_device = any(memory.is_device for memory in recorded)
    peaks = [memory.peak_bytes for memory in (recorded if is_device else warm)]
    most = max(recorded, key=lambda memory: memory.held.total_bytes)
    has_formula = most.has_adam and most.n_parameters  # the formula is of Adam
    longest_ns = max((rank.window_ns for rank in shares.ranks), default=0)
    return ComparedRow(
        asked=asked,
        strategy=described(choice),
        dp=choice.degrees.dp,
        step_ns=shares.step_ns or longest_ns,
        has_steps=bool(shares.step_ns),
        parts=tuple(total_ns(part) / max(1, total_ns("window")) for part in parts),
        overlap=total_ns("overlap") / communication_ns if communication_ns else None,
        sent_bytes=shares.sent_bytes,
        sent_formula_bytes=shares.formula_bytes,
        held=most.held,
        held_formula_bytes=(
            footprint.held_bytes(choice, most.n_parameters, footprint.recipe_of(choice))
            if has_formula
            else None
        ),
        peak_bytes=None if None in peaks else max(peak for peak in peaks if peak is not None),
        is_device=is_device,
    )
