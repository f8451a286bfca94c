"""Memory that no rank has allocated: what a test wants to see judged and drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from nbdist.core.view import View
from nbdist.memory.findings import findings
from nbdist.memory.peak import peaks
from nbdist.memory.snapshot import (
    ACTIVATION,
    BACKWARD,
    BEFORE,
    BUFFER,
    CATEGORIES,
    COMMUNICATION,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
    STAYS,
    STEPPING,
    TEMPORARY,
    UNKNOWN,
    AllocationFrame,
    Blocks,
    Phase,
    RankMemory,
    Reserved,
    Segment,
    Snapshot,
    make_blocks,
)
from nbdist.memory.timeline import changes, totals
from nbdist.memory.view import report as memory_report

MB = 10**6
_CELL = "cell 3"
_TORCH = "/usr/lib/python3.11/site-packages/torch"
EXACT = frozenset({PARAMETER, GRADIENT, OPTIMIZER, BUFFER})


@dataclass(frozen=True, slots=True)
class Piece:
    """One block, as a test writes it."""

    size_bytes: int
    start_ns: int = BEFORE
    end_ns: int = STAYS
    category: int = PARAMETER
    is_exact: bool = True
    stack: int = -1
    name: int = -1
    operator: int = -1
    address: int = 0


def blocks(pieces: Iterable[Piece]) -> Blocks:
    """The columns of these, sorted by start."""
    ordered = sorted(pieces, key=lambda piece: piece.start_ns)

    none = make_blocks()
    return Blocks(**{
        column: np.array([getattr(piece, column) for piece in ordered], getattr(none, column).dtype)
        for column in Blocks.__slots__
    })  # fmt: skip


def rank_memory(rank: int, pieces: Iterable[Piece], duration_ns: int = 100, **more) -> RankMemory:
    return RankMemory(rank, "a", "cpu", blocks(pieces), duration_ns=duration_ns, **more)


def random_blocks(count: int, seed: int, span_ns: int = 200) -> Blocks:
    """Blocks without a plan: equal times, some that come and go at once, before, and staying."""
    random = np.random.default_rng(seed)
    start_ns = random.integers(-20, span_ns, count)
    end_ns = start_ns + random.geometric(4 / span_ns, count) - 1
    is_before = start_ns < 0
    stays = random.random(count) < 0.1
    return blocks(
        Piece(
            int(size),
            BEFORE if before else int(start),
            STAYS if staying else int(max(end, 0)),
            int(category),
            bool(exact),
            int(stack),
        )
        for size, start, end, before, staying, category, exact, stack in zip(
            random.integers(1, 1000, count),
            start_ns,
            end_ns,
            is_before,
            stays,
            random.integers(0, len(CATEGORIES), count),
            random.integers(0, 2, count),
            random.integers(-1, 3, count),
            strict=True,
        )
    )


@dataclass(slots=True)
class _Training:
    """A rank that trains, block by block."""

    random: np.random.Generator
    now: int = 0
    pieces: list[Piece] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    stacks: list[tuple[AllocationFrame, ...]] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    step_ends_ns: list[int] = field(default_factory=list)

    def name(self, text: str) -> int:
        """Its place in names."""
        if text not in self.names:
            self.names.append(text)
        return self.names.index(text)

    def stack(self, *frames: AllocationFrame) -> int:
        """Its place in stacks."""
        if frames not in self.stacks:
            self.stacks.append(frames)
        return self.stacks.index(frames)

    def tick(self) -> int:
        """A moment later."""
        self.now += int(self.random.lognormal(11, 0.4))
        return self.now

    def piece(self, size_bytes: int, category: int, operator: str, line: int, **more) -> int:
        """Allocate now; returns its place, so that it can be freed."""
        via = AllocationFrame(f"{_TORCH}/nn/modules/linear.py", 134, "forward")
        stack = self.stack(
            via, AllocationFrame(_CELL, line, "forward"), AllocationFrame(_CELL, 40, "<module>")
        )
        piece = Piece(
            size_bytes, self.tick(), STAYS, category, category in EXACT, stack,
            operator=self.name(operator), address=len(self.pieces) << 20, **more,
        )  # fmt: skip
        self.pieces.append(piece)
        return len(self.pieces) - 1

    def free(self, place: int) -> None:
        self.pieces[place] = replace(self.pieces[place], end_ns=self.tick())


def training(
    *,
    ranks: int = 2,
    steps: int = 4,
    device: str = "cpu",
    leak_bytes: int = 0,
) -> Snapshot:
    """DDP steps with Adam: activations rise, backward lets them fall, gradients and state stay."""
    every = (_rank(np.random.default_rng(rank), rank, steps, leak_bytes) for rank in range(ranks))
    memories = [rank if device == "cpu" else _on_gpu(rank) for rank in every]
    return Snapshot(tuple(memories), "ddp, dp 2")


def _rank(random: np.random.Generator, rank: int, steps: int, leak: int) -> RankMemory:
    builder, width = _Training(random), 4 * MB
    weights = [f"h.{layer}.{what}" for layer in range(6) for what in ("attn.w", "mlp.w")]
    builder.pieces += [
        Piece(width * (1 + at % 2), name=builder.name(weight), address=at << 30)
        for at, weight in enumerate(weights)
    ]
    builder.pieces += [
        Piece(width // 8, category=BUFFER, name=builder.name("mask"), address=1 << 40),
        Piece(3 * width, category=COMMUNICATION, is_exact=False, address=1 << 41),
    ]
    gradients: list[int] = []
    for step in range(steps):
        for gradient in gradients:
            builder.free(gradient)
        gradients = _step(builder, rank, step, weights, width)
        if leak:
            builder.piece(leak, UNKNOWN, "aten::stack", 27)
        builder.step_ends_ns.append(builder.tick())
    return rank_memory(
        rank, builder.pieces, builder.tick(), stacks=tuple(builder.stacks),
        names=tuple(builder.names), phases=tuple(builder.phases),
        step_ends_ns=tuple(builder.step_ends_ns), version="2.13.0",
    )  # fmt: skip


def _step(
    builder: _Training, rank: int, step: int, weights: Sequence[str], width: int
) -> list[int]:
    """Forward, backward, the optimizer's step; returns the gradients' places."""
    activations = []
    for at, _ in enumerate(weights):
        size = width * (5 + rank) // (4 - at % 2)
        activations.append(builder.piece(size, ACTIVATION, "aten::addmm", 12 + at % 2))
        activations += [
            builder.piece(size // 9, ACTIVATION, "aten::native_dropout", 14) for _ in range(3)
        ]
        builder.free(builder.piece(size // 2, TEMPORARY, "aten::gelu", 16))
    began, gradients = builder.tick(), []
    for at, weight in reversed(list(enumerate(weights))):
        short = builder.piece(width, TEMPORARY, "aten::mm", 30)
        gradients.append(
            builder.piece(width * (1 + at % 2), GRADIENT, "aten::mm", 30, name=builder.name(weight))
        )
        for _ in range(4):
            builder.free(activations.pop())
        builder.free(short)
    builder.phases.append(Phase(BACKWARD, began, builder.tick()))
    began = builder.tick()
    if step == 0:
        for weight in weights:
            size = next(p.size_bytes for p in builder.pieces if p.name == builder.name(weight))
            for _ in range(2):
                builder.piece(size, OPTIMIZER, "aten::zeros_like", 33, name=builder.name(weight))
    copies = [builder.piece(width // 2, TEMPORARY, "aten::_foreach_sqrt", 33) for _ in weights]
    for copy in copies:
        builder.free(copy)
    builder.phases.append(Phase(STEPPING, began, builder.tick()))
    return gradients


def _on_gpu(rank: RankMemory) -> RankMemory:
    """The same on a device that keeps what it has got."""
    time_ns, total = totals(changes(rank.blocks))
    reserved = -(-np.maximum.accumulate(total) * 5 // 4 // (2 * MB)) * 2 * MB
    first = np.concatenate([[0], np.flatnonzero(np.diff(reserved)) + 1])
    peak, most = int(total.max()), int(reserved[-1])
    return replace(
        rank,
        device="cuda",
        device_name="Some GPU",
        limit_bytes=2 * most,
        reserved=Reserved(time_ns[first], reserved[first]),
        segments=(
            Segment(1 << 42, most // 2, most // 2, 0, "large"),
            Segment(1 << 43, most - most // 2, int(total[-1]) - most // 2, 0, "large"),
        ),
        allocator_peak_bytes=peak,
        reserved_peak_bytes=most,
    )


def million(count: int = 1_000_000, ranks: int = 8) -> Snapshot:
    """So many blocks on all ranks together, of sizes from bytes to megabytes, in steps."""
    return Snapshot(tuple(_many(count // ranks, rank) for rank in range(ranks)), "fsdp, dp 8")


def _many(count: int, rank: int) -> RankMemory:
    random = np.random.default_rng([0, rank])
    start_ns = np.sort(random.integers(0, 10**10, count))
    category = random.integers(0, len(CATEGORIES), count).astype(np.int8)
    stacks, names = _texts()
    blocks = Blocks(
        random.integers(0, 2**46, count),
        random.lognormal(9, 3, count).astype(np.int64) + 1,
        start_ns,
        start_ns + random.lognormal(15, 2.5, count).astype(np.int64),
        category,
        category < 4,
        random.integers(-1, len(stacks), count).astype(np.int32),
        random.integers(-1, len(names), count).astype(np.int32),
        random.integers(-1, len(names), count).astype(np.int32),
    )
    ends = tuple(range(10**8, 10**10, 10**8))
    phases = tuple(Phase(BACKWARD, end - 5 * 10**7, end - 10**7) for end in ends)
    return RankMemory(
        rank, "a", "cpu", blocks, duration_ns=10**10, stacks=stacks, names=names, phases=phases,
        step_ends_ns=ends,
    )  # fmt: skip


@cache
def _texts() -> tuple[tuple[tuple[AllocationFrame, ...], ...], tuple[str, ...]]:
    """Stacks and names that cannot be compressed."""
    random = np.random.default_rng(0)
    files = {f"/srv/{n:x}/model_{n}.py": int(n % 900) for n in random.integers(0, 2**48, 3000)}
    stacks = tuple(
        tuple(AllocationFrame(file, line + depth, "forward") for depth in range(12))
        for file, line in files.items()
    )
    return stacks, tuple(f"blocks.{number:x}.weight" for number in random.integers(0, 2**60, 9000))


def remembered(snapshot: Snapshot) -> View:
    """What %dist_memory shows of a snapshot."""
    found_peaks = peaks(snapshot)
    return memory_report.memory_report(snapshot, found_peaks, findings(snapshot, found_peaks))
