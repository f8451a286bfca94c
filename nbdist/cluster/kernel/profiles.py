"""Finds profiles (kinds of cluster): the user's own first, then the shipped ones."""

from __future__ import annotations

import os
from pathlib import Path

from IPython.paths import get_ipython_dir
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

from nbdist.core.units import shown
from nbdist.errors import OptionError, did_you_mean

CONFIG_FILE = "ipcluster_config.py"


def shipped_profiles() -> dict[str, Path]:
    """Name -> folder of the profiles that come with nbdist.

    A wheel carries them inside the package; a checkout has them beside it.
    """
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "profiles", package.parent / "profiles"):
        folders = {path.parent.name: path.parent for path in folder.glob(f"*/{CONFIG_FILE}")}
        if folders:
            return folders
    return {}


def user_profiles() -> dict[str, Path]:
    """Name -> folder of the user's IPython profiles that describe a cluster."""
    return {
        path.parent.name.removeprefix("profile_"): path.parent
        for path in Path(get_ipython_dir()).glob(f"profile_*/{CONFIG_FILE}")
    }


def available() -> dict[str, Path]:
    """Name -> folder of every profile; the user's own wins over a shipped one."""
    return {**shipped_profiles(), **user_profiles()}


def place(name: str) -> str:
    """Line with the path of a profile's file, for the user who starts ranks by it."""
    path = str(available()[name] / CONFIG_FILE)
    return f"Profile {name}: {shown(min(path, os.path.relpath(path), key=len))}"


def load(name: str) -> Config:
    """The settings of a profile.

    ipyparallel would silently make an empty profile for an unknown name and start
    local engines; this refuses instead.

    Raises:
        OptionError: If there is no such profile, or its file cannot be read.
    """
    profiles = available()
    if name not in profiles:
        ours = ", ".join(sorted(shipped_profiles()))
        mine = ", ".join(sorted(user_profiles())) or "none"
        raise OptionError(
            f"There is no profile {name!r}.{did_you_mean(name, profiles)} Shipped with nbdist: "
            f"{ours}. Your own, in {get_ipython_dir()}: {mine}. A profile is a folder "
            f"profile_{name} there with an {CONFIG_FILE}."
        )
    try:
        config: Config = PyFileConfigLoader(CONFIG_FILE, path=str(profiles[name])).load_config()
    except Exception as error:
        raise OptionError(
            f"The profile {name!r} ({profiles[name] / CONFIG_FILE}) cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from error
    return config
