"""The ranks' parallel strategy: the current one, and switching to another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nbdist.cells.kernel import progress
from nbdist.cluster.kernel.ranks import Ranks, current_strategy
from nbdist.core.ranks import rank_label
from nbdist.errors import Interrupted, NbdistError, OptionError
from nbdist.rpc.kernel import gather
from nbdist.rpc.kernel.functions import RankFunction
from nbdist.strategy import hosts
from nbdist.strategy.choice import Strategy, label
from nbdist.strategy.choose import StrategySpec
from nbdist.strategy.expert_tokens import ExpertTokens
from nbdist.switch.report import RankSwitchReport, merge_reports

CURRENT_S = 30.0
# A large model crosses a slow network.
SWITCH_S = 600.0

switch_strategy: RankFunction[[Strategy], RankSwitchReport] = RankFunction(
    "nbdist.switch.rank.switch:switch"
)
count_tokens: RankFunction[[], list[tuple[str, dict[str, Any]]]] = RankFunction(
    "nbdist.switch.rank.expert_tokens:count"
)


class Strategies:
    """The current strategy of a session's ranks, and switching it."""

    def __init__(
        self,
        ranks: Ranks,
        after: Callable[[RankSwitchReport], RankSwitchReport] = lambda done: done,
        before: Callable[[Strategy], object] = lambda _choice: None,
    ):
        self._ranks = ranks
        self._before = before  # told of a choice before its switch begins
        self._after = after  # completes a switch's report, for example with lints
        self.compared: Any = None  # the last %dist_compare, which a user may ask for

    def current(self) -> Strategy:
        """The current strategy, with the options that the user's own Accelerator has added.

        Raises:
            RankGone, RankBusy, NotRunning: As for a cell.
            NbdistError: If ranks have different ones: a switch did not come to its end.
        """
        strategies = self._ranks.call_all(current_strategy, deadline_s=CURRENT_S)
        if any(strategy != strategies[0] for strategy in strategies):
            each = "; ".join(
                f"{rank_label([rank])}: {label(strategy)}"
                for rank, strategy in enumerate(strategies)
            )
            raise NbdistError(
                f"The ranks have different strategies ({each}). %dist_reset starts new ranks."
            )
        current: Strategy = strategies[0]
        return current

    def expert_tokens(self) -> dict[str, ExpertTokens]:
        """Tokens of each model's experts in the last cell's training forwards, by its class.

        Raises:
            RankGone, RankBusy, NotRunning: As for a cell.
        """
        counted = self._ranks.call_all(count_tokens, deadline_s=CURRENT_S)
        models: dict[tuple[int, str], dict[int, Any]] = {}
        for rank, of_rank in enumerate(counted):
            for number, (name, counts) in enumerate(of_rank):
                models.setdefault((number, name), {})[rank] = counts
        return {name: ExpertTokens.of(counts) for (_, name), counts in models.items()}

    def switch(self, name: str | None, /, **options: object) -> RankSwitchReport:
        """Put the live models under another strategy, or choose it for those to come.

        Args:
            name: Of a row; None where the degrees say it.
            options: Degrees and options: dp=2, tp=2, bf16=True, checkpoint="full".

        Raises:
            OptionError: If it does not exist, or cannot be had with these ranks and models;
                nothing was changed.
            RankGone, RankBusy, NotRunning: As for a cell.
            NbdistError: What a rank raised; what counts now, `current` says.
            Interrupted: If the user interrupted it.
        """
        return self.switch_spec(StrategySpec(name, tuple(options.items())))

    def switch_spec(self, spec: StrategySpec) -> RankSwitchReport:
        """The same with a strategy as it was typed."""
        return self.switch_to(spec.on(self._ranks.topology))

    def switch_to(self, choice: Strategy) -> RankSwitchReport:
        """The same with a choice for these ranks."""
        self._ranks.recover_if_needed()
        self._before(choice)
        # It may count, however this ends.
        self._ranks.strategy_chosen = self._ranks.strategy_chosen or choice
        try:
            with progress.of_ranks(self._ranks, "switch"):
                reports = self._ranks.call_all(
                    switch_strategy, choice, deadline_s=SWITCH_S, is_collective=True
                )
        except KeyboardInterrupt as error:
            raise Interrupted(f"{error}; %dist_strategy shows the current strategy") from error
        except NbdistError as error:
            if (refused := gather.remote_error_message(error, OptionError)) is not None:
                raise refused from error
            raise
        self._ranks.strategy_chosen = choice
        report = merge_reports(reports)
        notes = hosts.notes(choice, self._ranks.topology.hosts)
        return self._after(replace(report, notes=(*report.notes, *notes)))
