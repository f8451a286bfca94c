"""What a rank prints goes the short way into ipykernel's buffers, and nothing of it is lost."""

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from ipykernel.iostream import IOPubThread, OutStream

from nbdist.engine import raw_output
from tests.support.ranks import until


class Cell(dict[str, Any]):
    """A cell's header, which counts how often a key is made of it."""

    n_keys = 0

    def items(self) -> Any:
        self.n_keys += 1
        return super().items()


class Sent(SimpleNamespace):
    """A session that keeps what is sent."""

    def __init__(self) -> None:
        super().__init__(texts=[], pid=0)

    def of(self, cell: str) -> str:
        return "".join(text for sent_of, text in self.texts if sent_of == cell)

    def msg(self, _kind: str, content: dict[str, str], parent: dict[str, Any]) -> tuple[str, str]:
        return parent["cell"], content["text"]

    def send(self, _thread: Any, message: tuple[str, str], ident: bytes) -> None:
        self.texts.append(message)


@pytest.fixture
def stream() -> Iterator[Any]:
    """A stream as a rank's stdout is, its flushes by the thread that sends."""
    context = zmq.Context()
    thread = IOPubThread(context.socket(zmq.PUB))
    thread.start()
    stream: Any = OutStream(Sent(), thread, "stdout", watchfd=False)
    stream.flush_interval = 0.01
    raw_output.write_quickly(stream)
    yield stream
    thread.stop()
    thread.close()
    context.term()


def test_a_cells_key_is_made_once_for_all_that_it_prints(stream: Any) -> None:
    """Once here and once by ipykernel; all texts come in order, each under its cell."""
    stream.flush_interval = 60.0
    cells = [Cell(cell="first"), Cell(cell="second")]
    for cell in cells:
        stream.parent_header = cell
        for n in range(1000):
            print("line", n, file=stream)
        stream.flush()
    lines = "".join(f"line {n}\n" for n in range(1000))

    assert [stream.session.of(name) for name in ("first", "second")] == [lines, lines]
    assert [cell.n_keys for cell in cells] == [2, 2]
    with pytest.raises(TypeError):
        stream.write(b"bytes")


def test_a_text_that_comes_as_a_flush_begins_is_flushed_next(stream: Any) -> None:
    """Whoever writes asks for a flush only after the text is there."""
    stream.parent_header = Cell(cell="only")
    print("before", file=stream)
    assert until(lambda: not stream._flush_pending)
    print("after", file=stream)

    assert until(lambda: stream.session.of("only") == "before\nafter\n")


def test_what_comes_after_a_flush_is_sent_after_a_text_that_is_on_its_way(stream: Any) -> None:
    """The thread that sends has taken the text, and not sent it when the cell's end flushes."""
    is_taken, may_send = threading.Event(), threading.Event()
    order: list[str] = []

    def send(thread: IOPubThread, message: tuple[str, str], ident: bytes) -> None:
        is_taken.set()
        assert may_send.wait(20)
        thread.schedule(lambda: order.append(message[1]))

    def flush(whole: Any = stream.flush) -> None:
        may_send.set()
        whole()

    stream.session.send, stream.flush = send, flush
    raw_output.flush_written(stream)
    stream.parent_header = Cell(cell="only")
    print("text", file=stream)
    assert is_taken.wait(20)
    stream.flush()
    stream.pub_thread.schedule(lambda: order.append("idle"))
    may_send.set()

    assert until(lambda: len("".join(order)) == len("text\nidle"))
    assert order == ["text\n", "idle"]


def test_what_a_profiler_says_of_gpus_is_no_cells_output() -> None:
    """Torch 2.15 does where there is no GPU, its line's end by itself; other errors are shown."""
    reader = raw_output.RawReader.__new__(raw_output.RawReader)
    reader._held = ""
    begins = "ERROR:2026-11-26 17:09:22 11923:11923 "
    count = f"{begins}DeviceProperties.cpp:56] gpuGetDeviceCount failed with code "
    written = ["before\n", f"{count}35", "\n", f"{count}100\nloss", " 0.5\n", "after"]
    errors = [f"{count}3", "\n", f"{begins}a.cpp:1] mine", "\n", "ERROR: mine"]

    assert "".join(map(reader._without_noise, written)) == "before\nloss 0.5\nafter"
    assert "".join(map(reader._without_noise, ["\n", *errors])) == "".join(["\n", *errors])


def test_a_forked_child_sends_what_it_prints(stream: Any) -> None:
    """It has no thread that flushes, though a flush was pending in its parent."""
    stream.flush_interval = 60.0
    stream.parent_header = Cell(cell="only")
    print("parent", file=stream)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        print("child", file=stream)
        os.write(writing, stream.session.of("only").encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as sent:
        assert sent.read() == "parent\nchild\n"
    os.waitpid(child, 0)
