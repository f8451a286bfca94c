"""What a host that has no key tries on the ports of a cluster: `python -m tests.support.attacks`.

Reads one JSON object (`Attack`'s fields) from stdin and writes what was answered as another.
"""

import contextlib
import dataclasses
import itertools
import json
import random
import select
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

ANSWER_S = 1.0  # on the switch of one machine an answer comes in less than a millisecond
AT_ONCE = 400
N_MESSAGES = 1000
N_SILENT = 50  # connections that say nothing, on each port

# torch's TCPStore (TCPStoreBackend.hpp): the first thing that a client says, and its questions.
STORE_MAGIC = struct.pack("<BI", 0, 0x3C85F7CE)
STORE_SET, STORE_GET, STORE_DELETE = 1, 3, 7


Target = tuple[str, int]  # address, port


@dataclasses.dataclass(frozen=True)
class Attack:
    """Whom to attack.

    Attributes:
        addresses: Of each the ports that are tried beside those below 1024.
        controller: (address, port) that speak ZMQ.
        password_free: (address, port) of torch's store and Gloo.
        server_key: CURVE's of the controller; only tried to show that a handshake can be seen.
    """

    addresses: dict[str, list[int]]
    controller: list[Target]
    password_free: list[Target]
    server_key: str


def connect(targets: Iterable[Target]) -> Iterator[tuple[Target, socket.socket]]:
    """Try all of these, many at once; those that accept, with the connection."""
    waiting: dict[int, tuple[Target, socket.socket, float]] = {}
    poll = select.poll()
    remaining = iter(targets)
    is_over = False
    while waiting or not is_over:
        while not is_over and len(waiting) < AT_ONCE:
            target = next(remaining, None)
            if is_over := target is None:
                break
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(target)
            poll.register(client, select.POLLOUT)
            waiting[client.fileno()] = target, client, time.monotonic() + ANSWER_S
        ready = {descriptor for descriptor, _ in poll.poll(10)}
        now_s = time.monotonic()
        for descriptor in [d for d, (*_, end_s) in waiting.items() if d in ready or end_s < now_s]:
            target, client, _ = waiting.pop(descriptor)
            poll.unregister(client)
            if descriptor in ready and not client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                yield target, client
            else:
                client.close()


def scan(address: str, ports: Iterable[int]) -> list[int]:
    """The ports of an address, out of these and the well-known ones, that accept a connection."""
    accepted = []
    for (_, port), client in connect((address, port) for port in {*ports, *range(1, 1024)}):
        client.close()
        accepted.append(port)
    return sorted(accepted)


def handshake(target: Target, server_key: bytes | None) -> str:
    """How ZMQ's handshake ends: "succeeded", or anything else.

    Without a server's key it asks for none of its mechanisms. A message waits to be sent.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        if server_key is not None:
            client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
            client.curve_serverkey = server_key
        monitor = client.get_monitor_socket()
        client.connect(f"tcp://{target[0]}:{target[1]}")
        client.send_multipart([b"<IDS|MSG>", b"", b'{"msg_type": "shutdown_request"}', b"{}"])
        ends = {
            zmq.EVENT_HANDSHAKE_SUCCEEDED: "succeeded",
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "failed",
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "failed",
            zmq.EVENT_HANDSHAKE_FAILED_AUTH: "failed",
            zmq.EVENT_DISCONNECTED: "failed",
        }
        while monitor.poll(1000 * ANSWER_S):
            event = recv_monitor_message(monitor)["event"]
            if event in ends:
                client.disable_monitor()
                return ends[event]
        client.disable_monitor()
        return "no answer"


def messages(seed: int) -> Iterator[bytes]:
    """Bytes without an end: of no form, and like those of each protocol but wrong later on."""
    generator = random.Random(seed)
    while True:
        junk = generator.randbytes(generator.randint(1, 4096))
        mechanism = generator.choice([b"NULL", b"CURVE", b"PLAIN", b"GSSAPI"]).ljust(20, b"\0")
        key = generator.choice([b"default_pg/group/0/0", b"master_port", junk[:99]])
        command = generator.choice([STORE_SET, STORE_GET, STORE_DELETE, generator.randrange(256)])
        size = generator.choice([len(key), 2**31, 2**63])
        yield junk
        # ZMTP 3.1: signature, version, mechanism, whether it is the server, filler.
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism + b"\0" + bytes(31)
        yield greeting[: generator.randint(1, 64)]
        yield greeting + junk
        yield STORE_MAGIC + struct.pack("<BQ", command, size) + key + junk
        # Gloo: the number of the pair that it is for.
        yield struct.pack("<q", generator.randint(-1, 64)) + junk


def send_all(targets: Sequence[Target], seed: int) -> dict[str, int]:
    """Send N_MESSAGES, in turns to all targets; how many were taken by whom.

    Meanwhile there are connections that say nothing.
    """
    taken = {f"{address}:{port}": 0 for address, port in targets}
    source = messages(seed)
    silent = [
        client for _, client in connect(target for target in targets for _ in range(N_SILENT))
    ]
    turns = itertools.islice(itertools.cycle(targets), N_MESSAGES)
    for (address, port), client in connect(turns):
        with client, contextlib.suppress(OSError):  # it has hung up
            client.send(next(source))
            taken[f"{address}:{port}"] += 1
    for client in silent:
        client.close()
    return taken


def run(attack: Attack) -> dict[str, Any]:
    """All of it; what was accepted, which handshakes succeeded and who took messages."""
    wrong_key, _ = zmq.curve_keypair()
    return {
        "open": {address: scan(address, ports) for address, ports in attack.addresses.items()},
        "plain": [handshake(target, None) for target in attack.controller],
        "wrong key": [handshake(target, wrong_key) for target in attack.controller],
        "right key": [handshake(t, attack.server_key.encode()) for t in attack.controller],
        "taken": send_all([*attack.controller, *attack.password_free], seed=21),
    }


if __name__ == "__main__":
    fields = json.load(sys.stdin)
    fields["controller"] = [tuple(target) for target in fields["controller"]]
    fields["password_free"] = [tuple(target) for target in fields["password_free"]]
    json.dump(run(Attack(**fields)), sys.stdout)
