"""Small facts as text: sizes, times, placeholders, versions, shared memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.cluster import shm
from nbdist.cluster.kernel.launchers.pretended import PretendedHostSetLauncher
from nbdist.core import units, versions
from nbdist.core.topology import check_ranks_torch
from nbdist.core.units import MARK, compared, is_stored, shown, shown_host
from nbdist.errors import StartError

MIB = 1024 * 1024


# Placeholders


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ("1", [f"{MARK}{text}{MARK}" for text in ("12", "vm", "None")]),
        *((value, ["12", "vm", "None"]) for value in ("", "0", "true", None)),
    ],
)
def test_shown(monkeypatch: pytest.MonkeyPatch, value: str | None, texts: list[str]) -> None:
    """A value is its text; with NBDIST_TEST=1 alone it has marks."""
    if value is not None:
        monkeypatch.setenv("NBDIST_TEST", value)

    assert [shown(12), shown("vm"), shown(None)] == texts
    assert is_stored() is (value == "1")


def test_pretended_hosts_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that the notebook has made up is the same on every machine; others are not."""
    monkeypatch.setenv("NBDIST_TEST", "1")
    monkeypatch.setattr("nbdist.core.units._made_up_hosts", set())
    PretendedHostSetLauncher(profile_dir=".").command("a")

    assert [*map(compared, [shown_host("a"), shown_host("vm")])] == ["a", "#"]


# Units


@pytest.mark.parametrize(
    ("value_bytes", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),  # and not 1000.0 kB
        (223_456_789, "223.5 MB"),
        (999_999_999, "1.0 GB"),
        (1.5e12, "1500.0 GB"),
    ],
)
def test_size(monkeypatch: pytest.MonkeyPatch, value_bytes: float, expected: str) -> None:
    """Decimal, with one digit; not even the unit, which may differ, is compared."""
    assert units.size(value_bytes) == expected

    monkeypatch.setenv("NBDIST_TEST", "1")
    assert compared(units.size(value_bytes)) == "#"
    assert units.exact_size(value_bytes) == expected
    assert compared(units.seconds(value_bytes)) == "# s"


# Versions


NEW_ENOUGH = ["2.11", "2.13.0+cpu", "2.100.1", "3.0", "2.11.0a0", "2.16.0.dev20261120+cu130"]


@pytest.mark.parametrize("version", NEW_ENOUGH)
def test_new_enough_torch(version: str) -> None:
    """Versions are compared as numbers: 2.11 and 2.100 are newer than 2.9."""
    versions.check_torch(version, "/venv/bin/python")


def test_a_torch_is_known_without_importing_it(tmp_path: Path) -> None:
    """The first on the path counts, by its own file; what pip notes can be of another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/__init__.py").touch()
        (tmp_path / "torch/version.py").write_text("__all__ = []\n__version__ = '2.9.1+cu128'\n")
        version, folder = versions.torch_on_path()
    second = versions.second_torch(version, folder, "2.13.0+cpu")

    assert (version, folder) == ("2.9.1+cu128", str(tmp_path / "torch"))
    assert second.startswith(
        "Two versions of torch are on the path: ranks import 2.9.1+cu128 from "
    )
    assert versions.second_torch("2.15.0+cu132", folder, "2.15.0") == ""
    with pytest.raises(StartError, match=r"2\.9\.1\+cu128 is too old .* pip knows 2\.13\.0\+cpu"):
        versions.check_torch(version, "/venv/bin/python", second)


def test_ranks_have_one_torch() -> None:
    """Who has which is told; a build's tag is no version, and one that is not known is none."""
    check_ranks_torch([("2.15.0", "py", "a"), ("2.15.0+cu132", "py", "b"), ("", "py", "c")])
    found = [(v, "/bin/python", h) for v, h in (("2.13.0", "a"), ("2.15.0", "b"), ("2.13.0", "a"))]
    with pytest.raises(StartError) as caught:
        check_ranks_torch(found)
    with pytest.raises(StartError, match=r"torch 2\.10\.0 is too old .*/bin/python -m pip install"):
        check_ranks_torch([("2.10.0", "/bin/python", "a")])

    assert str(caught.value) == (
        "The ranks have different versions of torch: 2.13.0 on ranks 0,2 (a); 2.15.0 on rank 1 "
        "(b). Install one on all."
    )


def test_enough_shared_memory() -> None:
    """Where there is plenty, or what is needed to the byte, there is nothing to say."""
    assert shm.check(8000 * MIB, 8192 * MIB, 8, uses_nccl=True) == ""
    assert shm.check(65 * MIB, 65 * MIB, 2, uses_nccl=False) == ""
    assert shm.check(64 * MIB, 1000 * MIB, 2, uses_nccl=True) == ""


@pytest.mark.parametrize(
    ("world_size", "free", "uses_nccl", "needs"),
    [
        (2, 7, False, "2 ranks need 8 MiB"),
        (3, 64, True, "3 ranks need 96 MiB"),
        (1, 3, False, "1 rank needs 4 MiB"),
    ],
)
def test_too_little_shared_memory(world_size: int, free: int, uses_nccl: bool, needs: str) -> None:
    """Refused: 4 MiB for each rank are needed, and 32 with NCCL; fewer than one is no advice."""
    with pytest.raises(StartError) as caught:
        shm.check(free * MIB, 64 * MIB, world_size, uses_nccl=uses_nccl)

    assert str(caught.value).startswith(f"/dev/shm has {free} MiB free of 64; {needs}. ")
    assert str(caught.value).endswith("or start fewer ranks (-n).") is (world_size > 1)


@pytest.mark.parametrize("version", ["2.10.1+cu128", "2.9", "1.13.1", "2", None])
def test_no_torch_or_an_old_one(version: str | None) -> None:
    """Refused with the Python, both versions and the command that helps."""
    sentence = f"torch {version} is too old for nbdist, which needs 2.11. "
    missing = "torch is not installed for /venv/bin/python. "
    with pytest.raises(StartError) as caught:
        versions.check_torch(version, "/venv/bin/python")

    assert str(caught.value) == (
        (sentence if version else missing)
        + "Install it with: /venv/bin/python -m pip install 'torch>=2.11'"
    )


def test_systems() -> None:
    """Linux is fine, macOS gets a note in two sentences, all else is refused with what works."""
    message = versions.check_system("darwin")
    with pytest.raises(StartError, match=r"does not run on 'win32'.*Linux.*macOS.*WSL: wsl --inst"):
        versions.check_system("win32")

    assert versions.check_system("linux") == ""
    assert message.startswith("macOS: CPU ranks work. There is less protection than on Linux: ")
    assert "a hung collective is named, but cannot be aborted (%dist_reset " in message
    assert "may outlive a killed kernel" in message
    assert message.count(". ") == 1


# Shared memory


def test_small_shared_memory_is_told() -> None:
    """Docker's default of 64 MiB is enough to start with, and is warned about."""
    text = shm.check(64 * MIB, 64 * MIB, 2, uses_nccl=False)

    assert text.startswith("/dev/shm has only 64 MiB: DataLoader workers will fail")
    assert "--shm-size" in text
    assert "num_workers=0" in text


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (units.seconds, 0.0, "0.0 s"),
        (units.seconds, 2.06, "2.1 s"),
        (units.seconds, 0.04, "0.0 s"),
        (units.seconds, 3600.0, "3600.0 s"),
        (units.duration, 0, "0 ns"),
        (units.duration, 999, "999 ns"),
        (units.duration, 999.96, "1.0 us"),
        (units.duration, 1000, "1.0 us"),
        (units.duration, 1_234_567, "1.2 ms"),
        (units.duration, 999_960_000, "1.0 s"),
        (units.duration, 90_000_000_000, "90.0 s"),
    ],
)
def test_times(function: Callable[[float], str], value: float, text: str) -> None:
    """Seconds with one decimal; nanoseconds in the largest unit of which there is one."""
    assert function(value) == text
