"""Systems: where nbdist runs, and what protection is missing there."""

import pytest

from nbdist.core import versions
from nbdist.errors import StartError


def test_linux_has_everything() -> None:
    """There is nothing to say."""
    assert versions.check_system("linux") == ""


def test_macos_is_told_what_is_missing() -> None:
    """Hangs cannot be aborted there, with the way back; left processes; in two sentences."""
    message = versions.check_system("darwin")

    assert message.startswith("macOS: CPU ranks work. There is less protection than on Linux: ")
    assert "a hung collective is named, but cannot be aborted (%dist_reset " in message
    assert "may outlive a killed kernel" in message
    assert message.count(". ") == 1


def test_elsewhere_the_start_is_refused() -> None:
    """The systems that work are named."""
    with pytest.raises(StartError, match=r"Linux .* macOS .* WSL"):
        versions.check_system("win32")
