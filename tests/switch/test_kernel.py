"""A session's strategy: what its ranks are asked, and what is told of failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ipyparallel.error import RemoteError

from nbdist.cluster.kernel import start
from nbdist.cluster.kernel.ranks import Ranks, current_strategy
from nbdist.cluster.kernel.start import StartOptions
from nbdist.errors import Interrupted, NbdistError, OptionError
from nbdist.lints.kernel.lints import Lints
from nbdist.notebook import session
from nbdist.strategy.choice import Strategy
from nbdist.strategy.choose import StrategySpec, choose, default_choice
from nbdist.switch.kernel import Strategies, switch_strategy
from nbdist.switch.report import RankSwitchReport
from tests.cluster.test_view import CPU

Reply = Callable[[Strategy], Any]
DDP, FSDP = default_choice(2), choose("fsdp", {}, 2)


class FakeSession:
    """Two ranks that answer every call with what the test says."""

    def __init__(self, replies: Sequence[Any] = ()):
        self.topology = CPU
        self.strategy_chosen: Strategy | None = None
        self.calls: list[tuple[Any, ...]] = []
        self._replies = list(replies)

    def recover_if_needed(self) -> None:
        self.calls.append(("recover",))

    def call_all(self, function: Callable[..., Any], *args: Any, **_options: Any) -> list[Any]:
        self.calls.append((function, *args))
        reply = self._replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        return cast("list[Any]", reply)


def strategies(*replies: Any) -> tuple[Strategies, FakeSession]:
    session = FakeSession(replies)
    return Strategies(cast(Ranks, session), Lints().of_switch), session


def told(before: Strategy, after: Strategy) -> RankSwitchReport:
    return RankSwitchReport(before, after, ("model",), moved_bytes=10, elapsed_s=0.1)


def from_rank(ename: str, evalue: str) -> NbdistError:
    error = NbdistError(f"rank 0: {evalue}")
    error.__cause__ = RemoteError(ename, evalue, "", None)
    return error


def test_the_ranks_say_what_counts() -> None:
    """A user's own Accelerator may have added to it."""
    added = choose("ddp", {"bf16": True}, 2)
    strategy, ranks = strategies([added] * 2)

    assert (strategy.current(), ranks.strategy_chosen) == (added, None)


def test_a_switch_reaches_all_ranks_after_a_recovery_and_is_told_as_one() -> None:
    """Groups are made whole first; afterwards the ranks are asked for what counts."""
    strategy, ranks = strategies([told(DDP, FSDP)] * 2, [FSDP] * 2)
    done = strategy.switch("fsdp")

    assert (done.moved_bytes, ranks.strategy_chosen) == (10, FSDP)
    assert strategy.current() == FSDP
    assert ranks.calls == [("recover",), (switch_strategy, FSDP),
                             (current_strategy,)]  # fmt: skip


def test_a_wrong_option_asks_no_rank() -> None:
    """What can be refused in the notebook is."""
    strategy, ranks = strategies()
    with pytest.raises(OptionError, match="2 ranks cannot form tp=3"):
        strategy.switch("tp", tp=3)
    with pytest.raises(OptionError, match="no --sdpa cudnn on the CPU"):
        strategy.switch("ddp", sdpa="cudnn")

    assert ranks.calls == []
    assert ranks.strategy_chosen is None


@pytest.mark.parametrize(
    ("remote", "kind", "says"),
    [
        ("OptionError", OptionError, "6 heads cannot be split 4 ways"),
        ("RuntimeError", NbdistError, "rank 0: 6 heads cannot be split 4 ways"),
    ],
)
def test_only_what_ranks_refuse_alike_has_no_rank(
    remote: str, kind: type[NbdistError], says: str
) -> None:
    """An option error of all; another failure names its rank. What counts now is asked."""
    strategy, _ = strategies(from_rank(remote, "6 heads cannot be split 4 ways"), [DDP] * 2)
    with pytest.raises(NbdistError) as caught:
        strategy.switch("tp")

    assert (type(caught.value), str(caught.value)) == (kind, says)
    assert strategy.current() == DDP


def test_an_interrupted_switch_says_how_to_see_what_counts() -> None:
    """It may have come too late to be taken back."""
    strategy, _ = strategies(Interrupted("ranks 0-1 had not answered"))
    says = "had not answered; %dist_strategy shows the current strategy"
    with pytest.raises(Interrupted, match=says):
        strategy.switch("fsdp")


def test_ranks_that_differ_are_told() -> None:
    """One rank that has missed a switch cannot train with the others."""
    strategy, _ = strategies([told(DDP, FSDP)] * 2, [FSDP, DDP])
    strategy.switch("fsdp")
    with pytest.raises(NbdistError, match=r"0: fsdp; 1: ddp.*%dist_reset"):
        strategy.current()


def test_what_was_typed_is_kept_until_the_ranks_are_known() -> None:
    """Nothing typed is None; 0 was typed; the record can be compared and hashed."""
    assert StrategySpec.parse(None, {"tp": None, "bf16": False}) is None
    assert StrategySpec.parse("ddp", {"tp": 0}) == StrategySpec("ddp", (("tp", 0),))
    assert hash(StrategySpec.parse("fsdp", {"tp": 2, "bf16": True})) == hash(
        StrategySpec.parse("fsdp", {"bf16": True, "tp": 2})
    )
    assert StrategySpec("fsdp").on(CPU) == FSDP
    with pytest.raises(OptionError, match="4 ranks cannot form tp=3"):
        StrategySpec("tp", (("tp", 3),)).choose(4)


def test_a_session_knows_what_it_was_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that takes a rank's place is given it."""
    monkeypatch.setattr(start, "start", lambda *_: (None, CPU, ()))
    monkeypatch.setattr(session, "Session", lambda *_, **__: SimpleNamespace(strategy_chosen=None))
    chosen_at_start = [
        session.start(StartOptions(strategy=typed), cast(Any, None), print).session.strategy_chosen
        for typed in (None, StrategySpec("fsdp"))
    ]

    assert chosen_at_start == [None, FSDP]
