"""What is done, and what has to be said, when ranks are on other hosts."""

from __future__ import annotations

from traitlets.config import Config

from nbdist.core.topology import Topology

ENABLE_CURVE = "--IPController.enable_curve=True"
LOOPBACK = frozenset({"", "127.0.0.1", "localhost", "::1"})


def encrypt(config: Config) -> None:
    """Turn CURVE on where the controller listens beyond this machine.

    ipyparallel signs its messages by default but leaves them readable on the wire.
    """
    if config.Cluster.get("controller_ip", "") in LOOPBACK:
        return
    args = config.Cluster.get("controller_args", [])
    if not isinstance(args, list):
        args = args.get_value([])  # the profile has only appended to the default
    if not any("enable_curve" in argument for argument in args):
        config.Cluster.controller_args = [*args, ENABLE_CURVE]


def warning(plan: Topology) -> str:
    """What travels between hosts without authentication; empty on one host."""
    if plan.n_hosts == 1:
        return ""
    return (
        f"Between the {plan.n_hosts} hosts, cells and their output are encrypted; what "
        f"{plan.backend.upper()} and torch's store send is neither encrypted nor authenticated. "
        "Use a network that you trust."
    )
