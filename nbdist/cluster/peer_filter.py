"""Listening sockets that only the hosts of a group can reach: of others no packet comes through.

torch's store and Gloo listen without a password. Gloo keeps every connection that says nothing it
understands, for ever, and its process ends when it has no descriptors left for the next one
(gloo/transport/tcp/listener.cc). Linux lets any process drop packets of its own sockets by where
they come from, before they are answered: to other hosts the port is not there.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Collection
from dataclasses import dataclass

# linux/filter.h, asm-generic/socket.h; the same on all of Linux's machines that torch runs on.
_SO_ATTACH_FILTER = 26
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALL_BYTES, _NO_BYTES = 0xFFFFFFFF, 0
# Counted from the IPv4 header, wherever it lies (SKF_NET_OFF): the source's address.
_SOURCE = 0xFFF00000 + 12

_restricted: set[int] = set()  # inodes


@dataclass(frozen=True, slots=True)
class OpenPort:
    """A port beyond the loopback at which a process listens.

    Attributes:
        interface: The network interface of the address; empty where it has none, as 0.0.0.0.
        is_restricted: Whether packets of hosts that are not in the group are dropped.
    """

    address: str
    port: int
    interface: str
    is_restricted: bool


def restrict(listener: socket.socket, addresses: Collection[str]) -> bool:
    """Drop what other IPv4 addresses send to a listening socket; whether that is so now.

    A later call replaces the addresses. The socket stays as it was, and False is returned, for
    another family than IPv4, and where the system has no such filter (macOS) or too little room for
    one (some thousand addresses).
    """
    if sys.platform != "linux" or not addresses:
        return False
    if listener.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) != socket.AF_INET:
        return False
    steps = [(_LOAD_WORD, 0, 0, _SOURCE)]
    for address in sorted(addresses):
        # The next step where it is equal, else the one after it.
        steps.append((_JUMP_IF_EQUAL, 0, 1, int(ipaddress.IPv4Address(address))))
        steps.append((_RETURN, 0, 0, _ALL_BYTES))
    steps.append((_RETURN, 0, 0, _NO_BYTES))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError:
        return False
    _restricted.add(os.fstat(listener.fileno()).st_ino)
    return True


def is_restricted(descriptor: int) -> bool:
    """Whether this process has restricted the socket of this descriptor."""
    return os.fstat(descriptor).st_ino in _restricted
