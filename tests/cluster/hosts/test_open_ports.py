"""Every port on every host of a cluster: who listens where, and what a stranger can do there."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbdist.cluster.kernel.launcher import CONTROLLER_PROGRAM
from tests.support import hosts as lab

ROOT = Path(__file__).resolve().parents[3]
NODES = ("node1", "node2")  # with two ranks each; node3 is a stranger
STRANGER = "node3"
# torch's store and Gloo's device of each rank; ipyparallel's ports for engines.
PORTS = {"head": 9, "node1": 3, "node2": 2}
MOST_GROWTH_BYTES = 40e6

pytestmark = [
    pytest.mark.skipif(bool(why := lab.missing("ss", "sshd")), reason=why),
]

# A notebook without a browser: a line is a cell, and its answer what it showed.
NOTEBOOK = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

shell = InteractiveShell.instance()
for line in sys.stdin:
    with capture_output() as shown:
        result = shell.run_cell(json.loads(line))
    texts = [shown.stdout, shown.stderr, *(o.data.get("text/plain", "") for o in shown.outputs)]
    error = result.error_before_exec or result.error_in_exec
    answer = {"text": "\\n".join(texts), "error": repr(error) if error else ""}
    print(json.dumps(answer), flush=True)
"""


class Notebook:
    """A notebook on the head; whatever it shows outside of a cell is an error.

    Attributes:
        said: What the start has shown.
    """

    said = ""

    def __init__(self, hosts: lab.Hosts) -> None:
        self._process = hosts.popen(
            hosts.head,
            [sys.executable, "-c", NOTEBOOK],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, cell: str, *, fails: bool = False) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(cell) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line.startswith('{"text": '), line + self._process.stdout.read()
        answer = json.loads(line)
        assert bool(answer["error"]) == fails, answer
        return str(answer["text"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@pytest.fixture(scope="module")
def hosts() -> Iterator[lab.Hosts]:
    """Each calls itself 127.0.1.1, as Debian's installer has it."""
    with lab.Hosts(3, named_loopback=("head", *NODES)) as three:
        three.start_sshd(NODES)
        yield three


@pytest.fixture(scope="module")
def notebook(hosts: lab.Hosts) -> Iterator[Notebook]:
    notebook = Notebook(hosts)
    notebook.run("%load_ext nbdist")
    notebook.said = notebook.run("%dist_init --hosts node1:2,node2:2 --grace 0")
    notebook.run("%%distributed\nkept = torch.arange(3.0) + rank")
    yield notebook
    notebook.close()


def beyond(hosts: lab.Hosts) -> dict[str, Counter[str]]:
    """Host -> address -> ports at which somebody but sshd listens beyond the loopback."""
    listeners = {name: hosts.listeners(name) for name in hosts.names}
    return {
        name: Counter(
            entry.rpartition(":")[0]
            for entry in entries
            if not entry.startswith(("127.", "[::1]")) and not entry.endswith(":22")
        )
        for name, entries in listeners.items()
    }


def targets(hosts: lab.Hosts, host: str) -> list[tuple[str, int]]:
    address = hosts.address(host)
    entries = [entry.rpartition(":") for entry in hosts.listeners(host)]
    return [(address, int(port)) for ip, _, port in entries if ip == address]


STEPS = {
    "the first step": """
%%distributed
model = accelerator.prepare(torch.nn.Linear(4, 4))
optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
""",
    "groups and a mesh": """
%%distributed
pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
total = torch.ones(1)
dist.all_reduce(total, group=mesh.get_group("a"))
""",
    "another strategy": "%dist_strategy fsdp",
    "a rank in the place of another": "%dist_restart 3",
    "numbers for Prometheus": "%dist_monitor --prometheus 0",
}


def test_who_listens_where(hosts: lab.Hosts, notebook: Notebook) -> None:
    """One address per host, whatever the ranks have done; the rest is on the loopback."""
    expected = {
        name: Counter({hosts.address(name): PORTS[name]} if name in PORTS else {})
        for name in hosts.names
    }
    seen = {"the start": beyond(hosts)}
    for step, cell in STEPS.items():
        notebook.run(cell.strip())
        seen[step] = beyond(hosts)
    said = notebook.run("%%distributed\nif rank: dist.all_reduce(torch.ones(1))", fails=True)
    seen["new connections of all groups"] = beyond(hosts)

    assert seen == dict.fromkeys(seen, expected)
    assert "rank 0" in said
    assert (
        "what GLOO and torch's store send is neither encrypted nor authenticated (5 ports on eth0, "
        f"{hosts.address('node1')}: 3, {hosts.address('node2')}: 2; open to these hosts alone)"
    ) in notebook.said


def test_no_key_can_be_read_by_others(hosts: lab.Hosts, notebook: Notebook) -> None:
    """It is in no command line and no environment, and its files are their owner's alone."""
    key = engine_file(hosts)["curve_serverkey"]
    lines, variables, files = [], [], []
    for name in hosts.names:
        for pid in hosts.pids(name):
            lines.append((hosts.path(name, f"/proc/{pid}/cmdline")).read_bytes())
            variables.append((hosts.path(name, f"/proc/{pid}/environ")).read_bytes())
        files += [
            (path.name, path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o077)
            for path in hosts.path(name, "/tmp").glob("nbdist-*/**/*")
            if path.is_file() and key.encode() in path.read_bytes()
        ]

    assert len(lines) > len(hosts.names)
    assert not [line for line in lines if key.encode() in line]
    assert not [text for text in variables if key.encode() in text]
    assert {mode for _, mode, _ in files} == {0o600}
    assert {mode for *_, mode in files} == {0}
    assert Counter(name for name, *_ in files)["engine.json"] == len(NODES)


def engine_file(hosts: lab.Hosts) -> dict[str, Any]:
    """The controller's connection file for engines."""
    (path,) = hosts.path("head", "/tmp").glob("nbdist-*/**/ipcontroller-*-engine.json")
    connection: dict[str, Any] = json.loads(path.read_text())
    return connection


def test_a_stranger_changes_nothing(hosts: lab.Hosts, notebook: Notebook) -> None:
    """A scan, handshakes without and with a wrong key, and 1,000 messages to every kind of port."""
    key = engine_file(hosts)["curve_serverkey"]
    controller = targets(hosts, "head")
    before = controller_memory(notebook)
    attack = {
        "addresses": [hosts.address(name) for name in ("head", "node1")],
        "controller": controller,
        "password_free": [target for node in NODES for target in targets(hosts, node)],
        "server_key": key,
    }
    answer = hosts.run(
        STRANGER,
        [sys.executable, "-m", "tests.support.attacks"],
        cwd=ROOT,
        input=json.dumps(attack),
        timeout_s=120,
    )
    result = json.loads(answer.stdout)
    after = notebook.run(
        "%%distributed\n"
        "total = torch.ones(1) * rank\n"
        "dist.all_reduce(total, group=dist.new_group([0, 1, 2, 3]))\n"
        "print(total.item())"
    )
    variables = notebook.run("%%rank [0-2]\nprint(kept.sum().item() - 3 * rank)")

    assert result["open"][hosts.address("head")] == sorted(port for _, port in controller)
    assert result["open"][hosts.address("node1")] == [22]
    assert set(result["plain"]) == set(result["wrong key"]) == {"failed"}
    assert "succeeded" in result["right key"]  # so a handshake would have been seen
    open_to_all = {f"{address}:{port}" for address, port in controller}
    assert {name for name, n in result["taken"].items() if n} == open_to_all
    assert "[0-3] 6.0" in after
    assert "[0-2] 3.0" in variables  # rank 3 is a new process
    assert controller_memory(notebook) - before < MOST_GROWTH_BYTES


def controller_memory(notebook: Notebook) -> int:
    """Bytes of the controller, which has the notebook's network, and of its child."""
    network = Path(f"/proc/{notebook.pid}/ns/net").readlink()
    controllers = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(CONTROLLER_PROGRAM) in (process.info["cmdline"] or ())
        and Path(f"/proc/{process.pid}/ns/net").readlink() == network
    ]
    assert controllers
    return sum(process.memory_info().rss for process in controllers)
