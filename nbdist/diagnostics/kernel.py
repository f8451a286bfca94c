"""Collects the facts for `%dist_doctor`, without torch and without touching a GPU."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from nbdist.cells.kernel import kept_runs
from nbdist.cluster.kernel import launcher, rank_server, run_dir, runs
from nbdist.cluster.kernel.ipp_cluster import installed_version
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core import gpus, topology
from nbdist.core.host import usable_cores
from nbdist.core.topology import HostRanks
from nbdist.core.units import is_made_up
from nbdist.diagnostics import checks
from nbdist.diagnostics.facts import UNLIMITED, Facts, Space
from nbdist.diagnostics.links import RankLinks, read_links
from nbdist.diagnostics.topology import HostLinks, LinkPicture
from nbdist.diagnostics.topology import picture as picture_of
from nbdist.rpc.kernel.functions import RankFunction
from nbdist.strategy.choice import Strategy

# A driver that hangs takes core.gpus.DEADLINE_S of it.
LINKS_S = 30.0

describe_links: RankFunction[[], RankLinks] = RankFunction("nbdist.diagnostics.rank:describe_links")

# Set for each rank anew; what they are is no question.
_NO_SETTINGS = {"NBDIST_RUN", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}


def collect(
    rank_hosts: Sequence[str] | None, debug: str = "off", gpus_typed: str | None = None
) -> Facts:
    """Collect the facts on this machine, with the --debug and --gpus of the ranks that run.

    `rank_hosts` has the host of each rank; None where none run: then ranks are counted as of a
    start without -n.
    """
    readings = gpus.read_once()
    visible = topology.filter_visible(readings.devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    here, cores = socket.gethostname(), usable_cores()
    others = tuple(sorted({*(rank_hosts or ())} - {here}))
    count = topology.default_world_size(visible)
    if rank_hosts is not None:
        count = sum(name == here or is_made_up(name) for name in rank_hosts)
    threads = max(1, cores // max(1, count))
    run_list, variables = runs.find_runs(), {}
    if not others:  # what other hosts' ranks get, their own launcher says
        variables = launcher.local_environment(run_dir.place(), count, threads, debug)
    if gpus_typed is not None:
        variables["CUDA_VISIBLE_DEVICES"] = "" if gpus_typed.lower() == "none" else gpus_typed
    return Facts(
        platform=sys.platform,
        python=platform.python_version(),
        executable=sys.executable,
        packages={name: installed_version(name) for name in checks.OLDEST},
        readings=readings,
        cores=cores,
        available_bytes=psutil.virtual_memory().available,
        world_size=count,
        rank_hosts=others,
        shm=_space(Path("/dev/shm")),  # noqa: S108  # looked at, not written to
        disk=_space(Path(tempfile.gettempdir())),
        limits=_limits(),
        environ=dict(os.environ),
        launched={name: value for name, value in variables.items() if name not in _NO_SETTINGS},
        interfaces=tuple(sorted(psutil.net_if_addrs())),
        why_no_fork=rank_server.why_not(),
        runs=run_list,
        kept=kept_runs.look(run_list),
        now_s=time.time(),
    )


def picture(ranks: Ranks | None, strategy: Strategy | None) -> LinkPicture:
    """The hosts of these ranks and what links them; without ranks, this machine alone.

    Raises:
        RankGone, RankBusy, NotRunning: As for a cell.
    """
    if ranks is None or strategy is None:
        links = read_links(psutil.net_if_addrs(), os.environ, gpus.read_once())
        here = HostRanks(platform.node(), ())
        return LinkPicture((HostLinks(here, (), (links,)),))
    answers = ranks.call_all(describe_links, deadline_s=LINKS_S)
    return picture_of(ranks.topology, answers, strategy)


def _space(path: Path) -> Space | None:
    if not path.is_dir():
        return None
    usage = shutil.disk_usage(path)
    return Space(str(path), usage.free, usage.total)


def _limits() -> dict[str, tuple[int, int]]:
    import resource  # not on Windows, which has to get as far as being told that it is Windows

    numbers = {
        "files": resource.RLIMIT_NOFILE,
        "processes": resource.RLIMIT_NPROC,
        "locked memory": resource.RLIMIT_MEMLOCK,
    }

    def finite(limit: int) -> int:
        return UNLIMITED if limit == resource.RLIM_INFINITY else limit

    both = {name: resource.getrlimit(number) for name, number in numbers.items()}
    return {name: (finite(soft), finite(hard)) for name, (soft, hard) in both.items()}
