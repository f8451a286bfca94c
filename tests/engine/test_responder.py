"""The control thread's answers: from a fixed table, and never an exception into the thread."""

import gc
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbdist.engine import responder
from nbdist.errors import StartError


def request(name: str, *args: Any) -> dict[str, Any]:
    return {"content": {"name": name}, "buffers": [pickle.dumps(args)]}


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


def test_an_answer_is_made_on_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on GPU 0, where each rank would take memory for a context of its own."""
    chosen: list[Any] = []
    rank = SimpleNamespace(place=SimpleNamespace(device="cuda:3"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(responder, "this_rank", lambda: rank)

    assert responder.answer(request("ping"))[0] == {"status": "ok"}
    assert chosen == ["cuda:3"]


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
