"""What lints make of what ranks saw: when they speak, when they are silent, and how often."""

from typing import Any

import pytest

from nbdist.errors import OptionError
from nbdist.lints import rules
from nbdist.lints.kernel.lints import Lints
from nbdist.lints.rules import LINTS, Observation
from nbdist.rpc.wire import CELL_RUN, SEEN
from tests.support import lint_page

A, B, C = "a" * 16, "b" * 16, "c" * 16
BOTH = [0, 1]


def same(*digests: str, peers: list[int] | None = None) -> Observation:
    return Observation("same-data", "loader", {"digests": list(digests), "peers": peers or BOTH})


def apart(digest: str, ranks: list[int] | None = None) -> Observation:
    return Observation("parameters-apart", "model", {"digest": digest, "ranks": ranks or BOTH})


def workers(count: int, cores: int = 8, host: str = "h") -> Observation:
    return Observation("workers", "w", {"workers": count, "cores": cores, "host": host})


def since(*digests: str) -> Observation:
    steps = [10 * (n + 1) for n in range(len(digests))]
    facts = {"ranks": BOTH, "steps": steps, "digests": list(digests), "every": 10}
    return Observation("apart-since", "model", facts)


def shortage(needed: float, free: float = 1e9, subject: str = "net under ddp") -> Observation:
    facts = {"needed": needed, "free": free, "counted": "all", "change": "Instead, fsdp.", "of": 2}
    return Observation("memory-shortage", subject, facts)


def hits(
    *observations: Observation | list[Observation], is_ok: bool = True
) -> list[tuple[str, tuple[int, ...]]]:
    by_rank = {
        r: observed if isinstance(observed, list) else [observed]
        for r, observed in enumerate(observations)
    }
    return [(finding.lint, finding.hit.ranks) for finding in rules.evaluate(by_rank, is_ok=is_ok)]


@pytest.mark.parametrize(
    ("observations", "ranks"),
    [
        ([same(A, B), same(A, B)], [(0, 1)]),
        ([same(A, B, C), same(A, B)], [(0, 1)]),  # a rank that has looked at fewer
        ([same(A, B), same(A, C)], []),
        ([same(A), same(A)], []),  # one batch can be equal by chance
        ([same(A, A), same(A, A)], []),  # a constant dataset
        ([same(A, B, peers=[0]), same(A, B, peers=[1])], []),  # tp: they must see the same
        # dp 2 x tp 2 whose loaders are all alike: each pair of dp is one.
        ([same(A, B, peers=peers) for peers in ([0, 2], [1, 3]) * 2], [(0, 2), (1, 3)]),
    ],
)
def test_the_same_data(observations: list[Observation], ranks: list[tuple[int, ...]]) -> None:
    """Only for ranks along the data-parallel axes, from two different batches on."""
    assert hits(*observations) == [("same-data", members) for members in ranks]


def test_parameters_that_are_apart() -> None:
    """Within a model's group, and not where a rank failed: there that is told otherwise."""
    assert hits(apart(A), apart(B)) == [("parameters-apart", (0, 1))]
    assert hits(apart(A), apart(A)) == []
    assert hits(apart(A), apart(B), is_ok=False) == []
    assert hits(apart(A, [0]), apart(B, [1])) == []


def test_workers_of_one_host_are_added_up() -> None:
    """More than its cores; another host has its own."""
    assert hits(workers(5), workers(4)) == [("workers", (0, 1))]
    assert hits(workers(4), workers(4)) == []
    assert hits(workers(5), workers(5, host="other")) == []


def test_the_first_look_that_differs_is_named() -> None:
    """And the lint that says less is left out."""
    observations = {0: [since(A, B, C), apart(A)], 1: [since(A, C, A), apart(B)]}
    (diagnostic,) = rules.evaluate(observations, is_ok=True)

    assert diagnostic.lint == "apart-since"
    assert "before step 20 of its optimizer, the parameters of model" in diagnostic.hit.found
    assert hits(since(A, B), since(A, B)) == []


def test_ranks_with_the_same_sentence_are_one_hit() -> None:
    """Different ones are told each."""
    four, two = (
        Observation("loss-not-divided", "line 3: loss.backward()", {"place": "line 3", "count": n})
        for n in (4, 2)
    )

    assert hits(four, four) == [("loss-not-divided", (0, 1))]
    assert hits(four, two) == [("loss-not-divided", (0,)), ("loss-not-divided", (1,))]


def test_every_lint_says_what_to_do_and_how_to_hear_no_more() -> None:
    """Two lines: what and where; why, what to do, how to silence it."""
    (diagnostic,) = rules.evaluate({0: [same(A, B)], 1: [same(A, B)]}, is_ok=True)
    first, second = diagnostic.lines

    assert first == (
        "lint same-data [0-1]: loader gave ranks 0-1 the same batches (the first 2 were compared)"
    )
    assert second.startswith("  each gradient is computed twice")
    assert second.endswith("(silence: %dist_check --silence same-data)")
    assert all(row.why and row.do and row.when for row in LINTS.values())


@pytest.mark.parametrize("name", LINTS)
def test_the_example_of_a_lint_is_one_hit(name: str) -> None:
    """On all the ranks that it is about, as docs/lints.md shows it."""
    subject, facts = LINTS[name].example

    (hit,) = LINTS[name].judge(subject, facts)

    assert hit.ranks == tuple(facts)


def test_the_page_has_the_lints_as_they_are() -> None:
    """docs/lints.md is made from them."""
    page = lint_page.PAGE.read_text(encoding="utf-8")

    assert lint_page.render(page) == page, f"out of date: {lint_page.COMMAND}"


def test_names_that_do_not_exist_are_refused() -> None:
    """With the list of those that do; `all` is all."""
    message = r"no lint 'data'\. Did you mean same-data\? Choose one of same-data, sharded-twice"
    with pytest.raises(OptionError, match=message):
        rules.resolve_names(["data"])
    assert rules.resolve_names(["all"]) == tuple(LINTS)


def message(data: Any) -> Any:
    """Raw, with this data displayed."""
    return {"header": {"msg_type": "display_data"}, "content": {"data": data}}


def test_a_shortage_is_of_the_ranks_that_have_too_little() -> None:
    """The number is that of the one that lacks most; enough is no hit."""
    assert hits(shortage(2e9), shortage(2e9)) == [("memory-shortage", (0, 1))]
    assert hits(shortage(2e9, 3e9), shortage(2e9)) == [("memory-shortage", (1,))]
    assert hits(shortage(1e9), shortage(1e9)) == []
    findings = rules.evaluate({0: [shortage(2e9, 1.5e9)], 1: [shortage(2e9)]}, is_ok=False)
    assert findings[0].hit.found == (
        "net under ddp needs 2.0 GB on each rank (all), and rank 1 has 1.0 GB free for it. "
        "Instead, fsdp"
    )


class TestEarly:
    @staticmethod
    def see(session: Lints, rank: int, observation: Observation) -> tuple[str, ...]:
        """What is told as soon as a rank has noted this in cell 1."""
        seen = [observation.lint, observation.subject, dict(observation.facts)]
        assert session.message(1, rank, message({SEEN: [seen]}))
        return session.during(1)

    def test_it_is_told_while_the_cell_runs_once_all_have_it(self) -> None:
        """And not again at the cell's end; what is no early lint waits for that."""
        session = Lints()
        session.before({CELL_RUN: 1})

        assert self.see(session, 0, shortage(2e9)) == ()
        assert self.see(session, 1, apart(A)) == ()
        first, second = self.see(session, 1, shortage(2e9))
        assert first.startswith("lint memory-shortage [0-1]: net under ddp needs 2.0 GB")
        assert "%dist_check --silence memory-shortage" in second
        assert self.see(session, 0, apart(B)) == ()
        assert len(session.after(1, is_ok=True)) == 2
        assert session.during(1) == ()

    def test_a_rank_that_died_before_it_could_tell(self) -> None:
        """Then the end of the cell tells it of those that have."""
        session = Lints()
        session.before({CELL_RUN: 1})

        assert self.see(session, 0, shortage(2e9)) == ()
        assert session.after(1, is_ok=False)[0].startswith("lint memory-shortage [0]: ")

    def test_silenced_and_stored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By name, and where outputs are compared on other machines."""
        monkeypatch.setenv("NBDIST_SILENCE", "memory-shortage")
        both = {0: [shortage(2e9)], 1: [shortage(2e9)]}
        assert Lints().of_ranks(both) == ()
        monkeypatch.delenv("NBDIST_SILENCE")
        assert len(Lints().of_ranks(both)) == 2
        monkeypatch.setenv("NBDIST_TEST", "1")
        assert Lints().of_ranks(both) == ()


class TestOnce:
    @staticmethod
    def cell(session: Lints, run: int, *observations: Observation) -> tuple[str, ...]:
        """The lines of a cell in which each rank saw this."""
        session.before({CELL_RUN: run})
        for rank, observation in enumerate(observations):
            data: Any = {SEEN: [[observation.lint, observation.subject, dict(observation.facts)]]}
            assert session.message(run, rank, message(data))
        return session.after(run, is_ok=True)

    def test_a_cause_is_told_once_and_another_one_again(self) -> None:
        """The same model, then another."""
        session = Lints()
        other = [Observation("parameters-apart", "net", apart(d).facts) for d in (A, B)]

        assert len(self.cell(session, 1, apart(A), apart(B))) == 2
        assert self.cell(session, 2, apart(A), apart(B)) == ()
        assert len(self.cell(session, 3, *other)) == 2
        assert ("parameters-apart", "reported 2 times") in {state[:2] for state in session.states()}

    def test_silence_and_tell(self) -> None:
        """A silenced one is told once it is wanted again, and so is one that was told before."""
        session = Lints()
        session.silence(["parameters-apart"])

        assert self.cell(session, 1, apart(A), apart(B)) == ()
        session.silence(["all"], is_on=False)
        assert len(self.cell(session, 2, apart(A), apart(B))) == 2
        session.silence(["all"], is_on=False)
        assert len(self.cell(session, 3, apart(A), apart(B))) == 2

    def test_the_environment_silences(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A name that is none is told once."""
        monkeypatch.setenv("NBDIST_SILENCE", "parameters-apart, nope")
        session = Lints()
        lines = self.cell(session, 1, apart(A), apart(B))

        assert len(lines) == 1
        assert lines[0].startswith("NBDIST_SILENCE: There is no lint 'nope'. Choose one of")
        assert self.cell(session, 2, apart(A), apart(B)) == ()
        assert dict(state[:2] for state in session.states())["parameters-apart"] == "silenced"

    def test_stored_outputs_do_not_depend_on_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Notebooks are compared on any machine."""
        monkeypatch.setenv("NBDIST_TEST", "1")

        assert self.cell(Lints(), 1, workers(9), workers(9)) == ()

    def test_other_messages_go_on_and_late_ones_are_dropped(self) -> None:
        """What is not a lint is the cell's output; a cell that was given up on tells nothing."""
        session = Lints()
        session.before({CELL_RUN: 1})
        stream: Any = {"header": {"msg_type": "stream"}, "content": {"text": "x"}}

        assert not session.message(1, 0, stream)
        assert not session.message(1, 0, message({"text/plain": "x"}))
        session.after(1, is_ok=True)
        assert session.message(1, 0, message({SEEN: []}))
        assert session._observations == {}
