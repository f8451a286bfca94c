"""Hosts as they are typed, who gets which ranks, and what keeps ranks from a host."""

from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.cluster import hosts
from nbdist.cluster.hosts import Host, HostCheck, HostFacts
from nbdist.errors import OptionError, StartError

FACTS = HostFacts(
    "n1",
    pid=7,
    python="3.12.3",
    executable="/opt/py",
    versions={"torch": "2.13.0", "nbdist": "1.0"},
    gpus=2,
    cores=8,
    clock_s=0.0,
    temporary="/tmp",
    free_bytes=10**9,
)
FIT = HostCheck("n1", FACTS)
OWN = {"nbdist": "1.0"}


def test_hosts_are_typed_or_in_a_file(tmp_path: Path) -> None:
    """Names with places, a user, and Open MPI's form of a file with comments."""
    file = tmp_path / "hosts"
    file.write_text("# ours\nn1 slots=4\nn2   slots = 2  # the old one\n\nn3\n")

    assert hosts.parse_hosts("n1:4, ada@n2.lab:1,n3") == (
        Host("n1", 4),
        Host("ada@n2.lab", 1),
        Host("n3"),
    )
    assert hosts.parse_hosts(str(file)) == (Host("n1", 4), Host("n2", 2), Host("n3"))


@pytest.mark.parametrize(
    "typed",
    [
        "",
        ",",
        "2",
        "2:4",
        "n1:0",
        "n1:x",
        "n1:",
        "-oProxyCommand=reboot",
        "n1;reboot",
        "n 1",
        "n1:2:3",
        "@n1",
    ],
)
def test_what_is_no_host_is_refused_with_the_form(typed: str) -> None:
    """No option of ssh, and nothing that a shell would read, gets through."""
    with pytest.raises(OptionError, match="n1:4,n2:4"):
        hosts.parse_hosts(typed)


def test_a_host_is_named_once() -> None:
    """Which of two numbers of places would count?"""
    with pytest.raises(OptionError, match="n1 occurs 2 times"):
        hosts.parse_hosts("n1:1,n1:2")


def test_places_are_filled_in_order() -> None:
    """All places without a number; with one, the last hosts have fewer, or none."""
    places = {"n1": 2, "n2": 3, "n3": 1}

    assert hosts.share_ranks(places, None) == {"n1": (0, 1), "n2": (2, 3, 4), "n3": (5,)}
    assert hosts.share_ranks(places, 3) == {"n1": (0, 1), "n2": (2,)}
    with pytest.raises(OptionError, match=r"-n 7 .* 6 places \(n1:2, n2:3, n3:1\)"):
        hosts.share_ranks(places, 7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"python": "3.9.2"}, "Python 3.9.2, and nbdist needs 3.11"),
        ({"versions": {"torch": "2.13.0"}}, "nbdist is not installed for /opt/py"),
        ({"versions": {"nbdist": "1.0"}}, "torch is not installed for /opt/py"),
        ({"versions": {"torch": "2.9.1", "nbdist": "1.0"}}, "torch 2.9.1 is too old for nbdist"),
        ({"versions": {"torch": "2.13.0", "nbdist": "0.9"}}, "nbdist 0.9, and the notebook 1.0"),
        ({"free_bytes": 5_000_000}, "/tmp has 5 MB free"),
    ],
)
def test_each_fault_of_a_host_is_told_with_its_mend(change: dict[str, object], words: str) -> None:
    """Nothing is started; the table has every host, the list says what to do."""
    changed = replace(FACTS, **change)  # type: ignore[arg-type]
    with pytest.raises(StartError) as caught:
        hosts.refuse([HostCheck("n1", changed), replace(FIT, name="n2")], OWN)

    text = str(caught.value)
    assert words in text
    assert text.startswith("Nothing was started.\nhost  reachable  Python")
    rows = [line.split() for line in text.splitlines()]
    assert ["n2", "yes", "3.12.3", "1.0", "2.13.0", "2", "+0.0", "s"] in rows


def test_a_host_that_cannot_be_reached_is_told_with_its_mend() -> None:
    """Its row has no facts."""
    lost = HostCheck("n1", problem="Connection refused. Start sshd there")

    assert hosts.problems([lost], OWN) == ["n1: Connection refused. Start sshd there"]
    assert hosts.table([lost]).splitlines()[1].split() == ["n1", "no"]


def test_hosts_have_one_version_of_torch() -> None:
    """The versions are listed with their hosts."""
    other = HostCheck("n2", replace(FACTS, versions={"torch": "2.12.0", "nbdist": "1.0"}))

    assert hosts.problems([FIT, FIT], OWN) == []
    assert hosts.problems([FIT, other], OWN) == [
        "The hosts have different versions of torch: 2.13.0 on n1; 2.12.0 on n2. Install one on all"
    ]


def test_a_clock_is_told_beyond_what_was_measured() -> None:
    """An hour is; three seconds of which two may be the way there are not."""
    checks = [HostCheck("n1", replace(FACTS, offset_s=3600.0, round_trip_s=0.2))]
    unsure = [HostCheck("n1", replace(FACTS, offset_s=-3.0, round_trip_s=4.2))]

    assert "n1 is 3600 s ahead of this machine's" in hosts.clock_notes(checks)[0]
    assert hosts.clock_notes(unsure) == []
