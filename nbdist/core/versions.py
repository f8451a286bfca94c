"""Is what is installed new enough, and does nbdist run on this system."""

from __future__ import annotations

import re

from nbdist.errors import StartError

# The same as in pyproject.toml.
VERSION = "0.1.0"
OLDEST_TORCH = (2, 11)


def release(version: str) -> tuple[int, ...]:
    """Major and minor number of a version such as 2.13.0+cpu or 2.16.0.dev20261101."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check_torch(version: str | None, where: str) -> None:
    """Refuse a torch that is missing (None) or older than OLDEST_TORCH.

    `where` is the Python that it is for.

    Raises:
        StartError: With the command that installs a newer one.
    """
    needed = ".".join(map(str, OLDEST_TORCH))
    remedy = f"Install it with: {where} -m pip install 'torch>={needed}'"
    if version is None:
        raise StartError(f"torch is not installed for {where}. {remedy}")
    if release(version) < OLDEST_TORCH:
        raise StartError(f"torch {version} is too old for nbdist, which needs {needed}. {remedy}")


def check_system(platform: str) -> str:
    """A note for systems (sys.platform) with less protection, empty on Linux.

    Raises:
        StartError: Anywhere else.
    """
    if platform == "linux":
        return ""
    if platform == "darwin":
        return (
            "macOS: CPU ranks work. There is less protection than on Linux: a hung collective is "
            "named, but cannot be aborted (%dist_reset ends the ranks and starts new ones), and "
            "processes that your cells start may outlive a killed kernel."
        )
    raise StartError(
        f"nbdist does not run on {platform!r}. It runs on Linux (CPU and GPU) and on macOS (CPU "
        "ranks, less protection). On Windows use WSL: wsl --install, then install nbdist there."
    )
