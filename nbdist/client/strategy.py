"""The ranks' parallel strategy: which one counts, and switching to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.client import answers, progress, remote
from nbdist.core import strategy
from nbdist.core.comparison import Comparison
from nbdist.core.ranks import rank_label
from nbdist.core.strategy import Choice
from nbdist.core.switching import Switched, together
from nbdist.core.topology import Topology
from nbdist.errors import Interrupted, NbdistError, OptionError

if TYPE_CHECKING:
    from nbdist.client.session import Session

CURRENT_S = 30.0
# A large model crosses a slow network.
SWITCH_S = 600.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A strategy as it was typed, before it is known how many ranks there will be.

    Attributes:
        name: None where the degrees say it.
        given: Degrees and options by name, in order of the names.
    """

    name: str | None
    given: tuple[tuple[str, object], ...] = ()


def asked(name: str | None, given: Mapping[str, object]) -> Asked | None:
    """What was typed, or None for nothing."""
    typed = [(w, value) for w, value in given.items() if value is not None and value is not False]
    if name is None and not typed:
        return None
    return Asked(name, tuple(sorted(typed)))


def check(one: Asked, world_size: int) -> None:
    """Refuse what cannot be had with so many ranks, wherever they will be.

    Raises:
        OptionError: See core.strategy.choose.
    """
    strategy.choose(one.name, dict(one.given), world_size)


def chosen(one: Asked, topology: Topology) -> Choice:
    """What was typed, for these ranks.

    Raises:
        OptionError: See core.strategy.choose.
    """
    return strategy.choose(
        one.name,
        dict(one.given),
        topology.world_size,
        device_type=topology.ranks[0].device.split(":")[0],
        backend=topology.backend,
    )


class Strategies:
    """What a session's ranks prepare models under.

    Attributes:
        last: What was chosen last, for a process that takes a rank's place; None for nothing yet.
        compared: What strategies came to that were last run side by side (client.comparison).
    """

    def __init__(self, session: Session):
        self.last: Choice | None = None
        self.compared: Comparison | None = None
        self._session = session

    def began_with(self, one: Asked | None) -> None:
        """Note what the ranks were started with."""
        self.last = None if one is None else chosen(one, self._session.topology)

    def current(self) -> Choice:
        """The strategy that counts now, with what the user's own Accelerator has added to it.

        Raises:
            RankGone, RankBusy, NotRunning: As for a cell.
            NbdistError: If ranks have different ones: a switch did not come to its end.
        """
        told = self._session.call_all(remote.current_strategy, deadline_s=CURRENT_S)
        if any(one != told[0] for one in told):
            each = "; ".join(
                f"{rank_label([rank])}: {strategy.label(one)}" for rank, one in enumerate(told)
            )
            raise NbdistError(
                f"The ranks have different strategies ({each}). %dist_reset starts them afresh."
            )
        current: Choice = told[0]
        return current

    def switch(self, name: str | None, /, **given: object) -> Switched:
        """Put the live models under another strategy, or choose it for those to come.

        Args:
            name: Of a row; None where the degrees say it.
            given: Degrees and options: dp=2, tp=2, bf16=True, checkpoint="full".

        Raises:
            OptionError: If it does not exist, or cannot be had with these ranks and models;
                nothing was changed.
            RankGone, RankBusy, NotRunning: As for a cell.
            NbdistError: What a rank raised; what counts now, `current` says.
            Interrupted: If the user interrupted it.
        """
        return self.switch_to(chosen(Asked(name, tuple(given.items())), self._session.topology))

    def switch_to(self, choice: Choice) -> Switched:
        """The same with a choice for these ranks."""
        self._session.upkeep.recover_if_needed()
        self.last = self.last or choice  # it may count, however this ends
        try:
            with progress.of_ranks(self._session, "switch"):
                told = self._session.call_all(
                    remote.switch_strategy, choice, deadline_s=SWITCH_S, is_collective=True
                )
        except KeyboardInterrupt as error:
            raise Interrupted(f"{error}; %dist_strategy says which strategy counts now") from error
        except NbdistError as error:
            if (refused := answers.refusal(error, OptionError)) is not None:
                raise refused from error
            raise
        self.last = choice
        return self._session.lints.of_switch(together(told))
