"""Is what is installed new enough, and does nbdist run on this system."""

from __future__ import annotations

import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from nbdist.errors import StartError

# The same as in pyproject.toml.
VERSION = "0.1.0"
OLDEST_TORCH = (2, 11)


def release(version: str) -> tuple[int, ...]:
    """Major and minor number of a version such as 2.13.0+cpu or 2.16.0.dev20261101."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def torch_on_path() -> tuple[str | None, str]:
    """(its version, its folder) of the torch that a process here imports; (None, "") without one.

    Without importing it, and by its own file: pip's note can be of another one on the path.
    """
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, ""
    folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    return (match.group(1) if match else None), str(folder)


def second_torch(imported: str | None, folder: str, noted: str | None) -> str:
    """Advice on two torches on the path: the one imported, and the one that pip knows.

    Empty where they are one. A build's tag (+cpu) need not be in both.
    """
    if not imported or not noted or imported.split("+")[0] == noted.split("+")[0]:
        return ""
    return (
        f"Two versions of torch are on the path: ranks import {imported} from {folder}, and pip "
        f"knows {noted}. Take one away: from PYTHONPATH, or with {sys.executable} -m pip uninstall "
        "torch"
    )


def without_distributed(version: str, where: str) -> str:
    """Message on a torch that was built without torch.distributed."""
    return (
        f"torch {version} of {where} was built without torch.distributed, which nbdist needs. "
        f"Install another build: {where} -m pip install --force-reinstall torch"
    )


def check_torch(version: str | None, where: str, remedy: str = "") -> None:
    """Refuse a torch that is missing (None) or older than OLDEST_TORCH.

    `where` is the Python that it is for; the remedy is to install a newer one, if none is given.

    Raises:
        StartError: With the remedy.
    """
    needed = ".".join(map(str, OLDEST_TORCH))
    remedy = remedy or f"Install it with: {where} -m pip install 'torch>={needed}'"
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
