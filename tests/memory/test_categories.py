"""What blocks are for: against a simulator that lives through the history, moment by moment."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from nbdist.memory.blocks import NOWHERE, Event, pair_events
from nbdist.memory.categories import Claim, categorise, with_foreign
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
    Phase,
    RankMemory,
)

Spans = list[tuple[int, int, int]]  # address, start, end


def memory(
    spans: Spans,
    phases: tuple[Phase, ...] = (),
    stacks: tuple[tuple[AllocationFrame, ...], ...] = (),
    names: tuple[str, ...] = (),
    *,
    places: list[tuple[int, int]] | None = None,
) -> RankMemory:
    """A rank's memory; `places` are each block's stack and operator. Sizes: address + 1."""
    events = []
    for number, (address, start, end) in enumerate(spans):
        stack, operator = places[number] if places else (-1, -1)
        if start != BEFORE:
            events.append(Event(start, address, address + 1, stack, operator))
        if end != STAYS:
            events.append(Event(end, address, -address - 1))
    before = [(address, address + 1) for address, start, _ in spans if start == BEFORE]
    events.sort(key=lambda event: (event.time_ns, event.size_bytes > 0))
    blocks, _ = pair_events(before, events, 10**6)
    return RankMemory(0, "one", "cpu", blocks, phases=phases, stacks=stacks, names=names)


def kinds(rank: RankMemory) -> dict[int, str]:
    """Address -> category, with a ! where it is exact."""
    blocks = rank.blocks
    rows = zip(blocks.address, blocks.category, blocks.is_exact, strict=True)
    return {int(address): CATEGORIES[kind] + "!" * bool(exact) for address, kind, exact in rows}


STEP = (Phase(BACKWARD, 100, 200), Phase(STEPPING, 300, 400))


def test_a_step_is_taken_apart_by_its_phases() -> None:
    """Without any claim, and without a line of Python."""
    spans = [
        (1, 10, 20),  # in forward
        (2, 10, 150),  # kept for the backward
        (3, 30, 250),  # the loss: there in the backward, and a little longer
        (4, 110, 120),  # in the backward
        (5, 110, 500),  # a gradient
        (6, 310, 320),  # in the step
        (7, 310, STAYS),  # state that nobody claims
        (8, 210, 600),  # made between, freed later
        (9, BEFORE, STAYS),
        (10, BEFORE, 150),  # of a forward before the recording
    ]

    assert kinds(categorise(memory(spans, STEP), [])) == {
        1: "temporary", 2: "activations", 3: "activations", 4: "temporary", 5: "gradients",
        6: "temporary", 7: "unknown", 8: "unknown", 9: "unknown", 10: "activations",
    }  # fmt: skip


def test_a_workspace_that_no_object_has_is_no_gradient() -> None:
    """cuBLAS allocates one in its first product, which may be a backward's, and keeps it."""
    spans = [(1, 110, STAYS), (2, 110, STAYS), (3, 110, 250), (4, 110, STAYS)]
    claims = [Claim(500, 1, 2, GRADIENT, "weight"), Claim(500, 4, 5, UNKNOWN, "kept")]

    assert kinds(categorise(memory(spans, STEP), claims)) == {
        1: "gradients!", 2: "unknown", 3: "gradients", 4: "gradients",
    }  # fmt: skip


def test_claims_are_exact_and_the_strongest_counts() -> None:
    """Whatever was concluded; a claim of another time or address says nothing."""
    spans = [(1, 10, STAYS), (2, 110, 500), (3, 10, 20), (3, 30, STAYS), (4, 10, 150)]
    claims = [
        Claim(450, 2, 3, UNKNOWN, "g"),
        Claim(300, 2, 3, GRADIENT, "weight"),
        Claim(5, 1, 2, PARAMETER, "too early"),
        Claim(600, 1, 2, BUFFER, "mean"),
        Claim(601, 1, 2, PARAMETER, "weight"),
        Claim(600, 3, 4, OPTIMIZER, "weight: exp_avg"),
        Claim(600, 77, 4, OPTIMIZER, "nowhere"),
        Claim(50, 4, 5, UNKNOWN, "h"),
    ]
    rank = categorise(memory(spans, STEP), claims)
    blocks = rank.blocks
    rows = [
        (int(a), int(s), CATEGORIES[c], bool(e), rank.names[n] if n >= 0 else "")
        for a, s, c, e, n in zip(
            blocks.address, blocks.start_ns, blocks.category, blocks.is_exact, blocks.name,
            strict=True,
        )
    ]  # fmt: skip

    assert sorted(rows) == [
        (1, 10, "parameters", True, "weight"),
        (2, 110, "gradients", True, "weight"),
        (3, 10, "temporary", False, ""),
        (3, 30, "optimizer state", True, "weight: exp_avg"),
        (4, 10, "activations", False, "h"),  # freed in the backward: the graph had it last
    ]


CELL = ("cell [1]", "f")
DDP, FSDP = "/env/torch/nn/parallel/distributed.py", "/env/torch/distributed/fsdp"
COLLECTIVES = "/env/torch/distributed/distributed_c10d.py"
_STACKS = {
    "DDP's buckets": ([(DDP, "_ddp_init_helper"), CELL], True),
    "the model under DDP": ([CELL, (DDP, "forward")], False),
    "DDP's own forward": ([(DDP, "forward"), CELL], False),
    "FSDP2 gathers": (
        [("/env/torch/_tensor.py", "x"), (f"{FSDP}/_fully_shard/_fsdp_collectives.py", "g")], True,
    ),
    "FSDP2 casts inputs": ([(f"{FSDP}/_fully_shard/_fsdp_state.py", "_pre")], False),
    "FSDP1 gathers": ([(f"{FSDP}/_flat_param.py", "_alloc")], True),
    "a user's file of that name": ([("/own/distributed_c10d.py", "f")], False),
    "torch.distributed": ([(COLLECTIVES, "g")], True),
}  # fmt: skip


@pytest.mark.parametrize("case", _STACKS)
def test_what_gathers_and_reduces_is_known_by_its_lines(case: str) -> None:
    """Also where the block would be an activation by its time."""
    lines, is_sent = _STACKS[case]
    stack = tuple(AllocationFrame(file, 1, function) for file, function in lines)
    rank = categorise(memory([(1, 10, 150)], STEP, (stack,), places=[(0, -1)]), [])

    assert kinds(rank) == {1: "communication" if is_sent else "activations"}


@pytest.mark.parametrize(
    ("operator", "is_sent"),
    [("c10d::allreduce_", True), ("gloo:all_reduce", True), ("aten::gloo", False),
     ("_c10d_functional::all_gather_into_tensor", True), ("c10daemon", False)],
)  # fmt: skip
def test_what_is_allocated_below_a_collective_is_sent(operator: str, is_sent: bool) -> None:
    """By the operator's name."""
    rank = categorise(memory([(1, 10, 20)], STEP, (), (operator,), places=[(-1, 0)]), [])

    assert kinds(rank) == {1: "communication" if is_sent else "temporary"}


def test_claims_without_an_address_take_a_block_of_their_size() -> None:
    """One that was there before, or that DDP allocated meanwhile; each block once at a time."""
    stack = (AllocationFrame(DDP, 1, "_ddp_init_helper"),)
    buckets = memory(
        [(7, 10, STAYS), (7 + 50, 10, STAYS)], (), (stack,), places=[(0, -1), (-1, -1)]
    )
    claims = [Claim(500, NOWHERE, 8, COMMUNICATION, name) for name in ("bucket 0", "bucket 1")]
    assert kinds(categorise(buckets, claims)) == {7: "communication!", 57: "unknown"}
    blocks, _ = pair_events([(NOWHERE, 8), (NOWHERE, 8)], [Event(40, 99, -8)], 9)
    there = RankMemory(0, "one", "cpu", blocks)
    begin = [Claim(0, NOWHERE, 8, COMMUNICATION, name) for name in ("bucket 0", "bucket 1")]
    rank = categorise(there, begin)
    assert [rank.names[n] for n in rank.blocks.name] == ["bucket 0", "bucket 1"]
    assert rank.blocks.is_exact.all()


def sent(time_ns: int, *sizes: int) -> list[Claim]:
    """What DDP says of its buckets."""
    return [Claim(time_ns, NOWHERE, size, COMMUNICATION, f"bucket {size}") for size in sizes]


@pytest.mark.parametrize(
    ("events", "first", "last", "end_ns"),
    [
        # As many bytes come in their place, while DDP still tells of the old one.
        ([Event(50, 5, 10, operator=0), Event(55, 6, 20, operator=0)], [30], [30], 50),
        # Other bytes that are sent replace nothing.
        ([Event(50, 5, 10, operator=0), Event(55, 6, 21, operator=0)], [30], [30], STAYS),
        # DDP tells of other sizes, and nothing was allocated: they were made anew before.
        ([Event(50, 5, 4)], [30], [10, 20], STAYS),
        # Their successors come, and DDP tells of those; the one of 8 bytes stays.
        ([Event(50, 5, 10, operator=0), Event(55, 6, 20, operator=0)], [30, 8], [10, 20, 8], 50),
    ],
)
def test_buckets_go_when_others_come_in_their_place(
    events: list[Event], first: list[int], last: list[int], end_ns: int
) -> None:
    """Only the sizes of DDP's buckets are known."""
    blocks, _ = pair_events([(NOWHERE, size) for size in first], events, 100)
    memory = RankMemory(0, "a", "cpu", blocks, duration_ns=100, names=("c10d::broadcast_",))
    result = categorise(memory, [*sent(0, *first), *sent(90, *last)]).blocks
    ends = dict(zip(result.size_bytes.tolist(), result.end_ns.tolist(), strict=True))

    assert ends == {event.size_bytes: STAYS for event in events} | {30: end_ns} | dict.fromkeys(
        first[1:], STAYS
    )


def test_a_bucket_of_before_on_a_gpu_is_concluded_from_its_size() -> None:
    """Rounded up as the allocator does; nothing else tells of it."""
    blocks, _ = pair_events([(4096, 1024), (8192, 512)], [], 9)
    claims = [Claim(0, NOWHERE, 1000, COMMUNICATION, "bucket 0")]
    rank = categorise(RankMemory(0, "one", "cuda", blocks), claims)

    assert kinds(rank) == {4096: "communication", 8192: "unknown"}
    assert rank.names == ("bucket 0",)


def test_memory_of_no_allocator_begins_where_it_is_first_claimed() -> None:
    """If it is there at the end; a mapped file, an array of numpy."""
    claims = [
        Claim(20, 500, 64, UNKNOWN, "array"), Claim(20, 600, 8, UNKNOWN, "gone"),
        Claim(90, 500, 64, UNKNOWN, "array"), Claim(90, 1, 2, UNKNOWN, "own"),
    ]  # fmt: skip
    rank = categorise(with_foreign(memory([(1, 10, STAYS)]), claims), claims)
    blocks = rank.blocks

    assert blocks.address.tolist() == [1, 500]
    assert (blocks.start_ns[1], blocks.end_ns[1], blocks.size_bytes[1]) == (20, STAYS, 64)
    assert [rank.names[n] for n in blocks.name] == ["own", "array"]


@dataclass
class Life:
    """What a block has lived through, noted while time goes on.

    Attributes:
        made_in, freed_in: The phase, "forward" for none; empty for before, or never.
        visit: How many times the phase had changed when it was made, and when it was freed.
        backwards: So many backwards have begun while it was there.
        is_seen: Whether the objects were looked at while it was there.
        claims: In the order in which they were made.
    """

    made_in: str
    visit: list[int] = field(default_factory=list)
    freed_in: str = ""
    backwards: int = 0
    is_seen: bool = False
    claims: list[Claim] = field(default_factory=list)


def verdict(life: Life) -> str:
    """The category by the rules of the documentation."""
    for kind in (PARAMETER, BUFFER, OPTIMIZER, GRADIENT, COMMUNICATION):
        if any(claim.category == kind for claim in life.claims):
            return f"{CATEGORIES[kind]}!"
    rules = (
        (TEMPORARY, life.made_in and life.freed_in and life.visit[0] == life.visit[-1]),
        (GRADIENT, life.made_in == BACKWARD and (life.claims or not life.is_seen)),
        (ACTIVATION, life.made_in in ("forward", "") and life.freed_in == BACKWARD),
        (
            ACTIVATION,
            life.made_in == "forward"
            and life.backwards == 1
            and not any(c.name for c in life.claims),
        ),
    )
    return CATEGORIES[next((kind for kind, holds in rules if holds), UNKNOWN)]


class World:
    """A heap and a phase that change by chance, one thing each moment."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.there = {n: Life("", [0]) for n in range(1, self.draw.randint(1, 4))}
        self.before = [(n, n + 1) for n in self.there]
        self.lives = dict(self.there)
        self.events: list[Event] = []
        self.claims: list[Claim] = []
        self.phases: list[Phase] = []
        self.phase, self.began, self.visit = "forward", 0, 0

    def live(self, now: int) -> None:
        what = self.draw.random()
        if what < 0.12:
            self.turn(now)
        elif what < 0.5 or not self.there:
            address = 1000 + now
            self.there[address] = self.lives[address] = Life(self.phase, [self.visit])
            self.events.append(Event(now, address, address + 1))
        elif what < 0.85:
            self.free(now)
        else:
            self.claim(now)

    def turn(self, now: int) -> None:
        self.visit += 1
        if self.phase != "forward":
            self.phases.append(Phase(self.phase, self.began, now))
            self.phase = "forward"
            return
        self.phase, self.began = self.draw.choice([BACKWARD, BACKWARD, STEPPING]), now
        for life in self.there.values():
            life.backwards += self.phase == BACKWARD

    def free(self, now: int) -> None:
        address = self.draw.choice(sorted(self.there))
        life = self.there.pop(address)
        life.freed_in = self.phase
        life.visit.append(self.visit)
        self.events.append(Event(now, address, -address - 1))

    def claim(self, now: int) -> None:
        address = self.draw.choice(sorted(self.lives))
        kind = self.draw.choice([PARAMETER, BUFFER, OPTIMIZER, GRADIENT, COMMUNICATION, UNKNOWN])
        claim = Claim(now, address, address + 1, kind, self.draw.choice(["", "a", "b"]))
        self.claims.append(claim)
        for life in self.there.values():
            life.is_seen = True
        if address in self.there:
            self.there[address].claims.append(claim)


@pytest.mark.parametrize("seed", range(200))
def test_any_history_has_the_categories_of_a_slow_simulation(seed: int) -> None:
    """Phases, allocations, frees and claims in any order."""
    world = World(seed)
    for now in range(1, world.draw.randint(5, 120)):
        world.live(now)
    if world.phase != "forward":
        world.phases.append(Phase(world.phase, world.began, 10**6))
    world.draw.shuffle(world.claims)
    blocks, _ = pair_events(world.before, world.events, 10**6)
    rank = RankMemory(0, "one", "cpu", blocks, phases=tuple(world.phases))
    result = categorise(rank, world.claims)

    assert kinds(result) == {address: verdict(life) for address, life in world.lives.items()}
    assert np.array_equal(result.blocks.end_ns, blocks.end_ns)
