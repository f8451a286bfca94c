"""The controller's process: ipyparallel's, without a copy of each cell's messages for its hub.

Run by its path: it needs ipyparallel alone, also where nbdist is not installed. Engines are there
from their first heartbeat on. A frame that is no message of ours is dropped.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import zmq
from ipyparallel.controller import app, heartmonitor
from ipyparallel.controller.app import IPController
from zmq.devices import monitoredqueue, monitoredqueuedevice

# Messages that ipyparallel's hub acts on. It would unpack all else that passes, output of ranks
# too, to file it in a database: a third of a millisecond for each message, and there is none.
HEARD = (b"heartmonitor", b"intask", b"outtask", b"tracktask", b"inbcast", b"outbcast")


class Controller(IPController):  # type: ignore[misc]
    """A controller whose hub hears of heartbeats, and of what is sent to no certain engine."""

    def init_hub(self) -> None:
        """Make the hub, and cancel its subscription to what the engines' queues carry."""
        # traitlets lets the logger make records of every level, which its handlers then drop.
        self.log.setLevel(self.log_level)
        with without_pause() if self.db_class.__name__ == "NoDB" else contextlib.nullcontext():
            super().init_hub()
        heard = self.hub.monitor.socket
        heard.setsockopt(zmq.UNSUBSCRIBE, b"")
        for topic in HEARD:
            heard.setsockopt(zmq.SUBSCRIBE, topic)

    def next_port(self, pool_name: str = "common") -> int | str:
        """A port; in a folder, the end of a socket's name."""
        if self.engine_transport == "ipc":
            return secrets.token_hex(4)
        return int(super().next_port(pool_name))

    def construct_url(self, kind: str, channel: str, index: Any = None) -> str:
        """Address of a channel; as engines and clients write it, with a colon (ipyparallel 9.2)."""
        url = str(super().construct_url(kind, channel, index))
        place, _, name = url.rpartition("-")
        return f"{place}:{name}" if url.startswith("ipc://") else url


@contextlib.contextmanager
def without_pause() -> Iterator[None]:
    """Let ipyparallel's `init_hub` not sleep in here.

    It gives its database a quarter of a second to connect (ipyparallel 9.2), a third of a start,
    and without a database nothing is waited for. Where its module has no `time` nothing changes.
    """
    clock = getattr(app, "time", None)
    try:
        if clock is not None:
            app.time = SimpleNamespace(**vars(clock) | {"sleep": lambda _seconds: None})
        yield
    finally:
        if clock is not None:
            app.time = clock


class FirstBeats(heartmonitor.HeartMonitor):  # type: ignore[misc]
    """Tells the hub of a heart that is new when it has answered, and not at the beat after that."""

    def handle_pong(self, msg: list[bytes]) -> Any:
        """A heart has answered: it is connected, and so are the engine's other sockets."""
        super().handle_pong(msg)
        if msg[0] in self.responses and msg[0] not in self.hearts:
            self.handle_new_hearts({msg[0]})


# The hub's process, a fork of this one or one that imports this file, finds the class by this name
# (ipyparallel 9.2; without the name the hub hears of an engine a beat later).
heartmonitor.HeartMonitor = FirstBeats


def relay(front: Any, back: Any, monitor: Any, from_front: bytes, from_back: bytes) -> None:
    """Pass messages on as pyzmq's monitored_queue does; between two ROUTER sockets whole ones.

    monitored_queue takes two frames of each for names and passes on the rest, so that one frame of
    a stranger takes the next message along. Here a message stays whole, and ZMQ drops one that has
    no receiver.
    """
    if {front.type, back.type} != {zmq.ROUTER}:
        monitoredqueue.monitored_queue(front, back, monitor, from_front, from_back)
        return
    ways = {front: (back, from_front), back: (front, from_back)}
    poller = zmq.Poller()
    for socket in ways:
        poller.register(socket, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            other, prefix = ways[socket]
            message = socket.recv_multipart(copy=False)
            message[:2] = message[1::-1]
            other.send_multipart(message, copy=False)
            monitor.send_multipart([prefix, *message], copy=False)


# pyzmq's devices find it by this name (27; without the name messages are relayed in its own way).
monitoredqueuedevice.monitored_queue = relay  # type: ignore[attr-defined]

if __name__ == "__main__":
    Controller.launch_instance()
