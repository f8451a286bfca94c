"""The kernel's end of an agent: one child process per host, which carries commands and messages.

Run as a program (`main`), it ends agents that keep their ranks when no kernel is left to do so.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nbdist.cluster.agent import agent, guardian
from nbdist.cluster.agent.agent import GONE
from nbdist.cluster.hosts import HostFacts
from nbdist.cluster.kernel.launchers.helper_process import HelperProcess
from nbdist.core.exit_cause import exit_words
from nbdist.core.typed_json import Misfit, Value
from nbdist.errors import NbdistError

# The other end's program: it reads the agent's text from its input, and goes on as the agent.
BOOTSTRAP = (
    "import sys;exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())),'','exec'))"
)
BEAT_S = 1.0
# Five beats missed: the host is gone, or cut off. ipyparallel alone would need 30 s to see it.
SILENT_S = 5.0
STOP_S = 8.0
# How long an agent that keeps its ranks is looked for when they are to end.
FIND_S = 5.0
# A host's message is accepted only if an agent could have sent it.
RANK_FILE = re.compile(r"(boxes/)?([a-z]+\.)?[0-9]+")


@dataclass(frozen=True, slots=True)
class RankExit:
    """The end of a rank's process, as its agent has reported it.

    Attributes:
        code: Its exit code, negative for a signal.
        tail: The end of the process's output outside of cells.
        files: Relative path -> content of the files that it has left for the kernel.
    """

    rank: int
    pid: int
    code: int
    tail: str
    files: Mapping[str, bytes] = field(default_factory=dict)


class AgentLost(NbdistError):
    """A host's agent cannot be reached any more; the message says how that was noticed."""


class HostAgent(HelperProcess):
    """A connection to the agent of one host, by the process that carries it.

    Its callbacks are called in a thread of its own.

    Attributes:
        folder: The agent's folder on its host, once it has one.
        is_kept: The agent waits for another kernel when this one hangs up, or is not heard.
        on_exit: Called with the end of each rank.
        on_lost: Called once, with the reason, when the host cannot be reached any more.
    """

    lost_error = AgentLost

    def __init__(
        self,
        host: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: str = "",
    ):
        """Start the process that carries the connection: `command` runs BOOTSTRAP over there.

        With a `folder` it leads to the agent that has kept its ranks in it, else to a new one.

        Raises:
            OSError: If there is no such program.
        """
        self.host = host
        self.on_exit: Callable[[RankExit], object] = lambda _: None
        self.on_lost: Callable[[str], object] = lambda _: None
        self.folder = folder
        self.is_kept = False
        self._is_relay = bool(folder)
        self._facts: Future[HostFacts] = Future()
        self._is_stopping = False
        self._began_s = self._woke_s = time.monotonic()
        super().__init__(host, command, environment)
        self._outbox.put(_program(folder))

    def facts(self, deadline_s: float) -> HostFacts:
        """Wait for the facts on the host.

        Raises:
            AgentLost: If the agent did not come, with the words of ssh or srun.
        """
        try:
            return self._facts.result(deadline_s)
        except TimeoutError:
            reason = f"no answer within {deadline_s:.0f} s. {self.words()}".rstrip()
            self._lose(reason)
            raise AgentLost(reason) from None

    def pids(self, deadline_s: float) -> dict[int, int]:
        """Rank -> its newest process over there; ends of ranks are reported again before.

        Raises:
            AgentLost: If the agent does not answer, or with something else.
        """
        try:
            pids = Value(self.ask("ranks").result(deadline_s), "ranks").mapping()
            return {int(rank): int(pid) for rank, pid in pids.items()}
        except (TimeoutError, Misfit, ValueError, TypeError) as error:
            reason = f"it did not tell its ranks ({type(error).__name__}: {error})"
            self._lose(reason)
            raise AgentLost(reason) from None

    def stop(self, deadline_s: float = STOP_S) -> bool:
        """Let the agent end its ranks and itself; False where it was not seen to end."""
        was_lost, self._is_stopping = bool(self.lost), True
        try:
            # Where no agent has come yet, ssh would go on trying.
            self.say_stop(deadline_s if self._facts.done() else 0.0)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return not was_lost

    def leave(self) -> None:
        """Hang up; an agent that keeps its ranks goes on without this kernel."""
        self._is_stopping = True
        self.hang_up()

    def _next(self) -> bytes | None:
        """The next request, or a beat without one; a silent host counts as lost."""
        # A kernel that was stopped itself has heard no host: it listens first.
        now_s = time.monotonic()
        if now_s - self._woke_s > 2 * BEAT_S:
            self._heard_s = now_s
        self._woke_s = now_s
        silent_s = now_s - self._heard_s
        if self._facts.done() and silent_s > SILENT_S:
            self._lose(f"nothing was heard from it for {silent_s:.0f} s")
            return None
        try:
            return self._outbox.get(timeout=BEAT_S)
        except queue.Empty:
            return b'{"id": 0, "do": "beat"}\n' if self._facts.done() else b""

    def _take_line(self, line: bytes) -> None:
        try:
            super()._take_line(line)
        except (Misfit, ValueError, KeyError, TypeError, RecursionError, zlib.error) as error:
            self._lose(f"it has sent what no agent sends ({type(error).__name__}: {error})")

    def _take(self, event: str, content: dict[str, Any]) -> None:
        if event == "exit":
            files = {
                name: _unpack(name, text)
                for name, text in Value(content.pop("files"), "files").mapping().items()
            }
            self.on_exit(replace(Value(content, event).record(RankExit), files=files))
        elif event == "lost":
            self._lose(str(content["reason"]))
        elif event == "hello" and not self._facts.done():
            now_s, trip_s = time.time(), time.monotonic() - self._began_s
            facts = Value(content, event).record(HostFacts)
            offset_s = facts.clock_s - (now_s - trip_s / 2)
            self._facts.set_result(replace(facts, offset_s=offset_s, round_trip_s=trip_s))

    def _take_end(self) -> None:
        try:
            code = self._process.wait(SILENT_S)
        except subprocess.TimeoutExpired:
            self._lose("it has hung up: another kernel has come for its ranks")
            code = self._process.wait()
        self._lose(f"the connection ended ({exit_words(code)}). {self.words()}".rstrip())

    def _lose(self, reason: str) -> bool:
        if not super()._lose(reason):
            return False
        with contextlib.suppress(InvalidStateError):  # the facts are there
            self._facts.set_exception(AgentLost(reason))
        if not self._is_stopping:
            # A step of Slurm ends with the srun that has started it, and its ranks with the step.
            if self._is_relay or not self.is_kept:
                self._process.kill()
            self.on_lost(reason)
        return True


def _unpack(name: str, packed: str) -> bytes:
    """The content of a rank's file.

    Raises:
        ValueError: If an agent sends no such name, or no file of such a size.
    """
    unpacker = zlib.decompressobj()
    content = unpacker.decompress(base64.b64decode(packed), agent.LARGEST_FILE_BYTES)
    if not RANK_FILE.fullmatch(name) or not unpacker.eof:
        raise ValueError(f"the file {name[:99]!r}")
    return content


def _program(folder: str) -> bytes:
    """The agent's text with the guardian's in it, behind its length, as BOOTSTRAP reads it.

    With a folder it joins the connection with the agent that is there.
    """
    call = f"relay({folder!r})" if folder else "serve()"
    sources = [Path(str(module.__file__)).read_text() for module in (guardian, agent)]
    text = (
        "import sys, types\n"
        f"for name, source in zip(('guardian', 'agent'), {sources!r}):\n"
        "    module = sys.modules['nbdist_' + name] = types.ModuleType('nbdist_' + name)\n"
        "    exec(compile(source, name + '.py', 'exec'), module.__dict__)\n"
        f"module.{call}\n"
    ).encode()
    return b"%d\n%s" % (len(text), text)


def end_kept(host: str, command: Sequence[str], folder: str) -> str:
    """Let the agent of a folder end its ranks and itself; why it may not have, or ""."""
    try:
        agent = HostAgent(host, command, os.environ, folder)
    except OSError as error:
        return f"{host}: {error}"
    with contextlib.suppress(AgentLost):  # ended long ago, or not reached
        agent.facts(FIND_S)
    return "" if agent.stop() or agent.lost == GONE else f"{host}: {agent.lost or 'it did not end'}"


def main() -> None:
    """End kept ranks on all hosts at once; the argument is JSON: a list of `end_kept`'s arguments.

    The guardian and `nbdist stop` run this to end a run without its kernel.
    """
    hosts = json.loads(sys.argv[1])
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        problems = [*filter(None, pool.map(lambda arguments: end_kept(*arguments), hosts))]
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
