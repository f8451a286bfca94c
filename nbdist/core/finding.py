"""Finding of a check or a rule: what it is, why that matters, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from nbdist.core.failures import ranks_phrase
from nbdist.core.units import one_line, shown_lines

OK = "ok"
WARN = "warn"
BAD = "bad"

# Stretches of time that a finding shows, and characters of a line of code.
MOST_SPOTS = 5
MOST_PLACE = 160

Scene = TypeVar("Scene")


@dataclass(frozen=True, slots=True)
class Spot:
    """A stretch of a rank's time, in nanoseconds since the beginning of the recording."""

    rank: int
    start_ns: int
    end_ns: int

    def __str__(self) -> str:
        # In milliseconds: durations alone have too few digits.
        return f"rank {self.rank}, from {self.start_ns / 1e6:.3f} to {self.end_ns / 1e6:.3f} ms"


@dataclass(frozen=True, slots=True)
class Finding:
    """Observation with a verdict, its reason, and advice.

    Attributes:
        name: What was looked at, or the rule that found it.
        found: What is there, with its numbers, as a clause.
        verdict: OK, WARN (works, but see why) or BAD (does not work, or not as it says).
        why: A clause; may be empty where all is well.
        what: What to do, as a clause; empty where there is nothing.
        ranks: Where it was found; empty where it is about none.
        share: Of the time or the bytes that were looked at, on the worst rank; 0 where nothing was
            measured.
        places: Lines of code to look at.
        spots: Stretches of time to look at, the longest first.
        line: Of the file that was checked, 0 where it is about the whole; None without a file.
    """

    name: str
    found: str
    verdict: str = OK
    why: str = ""
    what: str = ""
    ranks: tuple[int, ...] = ()
    share: float = 0.0
    places: tuple[str, ...] = ()
    spots: tuple[Spot, ...] = ()
    line: int | None = None

    @property
    def rule(self) -> str:
        """The name of the rule that found it."""
        return self.name


@dataclass(frozen=True, slots=True)
class RuleHit:
    """A rule has found something; the attributes are those of the Finding that it becomes."""

    found: str
    ranks: tuple[int, ...] = ()
    share: float = 0.0
    places: tuple[str, ...] = ()
    spots: tuple[Spot, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule(Generic[Scene]):
    """Rule that looks for something in a scene (a rank, or all); why and what as in Finding."""

    name: str
    look: Callable[[Scene], RuleHit | None]
    why: str
    what: str

    def finding(self, hit: RuleHit) -> Finding:
        """Make a Finding of a hit, with why and what to do."""
        return Finding(
            self.name, hit.found, WARN, self.why, self.what,
            hit.ranks, hit.share, hit.places, hit.spots,
        )  # fmt: skip


def on_ranks(rules: Sequence[Rule[Scene]], scenes: Mapping[int, Scene]) -> tuple[Finding, ...]:
    """Apply rules to ranks, each in the scene of one rank; the largest share comes first.

    One finding for each rule, with the numbers and lines of the rank where it is worst, and the
    longest stretches of all.
    """
    findings = []
    for rule in rules:
        looks = {rank: rule.look(scene) for rank, scene in scenes.items()}
        hits = {rank: hit for rank, hit in looks.items() if hit is not None}
        if not hits:
            continue
        worst = max(hits.values(), key=lambda hit: hit.share)
        spots = [spot for hit in hits.values() for spot in hit.spots]
        longest = sorted(spots, key=lambda spot: spot.start_ns - spot.end_ns)[:MOST_SPOTS]
        hit = RuleHit(worst.found, tuple(sorted(hits)), worst.share, worst.places, tuple(longest))
        findings.append(rule.finding(hit))
    return tuple(sorted(findings, key=lambda finding: -finding.share))


def summary(findings: Sequence[Finding]) -> str:
    """`1 bad, 0 warn, 12 ok`."""
    counts = Counter(finding.verdict for finding in findings)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in (BAD, WARN, OK))


def advice(finding: Finding) -> str:
    """Why, and what to do, in one line: `line 3 warn lr: too large; set it to 0.1`."""
    where = f"line {finding.line} " if finding.line else ""
    what = f"; {finding.what}" if finding.what else ""
    return f"{where}{finding.verdict} {finding.name}: {finding.why}{what}"


def report(
    findings: Sequence[Finding], *, order: str, none: str, has_share: bool = False
) -> list[str]:
    """Findings of rules, a block of lines for each; which there are differs from run to run.

    `order` says which comes first ("the largest first"), `none` what to say where there are none.
    """
    if not findings:
        return shown_lines([f"findings: none; {none}"])
    lines = [f"findings, {order}:"]
    for finding in findings:
        share = f", {100 * finding.share:.1f} %" if has_share else ""
        lines.append(f"- {finding.name} ({ranks_phrase(finding.ranks)}{share}): {finding.found}")
        lines += [f"  why: {finding.why}", f"  do: {finding.what}"]
        look_at = "; ".join(one_line(place, MOST_PLACE) for place in finding.places)
        look_at = look_at or next(map(str, finding.spots), "")
        lines += [f"  look at: {look_at}"] if look_at else []
    return shown_lines(lines)
