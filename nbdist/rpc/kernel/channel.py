"""The one seam to the engines: run source, call by name, by ipyparallel's engine id.

Everything that touches ipyparallel's client, its private parts included, is here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

import ipyparallel

from nbdist.errors import NbdistError, StartError
from nbdist.rpc.wire import CONTROL_REQUEST

# Resolved in the engine: no function is pickled, so Python versions may differ.
CALL_BY_NAME = "__import__('nbdist.rpc.wire', fromlist=['call']).call"

# No public call of ipyparallel can stand for these: see `Channel.execute` and `Channel.ask`.
PRIVATE = (
    "_send",
    "_engines",
    "_mux_stream",
    "_control_stream",
    "_query_stream",
    "_registration_callbacks",
    "_unregister_engine",
    "_update_engines",
    "_io_loop",
)
# Its streams, and who takes what comes there.
STREAMS = {
    "_mux_stream": "_dispatch_reply",
    "_task_stream": "_dispatch_reply",
    "_broadcast_stream": "_dispatch_reply",
    "_control_stream": "_dispatch_single_reply",
    "_query_stream": "_dispatch_single_reply",
    "_iopub_stream": "_dispatch_iopub",
    "_notification_stream": "_dispatch_notification",
}
# The client's thread takes what is to be sent in milliseconds, unless it is closed.
TAKEN_S = 10.0

EXECUTE_OPTIONS = {
    "silent": False,
    "store_history": True,
    "user_expressions": {},
    "allow_stdin": False,
    "stop_on_error": False,
}

Message = Mapping[str, Any]
_LOG = logging.getLogger(__name__)


class Channel:
    """A connected ipyparallel client, reduced to what nbdist needs of it."""

    def __init__(self, client: Any, log: logging.Logger = _LOG):
        """Take over a connected client; into the log goes what cannot be taken of its messages.

        Raises:
            StartError: If this ipyparallel lacks the private parts that are used here.
        """
        lacking = [name for name in PRIVATE if not hasattr(client, name)]
        if lacking:
            raise StartError(
                f"ipyparallel {ipyparallel.__version__} has no Client.{', '.join(lacking)}, which "
                f"nbdist needs. Install another version: {sys.executable} -m pip install "
                "'ipyparallel==9.2.*'"
            )
        self._client, self._log = client, log
        # Told, in the client's thread, of an engine that the controller no longer lists.
        self.on_lost: Callable[[int], None] = lambda _engine: None
        self._asked: dict[int, set[Future[Any]]] = {}
        self._lock = threading.Lock()
        client._registration_callbacks.append(self._note_registration)  # noqa: SLF001
        if client._io_loop is not None:  # noqa: SLF001  # else it is closed
            client._io_loop.add_callback(self._guard_streams)  # noqa: SLF001

    def _guard_streams(self) -> None:
        """Let a stream outlive a frame that cannot be taken.

        On a port anybody can send one, and pyzmq's stream is dead after its first exception: no
        output and no reply would come any more. Uses the client's private streams and what takes
        their messages (ipyparallel 9.2); where one is missing, it stays as it is.
        """
        client = self._client

        def take(dispatch: Callable[[Any], object], frames: Any) -> None:
            try:
                dispatch(frames)
            except Exception:  # noqa: BLE001  # each is logged, and the next one is taken
                self._log.exception("dropped: a stranger's frame, or a message that nothing took")

        for name, taker in STREAMS.items():
            stream, dispatch = getattr(client, name, None), getattr(client, taker, None)
            if stream is not None and dispatch is not None:
                stream.on_recv(functools.partial(take, dispatch), copy=False)

    @property
    def engine_ids(self) -> tuple[int, ...]:
        """The engines that are registered now."""
        return tuple(sorted(self._client.ids))

    def ask_for_engines(self) -> None:
        """Ask the controller which engines it lists; those of the answer not known yet are taken.

        It tells of each new engine once, and ZMQ drops what nobody has subscribed to yet. An engine
        that registers while this client's subscription is on its way would never be heard of.
        Returns at once. Uses the client's private `_send`, query stream and `_update_engines`
        (ipyparallel 9.2; checked by tests/rpc/test_channel.py).
        """
        client = self._client

        def take(listed: Mapping[str, str]) -> None:
            client._update_engines(  # noqa: SLF001
                {int(e): uuid for e, uuid in listed.items() if int(e) not in client._engines}  # noqa: SLF001
            )

        self._ask_for_listed(take)

    def _ask_for_listed(self, take: Callable[[Mapping[str, str]], None]) -> None:
        """Ask for the controller's list; `take` gets engine -> uuid in the client's thread."""
        client = self._client
        client._send(  # noqa: SLF001
            client._query_stream,  # noqa: SLF001
            "connection_request",
            message_future_hook=lambda reply: reply.add_done_callback(
                lambda done: take(done.result()["content"]["engines"])
            ),
        )

    def execute(
        self,
        engine_id: int,
        code: str,
        metadata: Mapping[str, Any],
        on_message: Callable[[Message], None],
        on_done: Callable[[Any], None],
    ) -> None:
        """Run source on an engine as a notebook cell.

        Uses the client's private `_send`: its public `execute` gives no output until the
        cell ends, or loses the first of it, and always asks the engine to drop whatever
        is queued after an error. (ipyparallel 9.2; checked by tests/rpc/test_channel.py.)

        `on_message` is called with every raw iopub message, in the client's own thread, and
        `on_done` there with the reply once all output has been seen; with an exception instead
        where the engine raised, or died. The engine reads the cell's number from the metadata.
        """
        client = self._client
        try:
            ident = client._engines[engine_id].encode()  # noqa: SLF001
        except KeyError:  # it has gone just now
            on_done(ipyparallel.error.EngineError(f"engine {engine_id} is not registered"))
            return
        reply = client._send(  # noqa: SLF001
            client._mux_stream,  # noqa: SLF001
            "execute_request",
            content={"code": code, **EXECUTE_OPTIONS},
            ident=ident,
            metadata=dict(metadata),
            track_outstanding=True,
            message_future_hook=lambda reply: self._listen(reply, on_message),
        )
        # A rank that dies leaves no output future; the reply then is the last word.
        reply.add_done_callback(
            lambda done: (
                on_done(done.result())
                if _is_engine_loss(done.result())
                else reply.output.add_done_callback(lambda _: on_done(done.result()))
            )
        )

    def together(self, send: Callable[[], None]) -> None:
        """Call what executes on many engines in the client's own thread; return when it has.

        From any other thread. Each message would wake the client's thread otherwise, which takes
        the lock of the interpreter while the next is made. Uses the client's private `_io_loop`.

        Raises:
            NbdistError: If that thread does not take it; nothing has been sent, nor will be.
        """
        sent: Future[None] = Future()

        def run() -> None:
            if sent.set_running_or_notify_cancel():
                try:
                    send()
                except BaseException as error:  # noqa: BLE001  # it belongs to the caller
                    sent.set_exception(error)
                else:
                    sent.set_result(None)

        self._client._io_loop.add_callback(run)  # noqa: SLF001
        try:
            sent.result(TAKEN_S)
        except TimeoutError:
            if sent.cancel():
                raise NbdistError(
                    f"the client's thread did not take a cell within {TAKEN_S:.0f} s: its "
                    "connection is closed. %dist_reset starts afresh"
                ) from None
            sent.result()

    def _listen(self, reply: Any, on_message: Callable[[Message], None]) -> None:
        def deliver(message: Message) -> None:
            # The client joins each rank's text to what came before, again and again.
            metadata = self._client.metadata[reply.msg_id]
            metadata.stdout = metadata.stderr = ""
            on_message(message)

        reply.iopub_callbacks.append(deliver)

    def call(self, engine_id: int, name: str, *args: Any) -> Future[Any]:
        """Call `module:function` on an engine; a future of its result.

        The future raises ipyparallel's RemoteError where the function raised, and NbdistError
        where the engine is gone.
        """
        try:
            view = self._client[engine_id]
        except (IndexError, ipyparallel.error.NoEnginesRegistered):  # it has gone just now
            lost: Future[Any] = Future()
            lost.set_exception(NbdistError(f"engine {engine_id} is not registered"))
            return lost
        result: Future[Any] = view.apply_async(ipyparallel.Reference(CALL_BY_NAME), name, *args)
        return result

    def ask(self, engine_id: int, name: str, *args: Any) -> Future[Any]:
        """Ask an engine's control thread, which answers while a cell runs or hangs.

        From any thread; it never waits. An engine whose C code holds the GIL answers when it
        lets go, one that is stopped never: the caller sets the deadline.

        Uses the client's private `_send` and control stream: ipyparallel itself sends only
        its own requests (abort, shutdown, signal) this way. (ipyparallel 9.2; checked by
        tests/rpc/test_channel.py.)

        Returns:
            A future of what the function of this name in the engine's table returns
            (nbdist/engine/responder.py). It raises NbdistError with the engine's text where the
            function raised, and where the engine is gone, or goes before it has answered.
        """
        answer: Future[Any] = Future()
        with self._lock:
            self._asked.setdefault(engine_id, set()).add(answer)
        answer.add_done_callback(lambda done: self._forget(engine_id, done))
        client = self._client
        try:
            reply = client._send(  # noqa: SLF001
                client._control_stream,  # noqa: SLF001
                CONTROL_REQUEST,
                content={"name": name},
                ident=client._engines[engine_id].encode(),  # noqa: SLF001
                buffers=[pickle.dumps(args)],
            )
        except KeyError:  # it has gone just now
            _settle(answer, NbdistError(f"engine {engine_id} is not registered"))
        except Exception as error:  # noqa: BLE001  # closed, or not picklable: to whoever waits
            _settle(answer, error)
        else:
            reply.add_done_callback(lambda done: _settle_by_reply(answer, done.result()))
        return answer

    def _forget(self, engine_id: int, answer: Future[Any]) -> None:
        with self._lock:
            self._asked.get(engine_id, set()).discard(answer)

    def _note_registration(self, event: Mapping[str, Any]) -> None:
        if event["event"] != "unregister":
            return
        engine_id = int(event["id"])
        with self._lock:
            lost = self._asked.pop(engine_id, set())
        for answer in lost:
            _settle(answer, NbdistError(f"engine {engine_id} ended before it answered"))
        self.on_lost(engine_id)

    def forget(self, engine_id: int) -> None:
        """Tell the controller that an engine's process has ended; whoever waits for it is told.

        Uses the client's private `_send` and query stream: what ipyparallel's nanny would say, a
        process for each engine that nbdist's own engines do without. (ipyparallel 9.2; checked by
        tests/rpc/test_channel.py.) Without it heartbeats tell the same in 30 s. The controller's
        notification is lost while this client's subscription is on its way, so it is asked, too.
        """
        client = self._client
        uuid = client._engines.get(engine_id)  # noqa: SLF001
        if uuid is None:
            return

        def drop(listed: Mapping[str, str]) -> None:
            is_listed = str(engine_id) in listed
            if not is_listed and client._engines.get(engine_id) == uuid:  # noqa: SLF001
                client._unregister_engine({"content": {"id": engine_id, "uuid": uuid}})  # noqa: SLF001

        client._send(  # noqa: SLF001
            client._query_stream,  # noqa: SLF001
            "unregistration_request",
            content={"id": engine_id},
        )
        self._ask_for_listed(drop)

    def signal(self, engine_id: int, number: int) -> None:
        """Signal an engine by way of its nanny, which may be on another host."""
        if engine_id in self._client.ids:  # otherwise it has ended just now
            self._client.send_signal(number, targets=[engine_id], block=False)

    def close(self) -> None:
        """Close the connection; the engines go on."""
        self._client.close()


def _settle_by_reply(answer: Future[Any], reply: Message) -> None:
    content = reply["content"]
    if content["status"] == "ok":
        try:
            # Signed with the session's key by our own engine, as every message is.
            value = pickle.loads(reply["buffers"][0])  # noqa: S301
        except Exception as error:  # noqa: BLE001  # whatever it is belongs to whoever waits
            value = error
    else:
        value = NbdistError(f"{content['ename']}: {content['evalue']}")
        value.add_note(content["traceback"])
    _settle(answer, value)


def _settle(answer: Future[Any], value: Any) -> None:
    # A late answer of an engine that counted as gone, or of one that nobody waits for now.
    with contextlib.suppress(InvalidStateError):
        if isinstance(value, BaseException):
            answer.set_exception(value)
        else:
            answer.set_result(value)


def _is_engine_loss(reply: Any) -> bool:
    if isinstance(reply, ipyparallel.error.RemoteError):
        # The client itself makes up this reply of an engine that is gone.
        return reply.ename == "EngineError" and "died while running task" in reply.evalue
    return isinstance(reply, ipyparallel.error.EngineError | ipyparallel.error.TaskAborted)


def failure_of(reply: Any) -> tuple[str, str, tuple[str, ...]] | None:
    """(name, message, traceback lines) of a reply that is an exception, else None."""
    if not isinstance(reply, BaseException):
        return None
    if _is_engine_loss(reply):
        return "RankDied", "ended while running this cell", ()
    name = getattr(reply, "ename", type(reply).__name__)
    message = getattr(reply, "evalue", str(reply))
    lines = getattr(reply, "traceback", None) or ()
    return name, message, (lines,) if isinstance(lines, str) else tuple(lines)
