"""An ipyparallel cluster that has its settings, log and mark, and has not been started."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ipyparallel
from ipyparallel.cluster.launcher import LocalControllerLauncher
from traitlets import TraitError
from traitlets.config import Config

from nbdist.cluster.kernel import ipp_launchers, launcher
from nbdist.cluster.kernel.launchers.rank_set import LOCAL, RankSet
from nbdist.cluster.kernel.run_dir import replace_file
from nbdist.cluster.peer_filter import OpenPort
from nbdist.core import host
from nbdist.core.topology import Topology
from nbdist.errors import OptionError, StartError

# The longest socket name of Linux (108) and macOS, and the part that the controller adds to it.
LONGEST_ADDRESS = 103
SOCKET_NAME_BYTES = len(":12345678")
ENABLE_CURVE = "--IPController.enable_curve=True"
# The controller's options that say where it listens; --ip is short for --IPController.ip.
_LISTENS = re.compile(r"--(?:ip|IPController\.(?:engine_|client_|monitor_)?ip)(?:=(.*))?$")


class _Cluster(ipyparallel.Cluster):  # type: ignore[misc]
    """Ipyparallel's cluster, whose file is whole whenever this kernel is killed."""

    def write_cluster_file(self) -> None:
        """Write down what an attach needs; ipyparallel would do it in place."""
        path = Path(self.cluster_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path.parent, path.name, json.dumps(self.to_dict()).encode())


def cluster(config: Config, run_dir: Path, log: logging.Logger) -> Any:
    """Ipyparallel's object, with a profile folder of the run's own."""
    _name_controller(config)
    unstarted = _Cluster(
        config=config,
        parent=None,
        log=log,
        load_profile=False,
        profile_dir=str(run_dir / "profile"),
        shutdown_atexit=False,
    )
    controller, engines = unstarted.controller_launcher_class, unstarted.engine_launcher_class
    if controller is LocalControllerLauncher:
        controller = launcher.ForkedControllerLauncher
    unstarted.controller_launcher_class = ipp_launchers.watched(controller)
    unstarted.engine_launcher_class = ipp_launchers.rank_set(ipp_launchers.watched(engines))
    return unstarted


def reopen(
    config: Config,
    run_dir: Path,
    log: logging.Logger,
    is_living: Callable[[int], bool],
    *,
    is_distant: bool = False,
) -> Any:
    """The object of a cluster that another kernel has started; in the loop that watches it.

    ipyparallel keeps a file of what it needs for that. Local processes that are not living any more
    are left out of it: their ids may be others' by now. With `is_distant` the controller is another
    machine's.

    Raises:
        StartError: If the file cannot be read, or is another ipyparallel's.
    """
    _name_controller(config)
    try:
        (path,) = (run_dir / "profile" / "security").glob("cluster-*.json")
        state = json.loads(path.read_text())
        for engine_set in state["engines"]["sets"].values():
            local = {n: e for n, e in engine_set.get("engines", {}).items() if "output_file" in e}
            for number in [n for n, engine in local.items() if not is_living(engine["pid"])]:
                del engine_set["engines"][number]
        distant = state.pop("controller") if is_distant else {}
        if not is_living(state.get("controller", {}).get("state", {}).get("pid", 0)):
            state.pop("controller", None)
        for part in (state["engines"], state.get("controller", {})):
            # A class without an entry point is written with a colon, which is not read (9.2).
            part.update({"class": part["class"].replace(":", ".")} if part else {})
        reopened = _Cluster.from_dict(
            state,
            cluster_file=str(path),
            config=config,
            parent=None,
            log=log,
            load_profile=False,
            shutdown_atexit=False,
        )
        if is_distant:
            reopened.controller = ipp_launchers.DistantController.from_dict(
                distant["state"], parent=reopened
            )
            reopened.update_cluster_file()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartError(
            f"What ipyparallel has written down of this cluster in {run_dir} cannot be read "
            f"({type(error).__name__}: {error}). `nbdist stop` ends its ranks."
        ) from error
    return reopened


def _name_controller(config: Config) -> None:
    """Let a controller of this machine be ours, unless the profile names another command."""
    if "controller_cmd" not in config.ControllerLauncher:
        command = [sys.executable, "-P", str(launcher.CONTROLLER_PROGRAM)]
        config.LocalControllerLauncher.setdefault("controller_cmd", command)


def logger(run_dir: Path) -> logging.Logger:
    """The logger of ipyparallel, which writes into a file of the run."""
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


def kind_of(config: Config) -> str:
    """The kind of launcher that starts a profile's ranks, as RankSet has it.

    Raises:
        OptionError: If the profile has settings that ipyparallel does not understand.
    """
    return launchers(config)[1].kind


def launchers(config: Config) -> tuple[type, type[RankSet]]:
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


def listen(config: Config, hosts: Sequence[str] = (), *, is_kept: bool = False) -> None:
    """Let the controller listen where the engines reach it and nowhere else, encrypted.

    That is, for the notebook on the loopback (but see `is_kept`), and for engines on one address:
    the own one toward the first of these hosts that is not this machine, else the one of the
    default route, and only without either on all. A profile that names an address (`controller_ip`,
    or an option in `controller_args`), has engines here alone or a controller elsewhere is left as
    it is. Beyond the loopback CURVE is turned on unless the profile decides on it: ipyparallel
    signs messages but leaves them readable on the wire.

    Args:
        config: The profile's settings, which are changed.
        hosts: Hosts that will have engines, as far as they are known; names or addresses, also
            with `user@`.
        is_kept: Another notebook may take the ranks over, from another host: the controller then
            listens for notebooks where it does for engines.
    """
    args = ipp_launchers.controller_args(config)
    named = [config.Cluster.get("controller_ip", ""), *_bound_addresses(args)]
    if not any(named) and _reaches_out(config):
        names = [name.rpartition("@")[2] for name in hosts]
        named = [host.address_toward(*names, host.ELSEWHERE) or "*"]
        kinds = ("engine", "client") if is_kept else ("engine",)
        args = [*args, *(f"--IPController.{kind}_ip={named[0]}" for kind in kinds)]
    if not all(map(host.is_loopback, named)) and not any("enable_curve" in arg for arg in args):
        args = [*args, ENABLE_CURVE]
    if args:
        config.Cluster.controller_args = args


def _bound_addresses(args: Sequence[str]) -> list[str]:
    """Addresses the controller listens on by its options: `--ip=ADDRESS` or `--ip ADDRESS`.

    An option that is the last has no value, which counts as every address.
    """
    options = [(match, n) for n, arg in enumerate(args) if (match := _LISTENS.match(arg))]
    following = [*args[1:], "*"]
    return [following[n] if match[1] is None else match[1] for match, n in options]


def _reaches_out(config: Config) -> bool:
    """Whether a controller of this machine may have engines on other hosts."""
    controller, engines = launchers(config)
    return issubclass(controller, LocalControllerLauncher) and not engines.is_on_this_machine


def use_folder(config: Config, run_dir: Path) -> None:
    """Let the controller of ranks of this machine listen in the run's folder, not on ports.

    A process that reaches a port can stop it without a key; the folder is this user's alone. A
    profile that says itself where the controller listens, or has another one, is left as it is,
    and so is a folder whose name is too long for a socket's.
    """
    address = f"{run_dir}/c"
    args = ipp_launchers.controller_args(config)
    is_ours = str(launcher.CONTROLLER_PROGRAM) in config.LocalControllerLauncher.controller_cmd
    if (
        kind_of(config) == LOCAL
        and is_ours
        and len(os.fsencode(address)) + SOCKET_NAME_BYTES <= LONGEST_ADDRESS
        and not config.Cluster.get("controller_ip", "")
        and not any(_LISTENS.match(arg) or "transport" in arg or "curve" in arg for arg in args)
    ):
        config.Cluster.controller_args = [
            *args, "--IPController.transport=ipc", f"--IPController.ip={address}"
        ]  # fmt: skip


def open_traffic(plan: Topology, ports: Sequence[OpenPort], *, is_encrypted: bool) -> str:
    """A warning on traffic that others could read or send; empty where no port leads out.

    Args:
        plan: Ranks of more than one host.
        ports: Open ports of all ranks, beyond the loopback.
        is_encrypted: Whether the controller has CURVE.
    """
    if not ports:
        return ""
    without = "signed, but not encrypted, as the profile turns CURVE off"
    counts = Counter(port.address for port in ports)
    addresses = ", ".join(f"{address}: {n}" for address, n in sorted(counts.items()))
    interfaces = ", ".join(sorted({port.interface or "all interfaces" for port in ports}))
    n_open = sum(not port.is_restricted for port in ports)
    reach = f"{n_open} of them open to any host" if n_open else "open to these hosts alone"
    return (
        f"Between the {plan.n_hosts} hosts, cells and their output are "
        f"{'encrypted' if is_encrypted else without}; what {plan.backend.upper()} and torch's "
        f"store send is neither encrypted nor authenticated ({len(ports)} ports on {interfaces}, "
        f"{addresses}; {reach}). Use a network that you trust."
    )
