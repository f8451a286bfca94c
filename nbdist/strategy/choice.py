"""Parallel strategies as data: what was chosen, and how many ranks lie along each axis.

The rows are in strategy.table, the options in strategy.options;
strategy.choose turns what was typed into a Strategy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nbdist.strategy.options import OPTIONS, spell
from nbdist.strategy.table import ROWS, STEPS, StrategyRow

# The axes of a device mesh, outermost first: neighbours along the last one are on one host.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

# Rows that are one mesh: their names are settled by its degrees.
MESHED = frozenset({"pp", "fsdp", "tp"})


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many ranks lie along each axis.

    Attributes:
        pp: Pipeline stages.
        dp_replicate: Copies of the model that see different data.
        dp_shard: Ranks that see different data and share one copy of the model.
        cp: Ranks that share one sequence.
        tp: Ranks that share each layer.
        ep: Ranks that share the experts of each layer. No axis: they are neighbours among the
            ranks that see different data, and all else lies on these as without it.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def product(self) -> int:
        """How many ranks the mesh has."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """How many ranks see different data: the factor of the effective batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def edp(self) -> int:
        """How many ranks see different data and have the same experts."""
        return self.dp // self.ep

    @property
    def by_word(self) -> dict[str, int]:
        """Degrees above 1, by the word that a user types for them, outermost first."""
        counts = {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp, "ep": self.ep}
        return {word: count for word, count in counts.items() if count > 1}

    @property
    def is_split(self) -> bool:
        """Whether ranks hold different parts of a model."""
        return self.pp * self.dp_shard * self.tp * self.ep > 1

    def ep_place(self, rank: int) -> tuple[int, int]:
        """Which share of each layer's experts a rank has, and which of the copies of that share."""
        place = self.coordinate(rank)
        number = place.dp_replicate * self.dp_shard + place.dp_shard
        return number % self.ep, number // self.ep

    def coordinate(self, rank: int) -> Degrees:
        """Coordinate of a rank on each axis, from 0; all 0 where every rank is by itself."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return Degrees(**place)

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from this one in these axes at most, itself too."""
        others = [axis for axis in AXES if axis not in axes]
        here = self.coordinate(rank)
        return tuple(
            peer
            for peer in range(self.product)
            if all(getattr(self.coordinate(peer), a) == getattr(here, a) for a in others)
        )


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a strategy. The default of each is what the strategy does by itself.

    Attributes:
        precision: fp32, bf16 or fp16: what forward and backward compute in; parameters that
            the optimizer steps stay as they are.
        checkpoint: Activations computed again in backward: "", "full", "selective", or the k
            of every k-th block.
        accumulate: Backwards per step of the optimizer.
        is_fused: The optimizer's fused implementation.
        is_compiled: torch.compile, block by block.
        sdpa: Backend of scaled_dot_product_attention: "", flash, efficient, math, cudnn.
        blocks: Name of the model's list of blocks; found where empty.
        bucket_mb: DDP's bucket size in MiB; None for torch's.
        has_static_graph, finds_unused: DDP's options.
        hook: DDP's gradient compression: "", fp16, bf16, powersgd.
        shard: FSDP: full, grad-op or hybrid.
        offload: "", cpu or nvme.
        has_sequence_parallel: TP: also norms and dropout are split, along the sequence.
        schedule: PP: gpipe, 1f1b, interleaved or zb.
        microbatches: PP: pieces of a batch; None for the most, up to two per stage, that divide it.
        context: CP: ring or ulysses; "" without.
        stage: DeepSpeed's: 1, 2 or 3.
    """

    precision: str = "fp32"
    checkpoint: str = ""
    accumulate: int = 1
    is_fused: bool = False
    is_compiled: bool = False
    sdpa: str = ""
    blocks: str = ""
    bucket_mb: float | None = None
    has_static_graph: bool = False
    finds_unused: bool = False
    hook: str = ""
    shard: str = "full"
    offload: str = ""
    has_sequence_parallel: bool = False
    schedule: str = "1f1b"
    microbatches: int | None = None
    context: str = ""
    stage: int = 2


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy with its degrees and options, for a number of ranks.

    Attributes:
        name: Of a row.
        degrees: Their product is the number of ranks; all 1 for `single`, where every rank
            does the same by itself.
    """

    name: str
    degrees: Degrees
    world_size: int
    options: Options = field(default_factory=Options)


def rows_of(choice: Strategy) -> tuple[StrategyRow, ...]:
    """The rows that work together in a choice, outermost axis first; one mostly.

    By its degrees: a mesh of pp, dp_shard and tp is pp, fsdp and tp, whichever name was typed.
    """
    degrees = choice.degrees
    # Copies that share nothing are ddp; only a plan makes them beside tp and pp.
    copies = degrees.dp_replicate if degrees.dp_shard == 1 else 1
    counts = {"pp": degrees.pp, "fsdp": degrees.dp // copies, "ddp": copies, "tp": degrees.tp}
    is_meshed = choice.name in MESHED or degrees.ep > 1
    used = [name for name, degree in counts.items() if degree > 1 and is_meshed]
    experts = ["ep"] if degrees.ep > 1 else []
    return tuple(ROWS[name] for name in (*(used or [choice.name]), *experts))


def steps_of(choice: Strategy) -> tuple[str, ...]:
    """Steps by which a rank transforms a model, in order: keys of parallel/base/transform.py."""
    rows, options = rows_of(choice), choice.options
    wanted = {step for row in rows for step in row.steps}
    common = {step for row in rows for step in row.common}
    if options.checkpoint or options.is_compiled or options.sdpa:
        wanted |= common & {"options"}
    if options.precision != "fp32":
        wanted |= common & {"precision"}
    return tuple(step for step in STEPS if step in wanted)


def label(choice: Strategy) -> str:
    """A choice as a person would name it: `fsdp`, `pp x fsdp x tp`, `ddp x cp`."""
    names = [row.name for row in rows_of(choice)]
    if choice.name in {"cp", "ulysses"} and choice.degrees.dp > 1:
        names = ["ddp", *names]
    return " x ".join(names)


def mesh_phrase(choice: Strategy) -> str:
    """The mesh in the words in which degrees are typed: `pp 2 x dp 2 x tp 2`; "" of one rank."""
    degrees = choice.degrees
    mesh = " x ".join(f"{word} {n}" for word, n in degrees.by_word.items() if word != "ep")
    if degrees.ep > 1:
        mesh += f" (experts over ep {degrees.ep})"
    if degrees.dp_replicate > 1 and degrees.dp_shard > 1:
        mesh += f" ({degrees.dp_replicate} copies on {degrees.dp_shard} ranks each)"
    return mesh


def options_phrase(choice: Strategy) -> str:
    """The options that are not at their defaults, as they are typed; "" where all are."""
    default = Options()
    values = ((row, getattr(choice.options, row.name)) for row in OPTIONS.values())
    return " ".join(spell(row, v) for row, v in values if v != getattr(default, row.name))


def described(choice: Strategy) -> str:
    """A choice in one phrase: `fsdp x tp, dp 2 x tp 2, --bf16`."""
    return ", ".join(filter(None, [label(choice), mesh_phrase(choice), options_phrase(choice)]))
