"""The network interface that a rank uses: the user's, or the one that leads to rank 0."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbdist.errors import StartError

# Where Gloo and NCCL read which interface they are to use.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

# Interfaces whose addresses lead nowhere from another host, or to that host itself.
INNER_INTERFACE = re.compile(r"docker|virbr|br-|lo[0-9]*$")


@dataclass(frozen=True, slots=True)
class InterfaceChoice:
    """The network interface that a rank uses, and why.

    Attributes:
        gloo, nccl: What GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME hold in the rank's process.
        address: The IPv4 address of Gloo's, of several the first one's; empty without one.
        why: As the end of "eth0, because ...".
    """

    gloo: str
    nccl: str
    address: str
    why: str


def choose_interface(
    host: str,
    interfaces: Mapping[str, bool],
    addresses: Sequence[tuple[str, str]],
    own_address: str,
    store_address: str,
    environ: Mapping[str, str],
) -> InterfaceChoice:
    """The interface through which a rank reaches the store of rank 0, unless the user names one.

    Args:
        host: Its name, for messages.
        interfaces: All of the host, and whether each is up.
        addresses: (interface, IPv4 address) of those that are up.
        own_address: From which packets to the store go by the host's routes; empty without one.
        store_address: Where rank 0's store is; empty where all ranks are on one host.
        environ: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of the user win.

    Raises:
        StartError: If the user's interface for Gloo is not there or not up, or none has the
            address: Gloo would wait for ever, or fail without a word of which there are.
    """
    interface = next((name for name, address in addresses if address == own_address), "")
    typed = {name: environ[name] for name in INTERFACE_VARIABLES if environ.get(name)}
    listed = ", ".join(f"{name} {address}" for name, address in addresses) or "none"
    if INTERFACE_VARIABLES[0] not in typed and not interface:
        goal = f"leads to rank 0's store at {store_address}" if store_address else "is loopback"
        raise StartError(
            f"No interface that is up on {host} {goal}; those with addresses: {listed}. Set "
            f"{INTERFACE_VARIABLES[0]} to one of them where the engines start, or mend the routes."
        )
    gloo = typed.get(INTERFACE_VARIABLES[0], interface)
    # NCCL takes a bare name for the beginning of one: eth1 would be eth10 too.
    nccl = typed.get(INTERFACE_VARIABLES[1], f"={interface or gloo}")
    for name in gloo.split(","):
        if not interfaces.get(name, False):
            state = "is down" if name in interfaces else "does not exist"
            raise StartError(
                f"{INTERFACE_VARIABLES[0]}={gloo}: the interface {name} {state} on {host}; those "
                f"with addresses: {listed}. Set it to one of them where the engines start, "
                "or remove it."
            )
    why = f"the way to rank 0's store at {store_address} goes through it"
    if not store_address:
        why = "all ranks are on one host"
    if typed:
        why = f"{' and '.join(typed)} of the environment {'names' if len(typed) < 2 else 'name'} it"
    first = gloo.split(",")[0]
    address = next((address for name, address in addresses if name == first), "")
    return InterfaceChoice(gloo, nccl, address, why)
