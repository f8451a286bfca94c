"""A new controller in the place of one that has ended: the same ports, key and engines.

The engines' sockets connect again by themselves, so nothing on a rank is lost. For this
ipyparallel needs its connection files and its list of engines; a copy of both is kept here, as
a controller that ends by a signal it can handle removes its connection files.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from nbdist.core.host import is_loopback
from nbdist.errors import StartError

# Read back the earlier controller's files, instead of choosing ports and a key.
AGAIN = ("--IPController.reuse_files=True", "--IPController.restore_engines=True")


@dataclass(frozen=True, slots=True)
class Connection:
    """The files that a later controller has to have in common with the first.

    Attributes:
        files: The connection files with their text; the key is in it.
        engines: The file in which the controller keeps its list of engines.
    """

    files: dict[Path, str]
    engines: Path

    @classmethod
    def of(cls, profile: Path, cluster_id: str) -> Connection:
        """The connection of a running controller, by its profile folder."""
        paths = (profile / "security").glob(f"ipcontroller-{cluster_id}-*.json")
        return cls(
            {path: path.read_text() for path in paths},
            profile / "log" / f"engines{cluster_id}.json",
        )

    @property
    def is_encrypted(self) -> bool:
        """With CURVE, whose secret key ended with the controller."""
        return any(json.loads(text).get("curve_serverkey") for text in self.files.values())

    @property
    def is_open(self) -> bool:
        """Whether notebooks of other machines can reach the controller."""
        client = next(text for path, text in self.files.items() if path.stem.endswith("-client"))
        return not is_loopback(json.loads(client)["interface"].rpartition("/")[2])

    def restore(self, gone: Collection[int]) -> None:
        """Write the files that a new controller reads, without the engines that are gone.

        The list of engines is ipyparallel's own (9.2: `{"engines": {id: uuid}, "next_id": n}`);
        tests/cluster/test_controller.py holds its form.

        Raises:
            StartError: If the list of engines cannot be read.
        """
        try:
            engines = dict(json.loads(self.engines.read_text())["engines"])
        except (OSError, ValueError, KeyError) as error:
            raise StartError(
                f"The list of engines ({self.engines.name}) that a new controller needs cannot be "
                f"read: {type(error).__name__}: {error}"
            ) from error
        living = {engine: name for engine, name in engines.items() if int(engine) not in gone}
        next_id = max(map(int, engines), default=-1) + 1
        self.engines.write_text(json.dumps({"engines": living, "next_id": next_id}))
        for path, text in self.files.items():
            path.touch(mode=0o600)  # before the key is in it
            path.write_text(text)


def client_context() -> Any:
    """The process's ZMQ context, with defaults for the sockets of one client.

    Each client gets an identity of its own: numbers that ZMQ gives out itself can come again, and
    then a new client hears answers to the one before. And what a closed client has not sent is
    dropped; otherwise its sockets would find the new controller, and an old cell would run.
    """
    context: Any = zmq.Context.shadow(zmq.Context.instance().underlying)
    context.setsockopt(zmq.IDENTITY, uuid.uuid4().hex.encode())
    context.setsockopt(zmq.LINGER, 0)
    return context
