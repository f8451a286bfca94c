"""The control thread's answers: from a fixed table, and never an exception into the thread."""

import gc
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.engine import responder
from nbdist.errors import StartError
from nbdist.rpc import wire

pytestmark = pytest.mark.engine


def request(name: str, *args: Any) -> dict[str, Any]:
    return {"content": {"name": name}, "buffers": [pickle.dumps(args)]}


class Session:
    """Keeps what a kernel's session would send."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def send(self, stream: Any, kind: str, content: Any, **options: Any) -> None:
        self.sent.append((stream, kind, content, options))


def test_an_answer_is_the_functions_result() -> None:
    """Status and the pickled value."""
    content, [buffer] = responder.answer(request("ping"))

    assert content == {"status": "ok"}
    assert pickle.loads(buffer) == threading.current_thread().name


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (request("os.getpid"), "KeyError"),
        (request("ping", 1), "TypeError"),
        ({"content": {}, "buffers": []}, "KeyError"),
        ({"content": {"name": "ping"}, "buffers": [b"?"]}, "UnpicklingError"),
        ({"content": {"name": "ping"}, "buffers": []}, "IndexError"),
    ],
)
def test_what_is_wrong_is_the_answer(message: dict[str, Any], name: str) -> None:
    """Unknown names, wrong arguments and broken messages raise nothing here."""
    content, buffers = responder.answer(message)

    assert (content["status"], content["ename"]) == ("error", name)
    assert name in content["traceback"]
    assert buffers == []


def test_the_kernels_table_gets_the_handler() -> None:
    """The reply goes to who has asked, as the answer to the request."""
    kernel = SimpleNamespace(control_handlers={"shutdown_request": None}, session=Session())
    responder.install(kernel)
    message = request("ping")
    kernel.control_handlers[wire.CONTROL_REQUEST]("stream", [b"id"], message)
    [(stream, kind, content, options)] = kernel.session.sent

    assert (stream, kind, content) == ("stream", wire.CONTROL_REPLY, {"status": "ok"})
    assert options["parent"] is message
    assert options["ident"] == [b"id"]


def test_an_ipykernel_without_the_table_is_named() -> None:
    """The error says which package is at fault and what to install."""
    with pytest.raises(StartError, match=r"ipykernel \d.*control_handlers.*pip install"):
        responder.install(SimpleNamespace())


def test_stacks_tell_what_other_threads_do() -> None:
    """A thread of the user's is there by name with its line; the asking one is not."""
    gate, inside = threading.Event(), threading.Event()

    def users_function() -> None:
        inside.set()
        gate.wait()

    thread = threading.Thread(target=users_function, name="the user's")
    thread.start()
    inside.wait()
    try:
        text = responder.all_stacks()
    finally:
        gate.set()
        thread.join()

    assert threading.current_thread().name not in text
    assert "the user's:\n  test_responder.py, line" in text
    assert "in users_function: gate.wait()" in text


def test_the_users_finalizers_do_not_run_in_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DataLoader's may wait for seconds, with requests to abort behind it; then as before."""
    seen = []
    table = {"ping": lambda: seen.append(gc.isenabled())}
    monkeypatch.setattr(responder, "TABLE", table)
    for is_on in (True, False):
        (gc.enable if is_on else gc.disable)()
        try:
            responder.answer(request("ping"))
            seen.append(gc.isenabled())
        finally:
            gc.enable()

    assert seen == [False, True, False, False]
