"""The ranks' parallel strategy: which one counts, and switching to another."""

from __future__ import annotations

from collections.abc import Callable

from nbdist.client import answers, progress
from nbdist.client.ranks import Ranks, current_strategy
from nbdist.client.remote import RankFunction
from nbdist.core import strategy
from nbdist.core.ranks import rank_label
from nbdist.core.strategy import Choice
from nbdist.core.strategy_choose import StrategySpec
from nbdist.core.switching import Switched, together
from nbdist.errors import Interrupted, NbdistError, OptionError

CURRENT_S = 30.0
# A large model crosses a slow network.
SWITCH_S = 600.0

switch_strategy: RankFunction[[Choice], Switched] = RankFunction(
    "nbdist.engine.parallel.switch:switch"
)


class Strategies:
    """What ranks prepare models under."""

    def __init__(self, ranks: Ranks, after: Callable[[Switched], Switched] = lambda done: done):
        """Nothing is chosen yet.

        Args:
            ranks: All of them.
            after: Adds to a switch what others have to say of it.
        """
        self._ranks = ranks
        self._after = after

    def current(self) -> Choice:
        """The strategy that counts now, with what the user's own Accelerator has added to it.

        Raises:
            RankGone, RankBusy, NotRunning: As for a cell.
            NbdistError: If ranks have different ones: a switch did not come to its end.
        """
        told = self._ranks.call_all(current_strategy, deadline_s=CURRENT_S)
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
        return self.switch_to(StrategySpec(name, tuple(given.items())).on(self._ranks.topology))

    def switch_to(self, choice: Choice) -> Switched:
        """The same with a choice for these ranks."""
        self._ranks.recover_if_needed()
        self._ranks.strategy_chosen = (
            self._ranks.strategy_chosen or choice
        )  # it may count, however this ends
        try:
            with progress.of_ranks(self._ranks, "switch"):
                told = self._ranks.call_all(
                    switch_strategy, choice, deadline_s=SWITCH_S, is_collective=True
                )
        except KeyboardInterrupt as error:
            raise Interrupted(f"{error}; %dist_strategy says which strategy counts now") from error
        except NbdistError as error:
            if (refused := answers.refusal(error, OptionError)) is not None:
                raise refused from error
            raise
        self._ranks.strategy_chosen = choice
        return self._after(together(told))
