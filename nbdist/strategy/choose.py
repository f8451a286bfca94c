"""Makes a strategy for so many ranks of the typed name, degrees and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from nbdist.core.topology import HostRanks, Topology
from nbdist.errors import OptionError, did_you_mean
from nbdist.strategy import hosts, validate
from nbdist.strategy import options as typed_options
from nbdist.strategy.choice import MESHED, Degrees, Options, Strategy
from nbdist.strategy.degrees import name_for, replicas, resolve
from nbdist.strategy.table import OTHER_NAMES, ROWS, StrategyRow


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """A strategy as it was typed, before it is known how many ranks there will be.

    Attributes:
        name: None where the degrees say it.
        settings: Degrees and options by name, in order of the names.
    """

    name: str | None
    settings: tuple[tuple[str, object], ...] = ()

    @classmethod
    def parse(cls, name: str | None, settings: Mapping[str, object]) -> Self | None:
        """Make a spec of the typed name and settings, or None where nothing was typed."""
        typed = [(word, v) for word, v in settings.items() if v is not None and v is not False]
        return None if name is None and not typed else cls(name, tuple(sorted(typed)))

    def choose(
        self,
        world_size: int,
        *,
        device_type: str = "",
        backend: str = "",
        ranks_on: Sequence[HostRanks] = (),
    ) -> Strategy:
        """The choice for so many ranks; see `choose`."""
        return choose(
            self.name, dict(self.settings), world_size,
            device_type=device_type, backend=backend, ranks_on=ranks_on,
        )  # fmt: skip

    def on(self, topology: Topology) -> Strategy:
        """The choice for these ranks; see `choose`."""
        device_type = topology.ranks[0].device.split(":")[0]
        return self.choose(
            topology.world_size, device_type=device_type, backend=topology.backend,
            ranks_on=topology.hosts,
        )  # fmt: skip


def choose(
    name: str | None,
    settings: Mapping[str, object],
    world_size: int,
    *,
    device_type: str = "",
    backend: str = "",
    ranks_on: Sequence[HostRanks] = (),
) -> Strategy:
    """Make a strategy for so many ranks of the typed name and settings.

    The name is settled by the mesh: `fsdp --tp 2`, `tp --dp 2` and `--dp 2 --tp 2` are equal.

    Args:
        name: Of a row; None where the degrees say it.
        settings: Degrees and options by name (see options.read); None and False stand for
            what was not typed.
        world_size: Ranks.
        device_type: "cpu" or "cuda", to refuse what cannot work there; empty leaves that open.
        backend: "gloo" or "nccl", likewise.
        ranks_on: The hosts: on several, degrees that are not typed keep tp, cp and the copies of
            --shard hybrid within one. None where they are not known.

    Raises:
        OptionError: If a name, degree or option does not exist, does not fit the ranks, or would
            have no effect; the message lists what does.
    """
    degrees, typed = typed_options.read(settings)
    copies = degrees.pop("replicas", None)
    row = _row(name, degrees)
    counts = resolve(row, degrees, world_size, hosts.within(ranks_on))
    is_hybrid = typed.get("shard", "full") == "hybrid"
    if is_hybrid and copies is None and len(ranks_on) > 1 and counts.get("pp", 1) == 1:
        copies = hosts.copies(ranks_on, counts.get("tp", 1))
    mesh = _mesh(row, counts, copies, is_hybrid)
    options = Options(**row.sets, **typed)  # type: ignore[arg-type]  # read has the types
    settled = row.name
    if row.name in MESHED:
        settled = next((word for word in ("pp", "tp") if counts.get(word, 1) > 1), "fsdp")
    choice = Strategy(settled, mesh, world_size, options)
    validate.check(choice, set(typed), device_type, backend)
    return choice


def settings_of(choice: Strategy) -> dict[str, object]:
    """Degrees and options of a choice, as `choose` takes them with its name."""
    degrees, default = choice.degrees, Options(**ROWS[choice.name].sets)  # type: ignore[arg-type]
    values = {name: getattr(choice.options, name) for name in typed_options.OPTIONS}
    options = {name: v for name, v in values.items() if v != getattr(default, name)}
    is_hybrid = degrees.dp_replicate > 1 and degrees.dp_shard > 1
    return degrees.by_word | ({"replicas": degrees.dp_replicate} if is_hybrid else {}) | options


def typed_line(choice: Strategy) -> str:
    """A choice as it is typed for its ranks: `fsdp --tp 8 --bf16`; dp takes what others leave."""
    is_sharded = choice.name == "tp" and choice.degrees.dp > 1
    words = ["fsdp" if is_sharded else choice.name]
    for name, value in settings_of(choice).items():
        option = typed_options.OPTIONS.get(name)
        if name != "dp":
            words.append(typed_options.spell(option, value) if option else f"--{name} {value}")
    return " ".join(words)


def default_choice(world_size: int) -> Strategy:
    """Make the choice that counts where nothing was chosen: ddp, as with Accelerate."""
    return choose("ddp", {}, world_size)


def _row(name: str | None, degrees: Mapping[str, int]) -> StrategyRow:
    if name is None and not degrees:
        raise OptionError(f"No strategy was given. Choose one of {', '.join(ROWS)}.")
    wanted = name_for(degrees) if name is None else name
    if wanted in ROWS:
        return ROWS[wanted]
    equivalent = OTHER_NAMES.get(wanted.lower())
    hint = f" Use {equivalent}." if equivalent else did_you_mean(wanted, ROWS)
    raise OptionError(f"There is no strategy {wanted!r}.{hint} Choose one of {', '.join(ROWS)}.")


def _mesh(
    row: StrategyRow, counts: Mapping[str, int], copies: int | None, is_hybrid: bool
) -> Degrees:
    dp = counts.get("dp", 1)
    split = {word: counts.get(word, 1) for word in ("pp", "cp", "tp", "ep")}
    if row.name not in MESHED | {"fsdp1"}:
        if copies is not None:
            raise OptionError(f"--replicas goes with fsdp --shard hybrid, not with {row.name}.")
        axis = row.axis if row.axis.startswith("dp_") else "dp_replicate"
        return Degrees(**split, **{axis: dp})
    if is_hybrid and split["ep"] > 1:
        raise OptionError(
            f"--shard hybrid and --ep {split['ep']} cannot be combined yet. Use --shard full."
        )
    if is_hybrid:
        copies = replicas(copies, dp)
        return Degrees(**split, dp_replicate=copies, dp_shard=dp // copies)
    if copies is not None:
        raise OptionError(
            "--replicas says how many copies --shard hybrid keeps; with --shard full there is one. "
            "Type both, or neither."
        )
    return Degrees(**split, dp_shard=dp)
