"""--grace and --debug: what they mean, what is refused, and where they are noticed later."""

from pathlib import Path

import pytest

from nbdist import commands
from nbdist.cluster.kernel import ipp_cluster, launcher, start
from nbdist.cluster.kernel.launchers import rank_set
from nbdist.cluster.kernel.start import StartOptions
from nbdist.commands import cluster
from nbdist.errors import OptionError
from nbdist.notebook import verb


def typed(line: str) -> StartOptions:
    parsed = verb.parse(commands.VERBS["dist_init"], line)
    return cluster.start_options(parsed.values)


def test_defaults() -> None:
    """A deadlock is left alone for 5 s, and torch checks nothing."""
    assert typed("") == StartOptions()
    assert (StartOptions().grace_s, StartOptions().debug) == (5.0, "off")


@pytest.mark.parametrize(
    ("line", "grace_s"), [("--grace 0", 0.0), ("--grace 0.0", 0.0), ("--grace 2.5", 2.5)]
)
def test_grace_is_a_time_and_0_is_at_once(line: str, grace_s: float) -> None:
    """Any time is taken, none as well."""
    assert typed(line).grace_s == grace_s


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "."])
def test_what_is_no_time_is_refused(text: str) -> None:
    """The message has what was typed."""
    with pytest.raises(OptionError, match="grace"):
        typed(f"--grace={text}")


@pytest.mark.parametrize("value", [-1, float("nan"), "5", None])
def test_python_callers_are_refused_too(value: object) -> None:
    """Before anything is started."""
    with pytest.raises(OptionError, match=r"Use 0 \(abort at once\) or more"):
        start.start(StartOptions(2, grace_s=value), print)


@pytest.mark.parametrize("value", ["DETAIL", "on", "", None, []])
def test_other_levels_are_refused_with_the_choices(value: object) -> None:
    """The three levels are listed."""
    with pytest.raises(OptionError, match=r"Choose one of off, info, detail"):
        start.start(StartOptions(2, debug=value), print)


def test_checks_are_for_ranks_that_are_started_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines of another cluster have their environment already: the variable is named."""
    monkeypatch.setattr(ipp_cluster, "kind_of", lambda _config: rank_set.OTHER)
    with pytest.raises(OptionError, match="TORCH_DISTRIBUTED_DEBUG=DETAIL"):
        start.start(StartOptions(2, debug="detail"), print)


def test_levels_are_torchs() -> None:
    """Each level sets torch's variable, and off sets nothing."""
    levels = {
        level: launcher.local_environment(Path("/x"), 1, 1, level).get("TORCH_DISTRIBUTED_DEBUG")
        for level in launcher.DEBUG_LEVELS
    }

    assert levels == {"off": None, "info": "INFO", "detail": "DETAIL"}
