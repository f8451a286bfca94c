"""The table of %dist_doctor, and that of running clusters."""

import time

from nbdist.cluster import run_owner
from nbdist.cluster.run_owner import Run, RunOwner
from nbdist.core.finding import BAD, WARN, Finding
from nbdist.core.host import Machine
from nbdist.core.view import View, verdicts
from nbdist.diagnostics.view import below, running


def test_findings() -> None:
    """Each finding has a row; below stands why and what to do for those that are not well."""
    view = verdicts(
        [
            Finding("torch", "2.13.0"),
            Finding("open files", "1,024", WARN, "too few", "ulimit -n 4096"),
            Finding("system", "win32", BAD, "it does not run there."),
        ],
        before=["removed /tmp/x"],
    )

    assert view.text == (
        "removed /tmp/x\n"
        "1 bad, 1 warn, 1 ok\n"
        "      what        found\n"
        "ok    torch       2.13.0\n"
        "warn  open files  1,024\n"
        "bad   system      win32\n"
        "warn open files: too few; ulimit -n 4096\n"
        "bad system: it does not run there."
    )
    assert view.is_bad
    assert "<table>" in view.html


def test_nothing_to_do() -> None:
    """Where all is well that is said, and nothing is bad."""
    view = verdicts([Finding("torch", "2.13.0")])

    assert view.text.endswith("nothing to do")
    assert not view.is_bad


def test_one_below_the_other() -> None:
    """What is bad in one is bad in both."""
    view = below(View("a", "<a>"), View("b", "<b>", is_bad=True))

    assert view == View("a\n\nb", "<a><b>", is_bad=True)


def test_running() -> None:
    """A cluster has its name, kernel, ranks, hosts, time, state and notebook."""
    since = "2026-11-21 21:00:05"
    since_s = time.mktime(time.strptime(since, "%Y-%m-%d %H:%M:%S"))
    owner = RunOwner(41, "7", Machine("box", "b", "p"), since_s, "/notebooks")
    view = running([Run("/t/run-a", run_owner.RUNNING, owner, ("box", "box"))])

    assert view.text == (
        "run    kernel  ranks  hosts  since                state    notebook\n"
        f"run-a      41      2  box    {since}  running  /notebooks"
    )
    assert running([]).text == "you have no clusters running on this machine"
