"""The agent of a host: it starts ranks, tells how they end, and leaves nothing behind."""

import base64
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nbdist.cluster.agent import agent as agent_program
from nbdist.cluster.kernel.launchers import agents, helper_process
from nbdist.cluster.kernel.launchers.agent_set import END_PROGRAM
from nbdist.cluster.kernel.launchers.agents import BOOTSTRAP, AgentLost, HostAgent, RankExit
from nbdist.engine import fork_server
from nbdist.errors import NbdistError
from nbdist.planner import fake_protocol
from tests.support import processes
from tests.support.ranks import until

COMMAND = [sys.executable, "-c", BOOTSTRAP]
SLEEP = ["-c", "import time; time.sleep(300)"]
Connect = Callable[..., HostAgent]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """Connects to agents of this machine, whose TMPDIR is the test's."""
    connected = []

    def connect(command: list[str] = COMMAND, **variables: str) -> HostAgent:
        environment = {**os.environ, "TMPDIR": str(tmp_path), **variables}
        connected.append(HostAgent("here", command, environment))
        return connected[-1]

    yield connect
    for agent in connected:
        agent.stop()


def opened(agent: HostAgent) -> HostAgent:
    agent.facts(20)
    agent.folder = agent.ask("open", run="run-x").result(10)
    return agent


def start(agent: HostAgent, argv: list[str], rank: int = 0, **env: str) -> int:
    return int(agent.ask("start", rank=rank, argv=argv, env=env).result(10))


def test_an_agent_says_what_its_host_is(connect: Connect) -> None:
    """Python, packages, cores, and a clock that is this machine's."""
    facts = connect(CUDA_VISIBLE_DEVICES="0,3", NBDIST_HOST="n7").facts(20)

    assert facts.hostname == "n7"
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.versions["torch"].startswith("2.")
    assert facts.gpus == 2
    assert facts.cores == len(os.sched_getaffinity(0))
    assert abs(facts.offset_s) <= facts.round_trip_s / 2 + 0.01


def test_what_a_login_script_prints_is_no_message(connect: Connect) -> None:
    """Banners, also in the middle of a line, are passed over."""
    shell = ["sh", "-c", 'echo "Welcome! {"; echo more >&2; exec "$@"', "sh", *COMMAND]
    agent = connect(shell)

    assert agent.facts(20).hostname
    assert agent.words() == "more"


def test_the_end_of_a_rank_is_told_with_what_it_leaves(connect: Connect) -> None:
    """Exit code or signal, last lines, and the files with its number; other files are not sent."""
    agent, ends = opened(connect()), queue.SimpleQueue[RankExit]()
    agent.on_exit = ends.put
    code = (
        "import os, pathlib, sys; f = pathlib.Path(os.environ['FOLDER']); (f / 'boxes').mkdir()\n"
        "(f / 'boxes' / '3').write_bytes(bytes(1000)); (f / 'crash.3').write_text('why')\n"
        "(f / 'crash.13').write_text('another'); print('last words'); sys.exit(4)"
    )
    pid = start(agent, ["-c", code], 3, FOLDER="{folder}")
    end = ends.get(timeout=20)
    start(agent, SLEEP, 5)
    # SIGTERM ends Python at every moment of its start; SIGINT may fail the import of `site` (1).
    agent.ask("signal", rank=5, number=signal.SIGTERM).result(10)

    assert (end.rank, end.pid, end.code, end.tail) == (3, pid, 4, "last words\n")
    assert end.files == {"boxes/3": bytes(1000), "crash.3": b"why"}
    assert ends.get(timeout=20).code == -signal.SIGTERM


def test_what_cannot_be_read_ends_no_other_rank(connect: Connect) -> None:
    """A log of a terabyte, a file that cannot be read: the agent tells the end, and goes on."""
    agent, ends = opened(connect()), queue.SimpleQueue[RankExit]()
    agent.on_exit = ends.put
    code = (
        "import os, pathlib; f = pathlib.Path(os.environ['FOLDER'])\n"
        "os.truncate(f / 'rank3.log', 1 << 40); (f / 'boxes').mkdir()\n"
        "(f / 'boxes' / '3').symlink_to('/proc/self/mem'); (f / 'crash.3').write_text('why')"
    )
    start(agent, ["-c", code], 3, FOLDER="{folder}")
    end = ends.get(timeout=20)

    assert (end.code, end.tail, end.files) == (0, "\0" * 4000, {"crash.3": b"why"})
    assert agent.ask("facts").result(10)["pid"]


def test_a_rank_is_ended_with_its_children(connect: Connect) -> None:
    """Of a rank that is killed, what it has started goes as well; another rank stays."""
    agent, ends = opened(connect()), queue.SimpleQueue[RankExit]()
    agent.on_exit = ends.put
    other = start(agent, SLEEP, 1)
    child = f"import subprocess, sys; subprocess.run([sys.executable, *{SLEEP}])"
    pid = start(agent, ["-c", child])
    assert until(lambda: bool(psutil.Process(pid).children()))
    [grandchild] = psutil.Process(pid).children()
    agent.ask("end", rank=0).result(10)

    assert ends.get(timeout=10).code == -signal.SIGKILL
    assert not processes.is_alive(grandchild)
    assert processes.is_alive(psutil.Process(other))


@pytest.mark.parametrize("how", ["stop", "kill the connection", "kill the agent"])
def test_nothing_is_left_of_a_host(how: str, connect: Connect, tmp_path: Path) -> None:
    """Not when it is told to stop, not when the kernel is gone, not when the agent is killed.

    What the notebook has forked may hold the pipe, which then does not end: it is told in words.
    """
    # As with ssh: what carries the connection is another process than the agent.
    carried = ["sh", "-c", 'cat | "$@" | cat', "sh", *COMMAND]
    agent = opened(connect(COMMAND if how == "stop" else carried))
    pids = [start(agent, SLEEP, rank) for rank in range(2)]
    program = psutil.Process(agent.facts(1).pid)
    if how == "stop":
        assert agent._process.stdin is not None
        descriptor = os.dup(agent._process.stdin.fileno())
        assert agent.stop()
        os.close(descriptor)
    elif how == "kill the connection":
        for process in psutil.Process(agent.pid).children():
            if process != program:
                process.kill()
    else:
        program.kill()

    assert processes.wait_gone([*pids, program]) == []
    assert how == "kill the agent" or until(lambda: list(tmp_path.iterdir()) == [])


def test_a_silent_host_cannot_be_reached(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that says nothing any more is told once; nothing asked of it waits for ever."""
    monkeypatch.setattr(agents, "SILENT_S", 1.5)
    agent, reasons = opened(connect()), queue.SimpleQueue[str]()
    agent.on_lost = reasons.put
    stopped = psutil.Process(agent.facts(1).pid)
    stopped.suspend()
    try:
        asked = agent.ask("facts")
        reason = reasons.get(timeout=20)
        with pytest.raises(AgentLost, match="nothing was heard"):
            asked.result(5)
        with pytest.raises(AgentLost, match="nothing was heard"):
            agent.ask("facts").result(5)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # ended with its connection
            stopped.kill()

    assert reason == agent.lost
    assert reasons.empty()


def test_an_agent_that_hears_nothing_ends_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a cut it ends by itself; the kernel has said long before that it cannot be reached."""
    monkeypatch.setattr(agent_program, "SILENCE_S", 0.2)
    monkeypatch.setattr(
        agent_program, "KernelLink", lambda *_: SimpleNamespace(say=lambda *_a, **_k: 0)
    )
    monkeypatch.setattr(signal, "signal", lambda *_args: None)
    calls: list[object] = []
    monkeypatch.setattr(agent_program.Agent, "end_all", lambda _self: calls.append("end all"))
    monkeypatch.setattr(os, "_exit", calls.append)
    agent_program.serve()

    assert calls == ["end all", 0]


def test_a_command_that_fails_says_why(connect: Connect) -> None:
    """The host is named, and the agent goes on."""
    agent = opened(connect())
    with pytest.raises(NbdistError, match="here: KeyError: 9"):
        agent.ask("signal", rank=9, number=2).result(10)

    assert agent.ask("facts").result(10)["pid"]


def test_a_folder_that_others_can_enter_is_refused(connect: Connect, tmp_path: Path) -> None:
    """The controller's key would not be safe in it."""
    (tmp_path / f"nbdist-{os.getuid()}").mkdir(mode=0o755)
    agent = connect()
    agent.facts(20)
    with pytest.raises(NbdistError, match="only this user can enter"):
        agent.ask("open", run="run-x").result(10)


def test_the_connection_file_is_for_its_owner_alone(connect: Connect) -> None:
    """Whole at once, readable by nobody else, and in the run's folder whatever its name says."""
    agent = opened(connect())
    agent.ask("file", name="../../engine.json", text="{}").result(10)
    path = Path(agent.folder, "engine.json")

    assert (path.read_text(), path.stat().st_mode & 0o777) == ("{}", 0o600)
    assert Path(agent.folder).stat().st_mode & 0o777 == 0o700


def test_what_ssh_says_is_the_reason(connect: Connect) -> None:
    """A connection that ends before the agent came is told in its own words."""
    agent = connect(["sh", "-c", "echo 'ssh: Could not resolve hostname n9' >&2; exit 255"])
    with pytest.raises(AgentLost, match=r"\(exit code 255\). ssh: Could not resolve hostname n9"):
        agent.facts(20)


def test_a_kernel_that_was_stopped_itself_has_lost_nobody(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause of its own it listens before it judges who is silent."""
    agent = opened(connect())
    agent._heard_s -= 3600
    clock = time.monotonic
    monkeypatch.setattr(agents.time, "monotonic", lambda: clock() + 7200)
    assert agent.ask("facts").result(10)["pid"]

    assert agent.lost == ""


def test_an_agent_that_a_batch_system_terminates_tidies_up(connect: Connect) -> None:
    """Its ranks end, also one that takes no SIGTERM; the folder goes; the agent ends well."""
    agent, lost = opened(connect()), queue.SimpleQueue[str]()
    agent.on_lost = lost.put
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1); time.sleep(300)"
    deaf = psutil.Process(start(agent, ["-u", "-c", code]))
    assert until(lambda: agent.ask("tail", rank=0).result(10) == "1\n")
    psutil.Process(agent.pid).terminate()

    assert lost.get(timeout=20) == "the connection ended (exit code 0)."
    assert processes.wait_gone([deaf], 5) == []
    assert not Path(agent.folder).exists()


def find(agent: HostAgent) -> HostAgent:
    """Another kernel's connection to the ranks that an agent of this machine has kept."""
    return HostAgent("here", COMMAND, os.environ, agent.folder)


def test_kept_ranks_are_found_again(connect: Connect) -> None:
    """Another connection tells the processes that live, and each end that nobody was there for."""
    agent, ends = opened(connect()), queue.SimpleQueue[RankExit]()
    agent.ask("keep", seconds=300.0).result(10)
    pids = {rank: start(agent, SLEEP, rank) for rank in range(3)}
    agent.ask("end", rank=0).result(10)
    agent.leave()
    os.kill(pids[1], signal.SIGTERM)
    again = find(agent)
    again.on_exit = ends.put
    again.facts(20)

    assert again.pids(10) == pids
    ends_by_rank = {end.rank: end for end in (ends.get(timeout=20), ends.get(timeout=20))}
    assert {rank: end.code for rank, end in ends_by_rank.items()} == {0: -9, 1: -15}
    assert [ends_by_rank[rank].pid for rank in (0, 1)] == [pids[0], pids[1]]
    again.ask("signal", rank=2, number=signal.SIGINT).result(10)
    assert (last := ends.get(timeout=20)).code == -signal.SIGINT, last
    start(again, SLEEP, 2)
    assert again.stop()
    assert not Path(agent.folder).exists()


@pytest.mark.parametrize("how", ["not kept", "not any more", "time over", "folder removed"])
def test_ranks_that_nobody_keeps_end(how: str, connect: Connect) -> None:
    """Those of a kernel that has not asked for it, whose time is over, whom nobody could find."""
    agent = opened(connect())
    for seconds in {"not kept": [], "not any more": [300.0, 0.0], "time over": [0.2]}.get(
        how, [300.0]
    ):
        agent.ask("keep", seconds=seconds).result(10)
    rank = psutil.Process(start(agent, SLEEP))
    agent.leave()
    if how == "folder removed":
        shutil.rmtree(agent.folder)

    assert processes.wait_gone([rank, agent.pid]) == []
    assert not Path(agent.folder).exists()
    again = find(agent)
    with pytest.raises(AgentLost, match="its agent has ended, and its ranks with it"):
        again.facts(20)


def test_the_newer_kernel_has_the_ranks(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before cannot reach them any more, and ends nothing; paths may be long."""
    monkeypatch.setattr(agents, "SILENT_S", 1.5)
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    agent, lost = opened(connect(TMPDIR=str(deep))), queue.SimpleQueue[str]()
    agent.is_kept, agent.on_lost = True, lost.put
    agent.ask("keep", seconds=300.0).result(10)
    pid = start(agent, SLEEP)
    again = find(agent)
    again.facts(20)

    assert "another kernel has come for its ranks" in lost.get(timeout=20)
    assert again.pids(10) == {0: pid}
    assert processes.is_alive(psutil.Process(pid))
    assert again.stop()


def test_a_lost_agent_is_ended_by_the_next_one(connect: Connect) -> None:
    """A host that was cut off, and is back: no rank of before is left beside the new ones."""
    agent = opened(connect())
    agent.ask("keep", seconds=300.0).result(10)
    rank = psutil.Process(start(agent, SLEEP))
    agent.leave()
    again = connect()
    again.facts(20)
    folder = again.ask("open", run="run-x", former=agent.folder).result(10)

    assert not processes.is_alive(rank)
    assert folder != agent.folder
    assert not Path(agent.folder).exists()


def test_a_program_ends_kept_ranks_without_a_kernel(connect: Connect) -> None:
    """Of several hosts at once; those whose agents have ended are none to be told of."""
    agent = opened(connect())
    agent.ask("keep", seconds=300.0).result(10)
    rank = psutil.Process(start(agent, SLEEP))
    agent.leave()
    hosts = [("here", COMMAND, agent.folder), ("there", ["sh", "-c", "exit 255"], "/f")]
    words = [sys.executable, "-m", END_PROGRAM, json.dumps(hosts)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    again = subprocess.run([*words[:-1], json.dumps(hosts[:1])], check=False, timeout=30)

    assert (ended.returncode, ended.stderr.strip()) == (
        1,
        "there: the connection ended (exit code 255).",
    )
    assert not processes.is_alive(rank)
    assert not Path(agent.folder).exists()
    assert again.returncode == 0


HELLO = {
    "event": "hello", "hostname": "n1", "pid": 1, "python": "3.11.2", "executable": "python3",
    "versions": {}, "gpus": 0, "cores": 1, "clock_s": 0.0, "temporary": "/tmp", "free_bytes": 1,
}  # fmt: skip
END = {"event": "exit", "rank": 0, "pid": 1, "code": 0, "tail": "", "files": {}}
BOMB = base64.b64encode(zlib.compress(bytes(agent_program.LARGEST_FILE_BYTES + 1))).decode()
EMPTY = base64.b64encode(zlib.compress(b"")).decode()


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({**HELLO, "python": 3}),
        json.dumps({**HELLO, "versions": {"torch": ["2.13"]}}),
        json.dumps({**HELLO, "pid": None}),
        json.dumps({**END, "files": {"../escaped.0": EMPTY}}),
        json.dumps({**END, "files": {"/escaped.0": EMPTY}}),
        json.dumps({**END, "files": {"profile/security/crash.0": EMPTY}}),
        json.dumps({**END, "files": {"crash.0": BOMB}}),
        json.dumps({**END, "files": {"crash.0": "////"}}),
        json.dumps({**END, "rank": "0"}),
        json.dumps({**END, "files": 1}),
        json.dumps([HELLO]),
        "[" * 100_000,
        "{",
    ],
)
def test_a_host_that_sends_something_else_is_left(text: str, connect: Connect) -> None:
    """Names of files that lead elsewhere, other types, what grows when it is unpacked: told."""
    ends = queue.SimpleQueue[RankExit]()
    said = f"{agent_program.MARK}{text}\n"
    agent = connect(
        [sys.executable, "-c", "import sys; print(sys.argv[1], flush=True); input()", said]
    )
    agent.on_exit = ends.put
    with pytest.raises(AgentLost, match="it has sent what no agent sends"):
        agent.facts(20)

    assert ends.empty()


def test_a_line_without_an_end_fills_no_memory(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is passed over in pieces, and so is what stands in the middle of it."""
    monkeypatch.setattr(helper_process, "LONGEST_LINE", 1000)
    shell = ["sh", "-c", 'head -c 5000 /dev/zero; echo; exec "$@"', "sh", *COMMAND]

    assert connect(shell).facts(20).hostname


def test_messages_of_all_helpers_begin_alike() -> None:
    """Two programs that cannot import the agent have its mark as a text of their own."""
    assert fork_server.MARK == fake_protocol.MARK == agent_program.MARK


def test_a_rank_starts_in_no_folder_of_somebody_else(connect: Connect, tmp_path: Path) -> None:
    """It would import what lies there. Where the notebook's folder has the same owner it may."""
    agent, ends = opened(connect()), queue.SimpleQueue[RankExit]()
    agent.on_exit = ends.put
    others = Path("/usr")
    if os.getuid() == 0:
        others = tmp_path / "others"
        others.mkdir()
        os.chown(others, 4242, 4242)
    owner = others.stat().st_uid

    def start_in(folder: Path, owner: int) -> Path:
        code = ["-c", "import os; print(os.getcwd())"]
        arguments = {"argv": code, "env": {}, "folder": str(folder), "owner": owner}
        agent.ask("start", rank=0, **arguments).result(10)
        return Path(ends.get(timeout=20).tail.strip())

    assert start_in(tmp_path, owner) == tmp_path
    assert start_in(others, owner) == others
    assert start_in(others, os.getuid()) == Path.cwd()
    assert start_in(tmp_path / "missing", owner) == Path.cwd()
