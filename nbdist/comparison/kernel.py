"""Runs the same cell under several strategies in turn, and puts everything back."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from nbdist.cluster.kernel.ranks import Ranks
from nbdist.comparison import comparison
from nbdist.comparison.comparison import CellMemory, ComparedRow, Comparison
from nbdist.errors import DistributedError, Interrupted, NbdistError, OptionError
from nbdist.rpc.kernel.functions import RankFunction
from nbdist.strategy.choice import Strategy, described
from nbdist.strategy.choose import StrategySpec
from nbdist.switch.kernel import Strategies
from nbdist.trace import breakdown
from nbdist.trace.trace import Trace, TraceOptions

# A large model is copied to the host, and back.
SAVE_S = 300.0
WATCH_S = 60.0
# How cells.kernel.cell_outcome says that nbdist has refused the cell's model or batch on all ranks.
_REFUSED = re.compile(r"^ranks? [\d,-]+ raised (?:OptionError|NbdistError): (.*)$", re.DOTALL)
_NOT_BACK = (
    "the state from before the comparison was not restored; %dist_strategy shows the current "
    "strategy"
)

save_training_state: RankFunction[[], tuple[str, ...]] = RankFunction(
    "nbdist.switch.rank.saved_state:save_training_state"
)
clear_new_variables: RankFunction[[], None] = RankFunction(
    "nbdist.comparison.rank:clear_new_variables"
)
restore_training_state: RankFunction[[], None] = RankFunction(
    "nbdist.switch.rank.saved_state:restore_training_state"
)
discard_training_state: RankFunction[[], None] = RankFunction(
    "nbdist.comparison.rank:discard_training_state"
)
start_peak_memory: RankFunction[[], None] = RankFunction("nbdist.comparison.rank:start_peak_memory")
peak_memory: RankFunction[[], CellMemory] = RankFunction("nbdist.comparison.rank:peak_memory")


class Cells(Protocol):
    """Runs source on all ranks as a cell."""

    def run(self, code: str) -> object:
        """Run it and wait until it ends."""
        ...

    def profile(self, code: str, options: TraceOptions) -> Trace:
        """Run it and record a trace."""
        ...


class Comparing:
    """A comparison while it runs, with its rows so far.

    Attributes:
        rows: Of the strategies that have run, for a comparison that is ended early.
        restored: A sentence on what was restored; empty until then.
    """

    def __init__(self, ranks: Ranks, strategies: Strategies, cells: Cells, code: str):
        """Take one cell as source; nothing runs yet.

        Raises:
            OptionError: If there is none.
        """
        if not code.strip():
            raise OptionError(
                "There is nothing to compare. Write the training steps below %%dist_compare, or "
                "after two dashes: %dist_compare ddp fsdp -- train(3)"
            )
        self.rows: list[ComparedRow] = []
        self.restored = ""
        self._models: tuple[str, ...] = ()
        self._ranks = ranks
        self._strategies = strategies
        self._cells = cells
        self._code = code

    def run(
        self,
        asked: Sequence[tuple[str, StrategySpec]],
        begins: Callable[[str], None] = lambda _text: None,
    ) -> Comparison:
        """Run the cell twice under each strategy, the second time recorded.

        Each begins with the state of before: weights, optimizers, schedulers, scaler, epochs of
        loaders, random generators. That is put back afterwards as well, however it ends.
        `begins` is called with the text of each before it.

        Raises:
            OptionError: Live models lie in buffers that no strategy can take over.
            DistributedError: The cell failed; the strategies that follow were not run.
            Interrupted: The user interrupted it, likewise.
            RankGone, RankBusy, NotRunning: As for a cell.
            NbdistError: The state of before could not be put back.
        """
        ranks = self._ranks
        before, last = self._strategies.current(), ranks.strategy_chosen
        self._models = self._call(save_training_state, SAVE_S)[0]
        try:
            for text, spec in asked:
                begins(text)
                self.rows.append(self._row(text, spec, before))
        finally:
            ranks.strategy_chosen = last
            for rank in ranks.ranks:
                if ranks.is_connected(rank) and not ranks.is_busy(rank):
                    discard_training_state(ranks.call, rank)
        comparison = Comparison(tuple(self.rows), described(before), self._models)
        self._strategies.compared = comparison
        return comparison

    def _row(self, text: str, spec: StrategySpec, before: Strategy) -> ComparedRow:
        try:
            choice = spec.on(self._ranks.topology)
            self._strategies.switch_to(choice)
        except OptionError as error:  # nothing has changed
            return ComparedRow(text, problem=str(error))
        try:
            return self._measure(text, choice)
        except DistributedError as error:
            refused = _REFUSED.match(str(error))
            if refused is None:
                raise
            return ComparedRow(text, problem=refused[1])
        finally:
            self._restore(before)

    def _measure(self, text: str, choice: Strategy) -> ComparedRow:
        self._call(start_peak_memory, WATCH_S)
        self._cells.run(self._code)
        warm: list[CellMemory] = self._call(peak_memory, WATCH_S)
        if not self._models:  # the next run makes its own
            self._call(clear_new_variables, SAVE_S)
        self._call(start_peak_memory, WATCH_S)
        trace = self._cells.profile(self._code, TraceOptions())
        recorded: list[CellMemory] = self._call(peak_memory, WATCH_S)
        return comparison.row(text, choice, breakdown.breakdown(trace), warm, recorded)

    def _restore(self, before: Strategy) -> None:
        """Restore the state from before the comparison."""
        try:
            self._call(clear_new_variables, SAVE_S)
            self._strategies.switch_to(before)
            self._call(restore_training_state, SAVE_S)
        except KeyboardInterrupt as error:
            raise Interrupted(f"{error}; {_NOT_BACK}") from error
        except NbdistError as error:
            raise NbdistError(f"{error} ({_NOT_BACK})") from error
        self.restored = (
            f"The strategy is {described(before)} again, with the state from before the comparison."
        )

    def _call(self, function: Callable[..., Future[Any]], deadline_s: float) -> list[Any]:
        return self._ranks.call_all(function, deadline_s=deadline_s)
