"""Frames of a stranger, who has no key, to whatever the controller listens on."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from nbdist.cells.kernel import wait
from nbdist.cells.kernel.cell_request import CellRequest
from nbdist.cluster.kernel.ranks import main_thread_name
from nbdist.cluster.kernel.start import StartOptions
from nbdist.notebook.session import Session
from tests.support.ranks import SUM, session_of, texts

# The last two are what ZMQ's own parts and ipyparallel's hub look for.
FRAMES = (
    [b"x"], [b""], [b"x"] * 5, [b"<IDS|MSG>", b"x"], [b"", b"<IDS|MSG>", *[b"{}"] * 5],
    [b"intask", b"x"], [b"heartmonitor"],
)  # fmt: skip
PRINTS = """
import time
from pathlib import Path
n = 0
while n < 20 or not Path("{folder}/end").exists():
    print(n, flush=True)
    n += 1
    time.sleep(0.01)
"""
KINDS = (zmq.DEALER, zmq.PUB, zmq.SUB)
ANSWER_S = 10.0


def listening(session: Session) -> tuple[list[str], list[str]]:
    """Addresses of the controller's sockets: in files, and on ports."""
    pid = session.cluster.processes.controller_pid()
    assert pid is not None
    process = psutil.Process(pid)
    ports = [
        f"tcp://{connection.laddr.ip}:{connection.laddr.port}"
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    paths = {connection.laddr for connection in process.net_connections("unix")}
    return [f"ipc://{path}" for path in paths if Path(path or "-").is_socket()], ports


def send_to(addresses: list[str]) -> None:
    """Send each of FRAMES there as often as ZMQ lets a socket of each kind."""
    with zmq.Context() as context:
        for address in addresses:
            for kind in KINDS:
                with context.socket(kind) as stranger:
                    stranger.linger, stranger.sndtimeo = 200, 200
                    stranger.connect(address)
                    time.sleep(0.02)  # a PUB drops what it sends before it is connected
                    for frames in FRAMES:
                        try:
                            stranger.send_multipart(frames)
                        except (zmq.Again, zmq.ZMQError):  # nobody there, or no kind that sends
                            break


def is_whole(session: Session) -> bool:
    """Whether cells, output, collectives and the control channel work, one after the other."""
    cells = [texts(session, SUM) == ["3.0\n"] * 2 for _ in range(5)]
    channel = session.cluster.channel
    assert channel is not None
    answers = [channel.ask(engine, "ping").result(ANSWER_S) for engine in (0, 1, 0, 1)]
    calls = [main_thread_name(session.call, rank).result(ANSWER_S) for rank in (0, 1)]
    return all(cells) and all(calls) and len(answers) == 4


def test_local_ranks_have_no_port_of_the_controller(pair: Session) -> None:
    """It listens in the run's folder, which is this user's; there too they change nothing."""
    files, ports = listening(pair)
    send_to(files)

    assert ports == []
    assert len(files) > 10
    assert is_whole(pair)


@pytest.fixture
def on_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Ranks whose run has a folder with a name too long for sockets."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with session_of(StartOptions(2)) as session:
        yield session


def test_on_ports_a_frame_that_is_no_message_costs_nothing(
    on_ports: Session, tmp_path: Path
) -> None:
    """Sent to every port between cells, and while one prints."""
    files, ports = listening(on_ports)
    send_to(ports)
    is_whole_after = is_whole(on_ports)
    cell = on_ports.begin(CellRequest(PRINTS.format(folder=tmp_path), (0, 1)))
    send_to(ports)
    (tmp_path / "end").touch()
    result = wait.wait(lambda: cell)

    assert files == []
    assert len(ports) > 10
    assert is_whole_after
    for rank in result.ranks:
        lines = rank.text.splitlines()
        assert lines == [str(n) for n in range(len(lines))]
        assert len(lines) > 10
    assert is_whole(on_ports)
