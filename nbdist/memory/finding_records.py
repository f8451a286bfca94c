"""What makes ranks need so much memory, by rules: what was found, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.memory import findings as rules
from nbdist.memory.findings import Look, Scene
from nbdist.memory.peak import RankPeak
from nbdist.memory.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class MemoryFinding:
    """Something that takes memory and need not.

    Attributes:
        rule: Name in RULES, as people read it.
        found: What is there, with its numbers, as a clause.
        why: Why that costs memory, as a clause.
        what: What to do, as a clause.
        ranks: Where it was found.
        share: Of the worst rank's peak, what it is about; the largest comes first.
        places: Lines to look at.
    """

    rule: str
    found: str
    why: str
    what: str
    ranks: tuple[int, ...]
    share: float
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """What is looked for.

    Attributes:
        name: As people read it.
        look: Looks for it on one rank.
        why: Why it costs memory, as a clause.
        what: What to do, as a clause.
    """

    name: str
    look: Look
    why: str
    what: str


RULES = (
    Rule(
        "little memory left",
        rules.near_limit,
        "what a batch of another shape, another process or a library needs is not there",
        "a smaller batch per rank with accelerator.accumulate, or a strategy that holds less: "
        "%dist_plan lists them with their bytes",
    ),
    Rule(
        "fragmentation",
        rules.fragmented,
        "the allocator keeps pieces of the device that no later block fits into",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the ranks start, so that pieces "
        "grow; batches of one shape, so that freed pieces fit again",
    ),
    Rule(
        "activations",
        rules.activations,
        "what forward makes is kept until backward has used it, for every block of the model",
        "%dist_strategy ... --checkpoint full keeps the blocks' inputs alone and computes the rest "
        "again in backward; --bf16 halves them; so does half a batch",
    ),
    Rule(
        "optimizer state on every rank",
        rules.optimizer_state,
        "each rank keeps the same state, and updates all parameters with it",
        "%dist_strategy zero1 splits the optimizer's state, %dist_strategy fsdp parameters and "
        "gradients too",
    ),
    Rule(
        "one rank needs more",
        rules.imbalance,
        "the batch and the model have to fit on the rank that needs most",
        "batches of equal size and length on all ranks; under pp stages of equal work; nothing "
        "that rank 0 alone keeps (outputs that are collected, an evaluation)",
    ),
    Rule(
        "more with every step",
        rules.growth,
        "something keeps what each step makes, until there is no more memory",
        "look at the lines below: losses and outputs that are kept in a list keep their graph "
        "(loss.item() or .detach()), and so do hooks, caches and retain_graph",
    ),
    Rule(
        "copies in the optimizer's step",
        rules.stepping,
        "foreach updates all parameters at once, and makes temporary copies of them all",
        "fused=True where the optimizer has it (%dist_strategy ... --fused), or foreach=False, "
        "which is slower",
    ),
)


def findings(snapshot: Snapshot, peaks: Sequence[RankPeak]) -> tuple[MemoryFinding, ...]:
    """What takes memory by `RULES`, the largest first; empty where no rule finds anything."""
    known = {one.rank: one for one in snapshot.ranks}
    scenes = [Scene(snapshot, tuple(peaks), known[own.rank], own) for own in peaks]
    found = [one for rule in RULES if (one := _applied(rule, scenes)) is not None]
    return tuple(sorted(found, key=lambda one: -one.share))


def _applied(rule: Rule, scenes: Sequence[Scene]) -> MemoryFinding | None:
    """What a rule finds; its numbers are those of the rank where it is worst."""
    hits = {scene.own.rank: hit for scene in scenes if (hit := rule.look(scene)) is not None}
    if not hits:
        return None
    worst = max(hits, key=lambda rank: hits[rank].share)
    hit = hits[worst]
    return MemoryFinding(
        rule.name, hit.found, rule.why, rule.what, tuple(sorted(hits)), hit.share, hit.places
    )
