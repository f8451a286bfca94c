"""An ipyparallel cluster that has its settings, log and mark, and has not been started."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from pathlib import Path
from typing import Any

import ipyparallel
from traitlets import TraitError
from traitlets.config import Config

from nbdist.cluster.kernel import ipp_launchers, launcher
from nbdist.core.topology import Topology
from nbdist.errors import OptionError

ENABLE_CURVE = "--IPController.enable_curve=True"
LOOPBACK = frozenset({"", "127.0.0.1", "localhost", "::1"})


def cluster(config: Config, run_dir: Path, log: logging.Logger) -> Any:
    """Ipyparallel's object, with a profile folder of the run's own."""
    unstarted = ipyparallel.Cluster(
        config=config,
        parent=None,
        log=log,
        load_profile=False,
        profile_dir=str(run_dir / "profile"),
        shutdown_atexit=False,
    )
    for name in ("controller_launcher_class", "engine_launcher_class"):
        setattr(unstarted, name, ipp_launchers.watched(getattr(unstarted, name)))
    return unstarted


def logger(run_dir: Path) -> logging.Logger:
    """What ipyparallel has to say goes into a file of the run."""
    log = logging.getLogger(f"nbdist.cluster.{run_dir.name}")
    log.addHandler(logging.FileHandler(run_dir / "cluster.log", delay=True))
    log.propagate = False
    return log


def silence(cluster: Any) -> None:
    """Before the run's folder goes: an end that ipyparallel notices later writes nothing.

    Its log would have no file to go to, and its cluster file would bring the folder back.
    """
    cluster.cluster_file = ""
    cluster.log.disabled = True
    for handler in list(cluster.log.handlers):
        cluster.log.removeHandler(handler)
        handler.close()


def mark(config: Config, run_dir: Path) -> None:
    """Give every process of the run its mark, beside the variables that the profile sets.

    A process that changes its own environment is still found by its session; one that
    leaves its session is still found by this.
    """
    variables = {"NBDIST_RUN": str(run_dir)}
    ipp_launchers.keep_scripts(config, run_dir)
    for name in {"BaseLauncher", *(n for n, section in config.items() if "environment" in section)}:
        config[name].environment = {**config[name].get("environment", {}), **variables}


def gives_ranks(config: Config) -> bool:
    """Whether the profile's launcher gives the ranks itself, on this machine.

    Raises:
        OptionError: If the profile has settings that ipyparallel does not understand.
    """
    return issubclass(launchers(config)[1], launcher.RankEngineSetLauncher)


def launchers(config: Config) -> tuple[type, type]:
    """The classes that start a profile's controller and its engines.

    Raises:
        OptionError: If the profile has settings that ipyparallel does not understand.
    """
    try:
        unstarted = cluster(config, Path(os.devnull), logging.getLogger("nbdist.cluster"))
    except (TraitError, ImportError, KeyError) as error:
        raise OptionError(f"The profile's settings cannot be used: {error}") from error
    return unstarted.controller_launcher_class, unstarted.engine_launcher_class


def installed_version(package: str) -> str | None:
    """The version of a package that local engines will import, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def encrypt(config: Config) -> None:
    """Turn CURVE on where the controller listens beyond this machine.

    ipyparallel signs its messages by default but leaves them readable on the wire.
    """
    if config.Cluster.get("controller_ip", "") in LOOPBACK:
        return
    ipp_launchers.add_controller_args(config, ENABLE_CURVE)


def open_traffic(plan: Topology) -> str:
    """What travels between hosts without authentication; empty on one host."""
    if plan.n_hosts == 1:
        return ""
    return (
        f"Between the {plan.n_hosts} hosts, cells and their output are encrypted; what "
        f"{plan.backend.upper()} and torch's store send is neither encrypted nor authenticated. "
        "Use a network that you trust."
    )
