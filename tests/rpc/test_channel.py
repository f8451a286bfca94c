"""The channel to real engines: whole output, in order, then one last word."""

import itertools
import pickle
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ipyparallel.error import RemoteError

from nbdist.cluster.kernel.ranks import barrier, current_strategy
from nbdist.errors import NbdistError
from nbdist.hang.records import ThreadSnapshot
from nbdist.notebook.session import Session
from nbdist.rpc.kernel.channel import Channel, Message, failure_of
from nbdist.rpc.wire import CELL_RUN
from tests.support.ranks import until

DEADLINE_S = 20.0


@pytest.fixture
def session(pair: Session) -> Session:
    """Two ranks that all tests of this file share."""
    return pair


@pytest.fixture
def channel(session: Session) -> Channel:
    assert session.cluster.channel is not None
    return session.cluster.channel


class Heard:
    def __init__(self, channel: Channel, engine: int, code: str) -> None:
        self.messages: list[Message] = []
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        channel.execute(engine, code, {}, self.messages.append, self._done.put)

    @property
    def text(self) -> str:
        return "".join(
            m["content"]["text"] for m in self.messages if m["header"]["msg_type"] == "stream"
        )

    def reply(self) -> Any:
        return self._done.get(timeout=DEADLINE_S)

    def has_more_replies(self) -> bool:
        return not self._done.empty()


def test_output_is_whole_and_in_order(channel: Channel) -> None:
    """Nothing is lost from the first line to the last, which is there before the reply."""
    heard = Heard(channel, 0, "for i in range(2000):\n    print(i)")
    reply = heard.reply()

    assert failure_of(reply) is None
    assert heard.text.splitlines() == [str(i) for i in range(2000)]
    assert not heard.has_more_replies()


def test_short_cells_never_lose_their_first_words(channel: Channel) -> None:
    """Output of a cell that ends at once comes between its request and its reply."""
    for number in range(30):
        heard = Heard(channel, number % 2, f"print({number})")
        heard.reply()

        assert heard.text == f"{number}\n"


def test_cells_of_both_engines_do_not_mix(channel: Channel) -> None:
    """Each cell hears its own engine only."""
    both = [Heard(channel, engine, "for i in range(300):\n    print(rank)") for engine in (0, 1)]
    replies = [heard.reply() for heard in both]

    assert [failure_of(reply) for reply in replies] == [None, None]
    assert [set(heard.text.split()) for heard in both] == [{"0"}, {"1"}]
    assert [len(heard.text.split()) for heard in both] == [300, 300]


def test_streams_and_displays_keep_their_order(channel: Channel) -> None:
    """stdout, a display, stderr and a result arrive as they were made."""
    heard = Heard(
        channel,
        0,
        "import sys\nprint('one', flush=True)\ndisplay('two')\n"
        "print('three', file=sys.stderr, flush=True)\n'four'",
    )
    heard.reply()
    kinds = [(m["header"]["msg_type"], m["content"].get("name", "")) for m in heard.messages]
    outputs = [kind for kind in kinds if kind[0] not in {"status", "execute_input"}]

    # What one print writes may come in two messages.
    assert [kind for kind, _ in itertools.groupby(outputs)] == [
        ("stream", "stdout"),
        ("display_data", ""),
        ("stream", "stderr"),
        ("execute_result", ""),
    ]


def test_a_cell_costs_its_ranks_three_messages(session: Session, channel: Channel) -> None:
    """Begun, idle, reply: no status "busy", and of no cell does the controller's hub keep a note.

    The reply of a notebook's cell brings no date, which ipyparallel's client would parse.
    """
    heard = Heard(channel, 0, "pass")
    heard.reply()
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    channel.execute(0, "pass", {CELL_RUN: 1000}, lambda _: None, done.put)
    dated = done.get(timeout=DEADLINE_S).metadata

    # Idle comes by another way than the reply, and is not handed on once that is there.
    assert [
        (m["header"]["msg_type"], m["content"].get("execution_state"))
        for m in heard.messages
        if m["content"].get("execution_state") != "idle"
    ] == [("execute_input", None)]
    assert dated["started"] is None
    assert dated["completed"] is not None
    queued = channel._client.queue_status()
    assert {engine: queued[engine]["completed"] for engine in (0, 1)} == {0: 0, 1: 0}


def test_a_rank_makes_no_records_of_its_messages(channel: Channel) -> None:
    """The log's level is what ipyparallel's engine was asked for, or above."""
    heard = Heard(channel, 0, "log = get_ipython().kernel.log\nprint(log.isEnabledFor(20))")
    heard.reply()

    assert heard.text == "False\n"


_FLUSHES = """
import sys
turns, schedule = [], sys.stdout.pub_thread.schedule
sys.stdout.pub_thread.schedule = lambda call: (turns.append(call), schedule(call))
sys.stdout.flush(), sys.stderr.flush()
idle = len(turns)
sys.stdout.write("x")
sys.stdout.flush()
del sys.stdout.pub_thread.schedule
print(idle, len(turns) > 0, not sys.stdout._buffers)
"""


def test_flush_waits_only_for_text(channel: Channel) -> None:
    """A stream that holds nothing asks its thread for no turn; one with text is sent at once."""
    heard = Heard(channel, 1, _FLUSHES)
    heard.reply()

    assert heard.text == "x0 True True\n"


def test_many_sends_are_one_turn_of_the_clients_thread(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run together there, an error reaches the caller, and a thread that is stuck is told."""
    threads: list[str] = []

    def send() -> None:
        threads.append(threading.current_thread().name)
        raise KeyError("sent too much")

    with pytest.raises(KeyError, match="sent too much"):
        channel.together(send)
    blocked = threading.Event()
    channel._client._io_loop.add_callback(blocked.wait, DEADLINE_S)
    monkeypatch.setattr("nbdist.rpc.kernel.channel.TAKEN_S", 0.05)
    with pytest.raises(NbdistError, match="did not take a cell"):
        channel.together(send)
    blocked.set()
    monkeypatch.undo()
    channel.together(lambda: None)

    assert len(threads) == 1
    assert threads[0] != threading.current_thread().name


def test_an_error_is_the_reply_and_an_output(channel: Channel) -> None:
    """A raised exception comes once as a message and once as the reply; what is queued runs."""
    heard = Heard(channel, 1, "print('before')\n1 / 0")
    after = Heard(channel, 1, "print('after')")
    failure = failure_of(heard.reply())

    assert failure_of(after.reply()) is None
    assert after.text == "after\n"
    assert failure is not None
    assert failure[:2] == ("ZeroDivisionError", "division by zero")
    assert [m["header"]["msg_type"] for m in heard.messages].count("error") == 1
    assert heard.text == "before\n"


def test_an_exception_named_like_ours_is_no_death(channel: Channel) -> None:
    """User code may raise an EngineError of its own."""
    heard = Heard(channel, 0, "class EngineError(Exception): pass\nraise EngineError('mine')")

    assert failure_of(heard.reply())[:2] == ("EngineError", "mine")


def test_the_client_keeps_nothing_of_a_finished_cell(channel: Channel) -> None:
    """However much a session prints, ipyparallel's own records do not grow with it."""
    heard = Heard(channel, 0, "for i in range(1000):\n    print('x' * 100)\ndisplay('y' * 1000)")
    heard.reply()
    client = channel._client

    assert until(lambda: not client.results)
    assert len(str(dict(client.metadata))) < 1000


def test_a_call_by_name_returns_what_the_function_returns(channel: Channel) -> None:
    """Functions are named, not pickled, and their results are plain records."""
    results = [current_strategy(channel.call, engine).result(DEADLINE_S) for engine in (0, 1)]

    assert [result.name for result in results] == ["ddp", "ddp"]


def test_a_call_that_raises_raises_here(channel: Channel) -> None:
    """The exception's class and text cross the wire."""
    with pytest.raises(RemoteError, match="literal") as caught:
        channel.call(0, "builtins:int", "x").result(DEADLINE_S)
    with pytest.raises(RemoteError) as missing:
        channel.call(1, "nbdist.nowhere:f").result(DEADLINE_S)

    assert caught.value.ename == "ValueError"
    assert missing.value.ename == "ModuleNotFoundError"


def test_a_barrier_names_who_does_not_come(channel: Channel, session: Session) -> None:
    """A rank that waits alone says for whom, and the next barrier of all works."""
    with pytest.raises(RemoteError, match=r"waited 1 s at %dist_sync for rank\(s\) 1"):
        barrier(channel.call, 0, "one", 1.0).result(DEADLINE_S)
    # The other one comes late to the first: it finds the first rank's mark there.
    barrier(channel.call, 1, "one", 1.0).result(DEADLINE_S)

    assert len(session.sync(10.0)) == 2


def test_an_interrupt_reaches_a_busy_engine_and_spares_an_idle_one(
    session: Session, channel: Channel
) -> None:
    """SIGINT ends a cell with KeyboardInterrupt; without a cell it changes nothing."""
    busy = Heard(channel, 0, "print('runs', flush=True)\nimport time\ntime.sleep(60)")
    assert until(lambda: "runs" in busy.text)
    session.cluster.interrupt(0)
    session.cluster.interrupt(1)
    failure = failure_of(busy.reply())
    idle = Heard(channel, 1, "print('lives')")

    assert failure is not None
    assert failure[0] == "KeyboardInterrupt"
    assert failure_of(idle.reply()) is None
    assert idle.text == "lives\n"


def test_an_engine_answers_while_its_cell_runs(channel: Channel, tmp_path: Path) -> None:
    """A question is answered at once, and the cell's output is what it is without questions."""
    gate = tmp_path / "gate"
    busy = Heard(
        channel,
        0,
        f"import os, time\nprint('begins', flush=True)\nwhile not os.path.exists({str(gate)!r}):\n"
        "    print('.', end='')\n    time.sleep(0.01)\nprint('ends')",
    )
    assert until(lambda: "begins" in busy.text)
    answers = [channel.ask(0, "ping").result(DEADLINE_S) for _ in range(20)]
    gate.touch()
    failure = failure_of(busy.reply())

    assert failure is None
    assert set(answers) == {"Control"}
    assert busy.text.startswith("begins\n.")
    assert set(busy.text.removeprefix("begins\n").removesuffix("ends\n")) == {"."}
    assert busy.text.endswith(".ends\n")


def test_questions_from_many_threads_are_all_answered(channel: Channel) -> None:
    """Every future is settled, and nothing of it is kept."""
    with ThreadPoolExecutor(8) as threads:
        engines = [number % 2 for number in range(64)]
        asked = list(threads.map(lambda engine: channel.ask(engine, "look"), engines))
    answers = [answer.result(DEADLINE_S) for answer in asked]

    assert all(isinstance(answer, ThreadSnapshot) for answer in answers)
    assert not any(channel._asked.values())


def test_what_is_wrong_with_a_question_is_its_answer(channel: Channel) -> None:
    """An unknown name, wrong arguments, what cannot be sent, an engine that there is not."""
    with pytest.raises(NbdistError, match=r"KeyError: 'os.getpid'"):
        channel.ask(0, "os.getpid").result(DEADLINE_S)
    with pytest.raises(NbdistError, match=r"TypeError: ping\(\) takes 0") as caught:
        channel.ask(0, "ping", 1).result(DEADLINE_S)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        channel.ask(0, "ping", lambda: None).result(DEADLINE_S)
    with pytest.raises(NbdistError, match="engine 7 is not registered"):
        channel.ask(7, "ping").result(DEADLINE_S)

    assert "responder.py" in caught.value.__notes__[0]


def test_a_closed_channel_raises_in_the_future() -> None:
    """To whoever waits, and not to who asks."""
    answer = Channel(FakeClient()).ask(0, "ping")

    assert isinstance(answer.exception(0), OSError)


def test_an_engine_that_nobody_told_of_is_asked_for(channel: Channel) -> None:
    client = channel._client
    uuid = client._engines.pop(1)
    client._ids.remove(1)
    unknown = channel.engine_ids
    channel.ask_for_engines()

    assert unknown == (0,)
    assert until(lambda: channel.engine_ids == (0, 1))
    assert client._engines[1] == uuid


def test_an_engine_whose_end_nobody_told_of_is_dropped() -> None:
    """The controller's notification is lost while a client subscribes: its list counts."""
    reply: Future[Any] = Future()
    client = FakeClient(reply)
    dropped: list[Any] = []
    client._unregister_engine = dropped.append
    channel = Channel(client)
    channel.forget(0)
    [answer] = client.hooked
    answer.set_result({"content": {"engines": {"1": "other"}}})

    assert dropped == [{"content": {"id": 0, "uuid": "uuid"}}]


@pytest.mark.parametrize("engines", [{"0": "uuid"}, {"0": "its successor"}])
def test_an_engine_that_is_listed_is_not_dropped(engines: dict[str, str]) -> None:
    """Not even under the id of one that has ended: another process may have it by then."""
    client = FakeClient(Future())
    dropped: list[Any] = []
    client._unregister_engine = dropped.append
    Channel(client).forget(0)
    [answer] = client.hooked
    answer.set_result({"content": {"engines": engines}})

    assert dropped == []


def test_a_late_answer_of_a_lost_engine_changes_nothing() -> None:
    """The engine counts as gone; the answer that comes even so is dropped."""
    reply: Future[Any] = Future()
    client = FakeClient(reply)
    answer = Channel(client).ask(0, "ping")
    [note] = client._registration_callbacks
    note({"event": "register", "id": 0})
    is_waiting = not answer.done()
    note({"event": "unregister", "id": 0})
    reply.set_result({"content": {"status": "ok"}, "buffers": [pickle.dumps("late")]})

    assert is_waiting
    with pytest.raises(NbdistError, match="engine 0 ended before it answered"):
        answer.result(0)


class FakeClient:
    """An ipyparallel client with one engine that answers when it is told to."""

    _mux_stream = _control_stream = _query_stream = _io_loop = None
    _update_engines = _unregister_engine = None

    def __init__(self, reply: "Future[Any] | None" = None) -> None:
        self._registration_callbacks: list[Callable[[Any], None]] = []
        self._engines = {0: "uuid"}
        self.reply = reply
        self.hooked: list[Future[Any]] = []

    def _send(self, *_: Any, message_future_hook: Any = None, **__: Any) -> "Future[Any]":
        if self.reply is None:
            raise OSError("Connections have been closed.")
        if message_future_hook is not None:
            message_future_hook(self.reply)
            self.hooked.append(self.reply)
        return self.reply


def test_an_engine_that_dies_in_a_cell_is_the_cells_last_word(
    session: Session, channel: Channel, tmp_path: Path
) -> None:
    """What it printed is there, the reply is its death, and the other engine goes on."""
    # What a process has not sent when it exits so is lost: it goes on once it was heard.
    gate = tmp_path / "gate"
    dying = Heard(
        channel,
        1,
        "import os, time\nprint('last words', flush=True)\n"
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\nos._exit(9)",
    )
    other = Heard(channel, 0, "print('lives')")
    assert until(lambda: dying.text == "last words\n")
    gate.touch()
    failure = failure_of(dying.reply())
    other_failure = failure_of(other.reply())
    assert until(lambda: 1 in session.cluster.processes.exits)
    end = session.cluster.processes.exits[1]
    status = session.status()

    assert failure is not None
    assert failure[0] == "RankDied"
    assert dying.text == "last words\n"
    assert other_failure is None
    assert end.how == "exit code 9"
    assert status.ranks[0].state == "idle"
    assert status.ranks[1].state.startswith("ended (exit code 9: the process ended itself")
