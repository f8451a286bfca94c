"""Hosts as they are typed, and whether ranks can be started on them: records and rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbdist.core.versions import check_torch
from nbdist.errors import OptionError, StartError

# Without an option's dash in front, a space, or anything that a shell would read.
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
MOST_CLOCK_S = 1.0
NEEDED_BYTES = 100_000_000
FORM = "Use --hosts n1:4,n2:4 (name:ranks), or a file with a host on each line: n1 slots=4"
OWN_NAMES = frozenset({"localhost", "127.0.0.1"})


@dataclass(frozen=True, slots=True)
class Host:
    """A host that ranks may be started on.

    Attributes:
        name: The name for ssh or Slurm, with `user@` where that is typed.
        places: The most ranks on it; None for one per GPU, or one.
    """

    name: str
    places: int | None = None


def parse_hosts(text: str, folder: Path = Path()) -> tuple[Host, ...]:
    """The hosts of `--hosts`: names with their places, or the path of a file of them.

    A file has Open MPI's form (`n1 slots=4`) or that of the option; `#` begins a comment.

    Raises:
        OptionError: If it names no host, one of them twice, or has another form.
    """
    path = folder / Path(text).expanduser()
    if path.is_file():
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
        entries = [re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line]
    else:
        entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    hosts = tuple(_parse_host(entry) for entry in entries)
    if not hosts:
        raise OptionError(f"--hosts {text!r} names no host. {FORM}.")
    for name, count in Counter(host.name for host in hosts).items():
        if count > 1:
            raise OptionError(f"The host {name} occurs {count} times in --hosts. Name it once.")
    return hosts


def _parse_host(entry: str) -> Host:
    name, colon, places = entry.partition(":")
    is_name = _NAME.fullmatch(name) and not name.isdigit()  # a number of hosts or ranks alone
    if not is_name or (colon and not re.fullmatch(r"[1-9][0-9]{0,3}", places)):
        raise OptionError(f"{entry!r} is not a host with its number of ranks. {FORM}.")
    return Host(name, int(places) if colon else None)


def share_ranks(places: Mapping[str, int], world_size: int | None) -> dict[str, tuple[int, ...]]:
    """Which ranks each host gets: its places are filled in the order of the hosts.

    Raises:
        OptionError: If there are fewer places than ranks.
    """
    total = sum(places.values())
    wanted = total if world_size is None else world_size
    if not 1 <= wanted <= total:
        listed = ", ".join(f"{name}:{count}" for name, count in places.items())
        raise OptionError(
            f"-n {wanted} cannot be started on hosts with {total} places ({listed}). Use -n 1 to "
            f"{total}, or more hosts or places in --hosts."
        )
    shares, first = {}, 0
    for name, count in places.items():
        shares[name] = tuple(range(first, min(first + count, wanted)))
        first += count
    return {name: ranks for name, ranks in shares.items() if ranks}


@dataclass(frozen=True, slots=True)
class HostFacts:
    """An agent's report on its host.

    Attributes:
        versions: Installed package -> version; empty where it is there without one.
        gpus: How many the driver shows.
        offset_s: The host's clock minus this machine's, plus or minus half of `round_trip_s`.
        temporary: The host's folder for temporary files, with `free_bytes`.
    """

    hostname: str
    pid: int
    python: str
    executable: str
    versions: Mapping[str, str]
    gpus: int
    cores: int
    clock_s: float
    temporary: str
    free_bytes: int
    offset_s: float = 0.0
    round_trip_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostCheck:
    """The result of a look at a host before a rank was started there.

    Attributes:
        facts: The report of its agent; None for a host that cannot be reached.
        problem: Why it cannot be reached, with a remedy; empty if it can.
    """

    name: str
    facts: HostFacts | None = None
    problem: str = ""


def problems(checks: Sequence[HostCheck], own_versions: Mapping[str, str]) -> list[str]:
    """Reasons why ranks cannot start on these hosts: a sentence each, with a remedy.

    All must have nbdist in this notebook's version, and one version of torch.
    """
    texts, by_torch = [], dict[str, list[str]]()
    for check in checks:
        faults = [check.problem]
        if check.facts is not None:
            faults = _host_problems(check.facts, own_versions)
            if torch := check.facts.versions.get("torch"):
                by_torch.setdefault(torch, []).append(check.name)
        texts += [f"{check.name}: {fault}" for fault in faults]
    if len(by_torch) > 1:
        listed = "; ".join(f"{version} on {', '.join(on)}" for version, on in by_torch.items())
        texts.append(f"The hosts have different versions of torch: {listed}. Install one on all")
    return texts


def _host_problems(facts: HostFacts, own_versions: Mapping[str, str]) -> list[str]:
    pip = f"{facts.executable} -m pip install"
    texts = []
    if tuple(map(int, facts.python.split(".")[:2])) < (3, 11):
        texts.append(
            f"{facts.executable} is Python {facts.python}, and nbdist needs 3.11. Name another "
            "with c.AgentEngineSetLauncher.remote_python in the profile"
        )
    torch = facts.versions.get("torch")
    if torch != "":  # there, of a version that cannot be told
        try:
            check_torch(torch, facts.executable)
        except StartError as error:
            texts.append(str(error))
    nbdist, here = facts.versions.get("nbdist"), own_versions.get("nbdist", "")
    if nbdist is None:
        texts.append(
            f"nbdist is not installed for {facts.executable}. "
            f"Run there: {pip} {f'nbdist=={here}' if here else 'nbdist'}"
        )
    elif nbdist and here and nbdist != here:
        texts.append(
            f"it has nbdist {nbdist}, and the notebook {here}. Run there: {pip} nbdist=={here}"
        )
    if facts.free_bytes < NEEDED_BYTES:
        texts.append(
            f"{facts.temporary} has {facts.free_bytes / 1e6:.0f} MB free, and ranks need "
            f"{NEEDED_BYTES / 1e6:.0f} MB there. Free some space, or set TMPDIR there"
        )
    return texts


def clock_notes(checks: Sequence[HostCheck]) -> list[str]:
    """Hosts whose clock is off by more than a second, beyond what could be measured."""
    return [
        f"The clock of {check.name} is {abs(facts.offset_s):.0f} s "
        f"{'ahead of' if facts.offset_s > 0 else 'behind'} this machine's. Ranks work; times in "
        "logs and checkpoints differ. Set it with NTP (timedatectl set-ntp true)"
        for check in checks
        if (facts := check.facts) is not None
        and abs(facts.offset_s) - facts.round_trip_s / 2 > MOST_CLOCK_S
    ]


def table(checks: Sequence[HostCheck]) -> str:
    """The hosts as lines of text: reachable, Python, nbdist, torch, GPUs, clock."""
    rows: list[tuple[str, ...]] = [
        ("host", "reachable", "Python", "nbdist", "torch", "GPUs", "clock")
    ]
    for check in checks:
        if check.facts is None:
            rows.append((check.name, "no", *[""] * 5))
            continue
        facts = check.facts
        packages = [facts.versions.get(name, "missing") for name in ("nbdist", "torch")]
        clock = f"{facts.offset_s:+.1f} s"
        rows.append((check.name, "yes", facts.python, *packages, str(facts.gpus), clock))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def refuse(checks: Sequence[HostCheck], own_versions: Mapping[str, str]) -> None:
    """Refuse hosts on which ranks cannot start.

    Raises:
        StartError: With the table of hosts, and what to do for each fault.
    """
    texts = problems(checks, own_versions)
    if texts:
        lines = "\n".join(f"- {text}." for text in texts)
        raise StartError(f"Nothing was started.\n{table(checks)}\n{lines}")
