"""Judges the ranks' observations in cells over all ranks, and reports each once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nbdist.cells.kernel.cell_request import CellHook
from nbdist.core.units import is_stored
from nbdist.errors import OptionError
from nbdist.lints import rules
from nbdist.lints.rules import LINTS, Diagnostic, Observation
from nbdist.rpc.kernel.channel import Message
from nbdist.rpc.wire import CELL_RUN, SEEN
from nbdist.switch.report import RankSwitchReport


class Lints(CellHook):
    """Lints of a session: those reported, and those silenced."""

    def __init__(self) -> None:
        """Silent about what NBDIST_SILENCE names."""
        names, self._unknown = rules.parse_silenced(os.environ.get(rules.VARIABLE, ""))
        self._silenced = set(names)
        self._reported: dict[tuple[str, str, int], None] = {}
        # Of cells that run: run -> rank -> what it saw. Written in the client's thread.
        self._observations: dict[int, dict[int, list[Observation]]] = {}

    def before(self, metadata: dict[str, Any]) -> tuple[str, ...]:
        """Listen to a cell that is about to be sent."""
        self._observations[metadata[CELL_RUN]] = {}
        return ()

    def message(self, run_id: int, rank: int, message: Message) -> bool:
        """Keep a rank's lints of a cell; all other messages are somebody else's."""
        if message["header"]["msg_type"] != "display_data":
            return False
        data = message["content"].get("data", ())
        if SEEN not in data:
            return False
        if run_id in self._observations:  # else its cell was given up on
            seen = [Observation(*fields) for fields in data[SEEN]]
            self._observations[run_id].setdefault(rank, []).extend(seen)
        return True

    def during(self, run_id: int) -> tuple[str, ...]:
        """Lines of lints that are told early, once all ranks that are in it have noted them."""
        early = {
            rank: [each for each in seen if LINTS[each.lint].is_early]
            for rank, seen in self._observations.get(run_id, {}).items()
        }
        counts = Counter((each.lint, each.subject) for seen in early.values() for each in seen)
        whole = {
            rank: [each for each in seen if counts[each.lint, each.subject] >= each.facts["of"]]
            for rank, seen in early.items()
        }
        return self.of_ranks(whole)

    def of_ranks(self, observations: Mapping[int, Sequence[Observation]]) -> tuple[str, ...]:
        """Lines of what ranks have seen outside of a cell, or so far."""
        return self._new(rules.evaluate(observations, is_ok=True))

    def after(self, run_id: int, *, is_ok: bool) -> tuple[str, ...]:
        """The lines to print below a cell that has ended, well on all its ranks or not.

        Once for each cell.
        """
        observations = self._observations.pop(run_id, {})
        lines = self._new(rules.evaluate(observations, is_ok=is_ok))
        if observations and self._unknown:
            words, self._unknown = self._unknown, ()
            try:
                rules.resolve_names(words)
            except OptionError as error:
                return (f"{rules.VARIABLE}: {error}", *lines)
        return lines

    def of_switch(self, report: RankSwitchReport) -> RankSwitchReport:
        """A switch, with what there is to say of the effective batch among its notes."""
        if report.batch is None or report.batch[0] == report.batch[1]:
            return report
        before, after, lr = report.batch
        facts = {"before": before, "after": after, "lr": lr}
        observation = Observation("effective-batch", f"{before} {after}", facts)
        observations = {rank: [observation] for rank in range(report.after.world_size)}
        return replace(report, notes=(*report.notes, *self.of_ranks(observations)))

    def silence(self, names: Sequence[str], *, is_on: bool = True) -> None:
        """Report these no more (`all` for all), or again.

        Raises:
            OptionError: There is no such lint; lists those that there are.
        """
        for name in rules.resolve_names(names):
            if is_on:
                self._silenced.add(name)
            else:
                self._silenced.discard(name)
                self._reported = {cause: None for cause in self._reported if cause[0] != name}

    def states(self) -> tuple[tuple[str, str, str], ...]:
        """(name; silenced, reported N times or on; when) of each lint, in order."""
        counts = Counter(name for name, *_ in self._reported)
        states = {n: f"reported {count} time{'s' * (count > 1)}" for n, count in counts.items()}
        states |= dict.fromkeys(self._silenced, "silenced")
        return tuple((name, states.get(name, "on"), lint.when) for name, lint in LINTS.items())

    def _new(self, diagnostics: Sequence[Diagnostic]) -> tuple[str, ...]:
        lines: list[str] = []
        for diagnostic in diagnostics:
            is_unfit = LINTS[diagnostic.lint].is_of_machine and is_stored()
            is_quiet = is_unfit or diagnostic.lint in self._silenced
            if not is_quiet and diagnostic.cause not in self._reported:
                lines += diagnostic.lines
        # Several hits of one cause, of different ranks, come together.
        for diagnostic in diagnostics:
            if diagnostic.lint not in self._silenced:
                self._reported[diagnostic.cause] = None
        return tuple(lines)
