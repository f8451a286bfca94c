"""What a notebook does on one host, it does on two: nothing of the kernel's machine is shared.

One notebook on the head, four ranks on two nodes, for all tests of this module; each begins and
ends with idle ranks. Only /srv is the same on all hosts. Whatever the ranks have done, every port
on every host is looked at in the end: who listens where, and what a stranger can do there.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbdist.cluster.kernel.launcher import CONTROLLER_PROGRAM
from tests.cluster.hosts.conftest import SSH, skip_without
from tests.support.cells import Cell
from tests.support.host_kernel import HostKernel
from tests.support.hosts import SHARED, Hosts
from tests.support.kernel import Kernel

# What does not depend on how ranks were started.
by_ssh_alone = pytest.mark.parametrize("launcher", ["ssh"], indirect=True, scope="module")

ROOT = Path(__file__).resolve().parents[3]
HOSTS = ("node1", "node1", "node2", "node2")
NODES = ("node1", "node2")
STRANGER = "node3"
# torch's store and Gloo's device of each rank; ipyparallel's ports for engines.
PORTS = {"head": 9, "node1": 3, "node2": 2}
MOST_GROWTH_BYTES = 40e6
START_S = 100.0
# Fixture of the hosts, and how ranks are started there.
LAUNCHERS = {
    "ssh": ("hosts", "%dist_init --profile ssh -n 4 --hosts node1:2,node2:4"),
    "slurm": ("slurm", "%dist_init --profile slurm -n 4 --gpus-per-node 2 --gpus none"),
}
VARIABLES = {
    "IPYTHONDIR": f"{SHARED}/ipython", "MPLCONFIGDIR": f"{SHARED}/matplotlib",
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip

# The same model is trained by one process alone, on each rank, for what its losses must be.
MODEL = """%%distributed
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down_proj(torch.tanh(self.up_proj(x)))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
def made():
    torch.manual_seed(1)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)
def trained(model, optimizer, backward, batches):
    losses = []
    for x in batches:
        loss = model(x).pow(2).mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
torch.manual_seed(0)
data = torch.randn(9, 8, 8)
expected = trained(*made(), torch.Tensor.backward, data)
model, optimizer = accelerator.prepare(*made())
def wrong_by(first, last):
    losses = trained(model, optimizer, accelerator.backward, data[first:last])
    return max(abs(a - b) for a, b in zip(losses, expected[first:last], strict=True)) > 1e-5
"""


@pytest.fixture(scope="module", params=["ssh", pytest.param("slurm", marks=pytest.mark.more_hosts)])
def launcher(request: pytest.FixtureRequest) -> tuple[Hosts, str]:
    """Hosts, and the cell that starts ranks on them."""
    name, start = LAUNCHERS[request.param]
    return request.getfixturevalue(name), start


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """With sshd; each calls itself 127.0.1.1, as Debian's installer has it."""
    skip_without(*SSH)
    with Hosts(named_loopback=("head", *NODES)) as up:
        up.start_sshd()
        yield up


@pytest.fixture(scope="module")
def lan(launcher: tuple[Hosts, str]) -> Hosts:
    """The hosts of `kernel`."""
    return launcher[0]


@pytest.fixture(scope="module")
def started(launcher: tuple[Hosts, str]) -> Iterator[tuple[Kernel, str]]:
    """A notebook's kernel on the head, and what the start of its ranks has shown."""
    hosts, start = launcher
    with HostKernel(hosts, hosts.head, VARIABLES) as kernel:
        kernel.run("%load_ext nbdist")
        started = kernel.run(start, START_S)
        assert started.status == "ok", started.visible
        kernel.run("import nbdist\nsession = nbdist.session()\nsession.grace_s = 0")
        yield kernel, started.visible
        stopped = kernel.run("%dist_shutdown", START_S)
        assert stopped.status == "ok", stopped.visible


@pytest.fixture(scope="module")
def kernel(started: tuple[Kernel, str]) -> Kernel:
    """With ranks 0-1 on node1 and 2-3 on node2."""
    return started[0]


@pytest.fixture(scope="module")
def trained(kernel: Kernel) -> Kernel:
    """With a model that has been trained under ddp, fsdp and tp, three steps each."""
    assert check(kernel.run(MODEL + "wrong_by(0, 3)")) == "[0-3] False"
    moved = check(kernel.run("%dist_strategy fsdp"))
    assert check(kernel.run("%%distributed\nwrong_by(3, 6)")) == "[0-3] False"
    check(kernel.run(f"%dist_save {SHARED}/step6"))
    again = check(kernel.run("%dist_strategy tp --tp 4"))
    assert check(kernel.run("%%distributed\nwrong_by(6, 9)")) == "[0-3] False"
    assert "ddp, dp 4 -> fsdp, dp 4" in moved
    assert "fsdp, dp 4 -> tp, tp 4" in again
    return kernel


def check(cell: Cell) -> str:
    """What a cell shows that has to end well."""
    assert cell.status == "ok", cell.visible
    return cell.visible.strip()


def test_ranks_cells_and_their_output(kernel: Kernel) -> None:
    """Ranks lie on their hosts; what all print stands once; a collective crosses the hosts."""
    status = check(kernel.run("%dist_status"))
    shown = check(
        kernel.run(
            "%%distributed\nimport os\nprint('same')\nprint(local_rank, os.uname().nodename)\n"
            "x = torch.ones(1) * (rank + 1)\ndist.all_reduce(x)\nx.item()"
        )
    )

    rows = re.findall(r"^ +(\d)  (\w+) +\d+  cpu +idle +[\d.]+ MB host$", status, re.MULTILINE)
    assert status.startswith("4 ranks on 2 hosts, gloo, ")
    assert rows == [(str(rank), host) for rank, host in enumerate(HOSTS)]
    assert shown.splitlines() == [
        "[0-3] same", "[0] 0 node1", "[1] 1 node1", "[2] 0 node2", "[3] 1 node2", "[0-3] 10.0",
    ]  # fmt: skip


def test_variables_without_a_memory_in_common(kernel: Kernel, lan: Hosts) -> None:
    """A large one is pushed to all ranks and pulled from one, by way of no file of any host."""
    before = {host: sorted(lan.path(host, "/dev/shm").iterdir()) for host in lan.names}
    check(kernel.run("import numpy as np\nbig = np.arange(500_000.0)\n%dist_push big"))
    sums = check(
        kernel.run("%%distributed\nmine = torch.from_numpy(big) * rank\nmine.sum().item()")
    )
    pulled = kernel.run("%dist_pull mine --ranks 2\nprint(mine.shape, (mine == 2 * big).all())")
    after = {host: sorted(lan.path(host, "/dev/shm").iterdir()) for host in lan.names}

    assert sums.splitlines() == [f"[{rank}] {rank * 124999750000.0}" for rank in range(4)]
    assert pulled.text.strip() == "(500000,) True"
    assert [path for path in after["head"] if "nbdist" in path.name] == []
    assert {host: len(paths) for host, paths in after.items()} == {
        host: len(paths) for host, paths in before.items()
    }


def test_a_hang_is_told_and_ended(kernel: Kernel) -> None:
    """With its line and ranks, from boxes that lie on other hosts; variables and groups stay."""
    hung = kernel.run(
        "%%distributed\nheld = rank\nx = torch.ones(1)\nif rank:\n    dist.all_reduce(x)"
    )
    after = check(
        kernel.run("%%distributed\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item() + held")
    )

    hung.check_failure(
        "Deadlock",
        r"ranks 1-3 wait in all_reduce\(float32\[1\]\) at line 5 of cell \[\d+\]: dist.all_reduce",
        "rank 0 finished without calling it",
        "ranks 0-3 are back, variables kept, groups recovered",
    )
    assert after.splitlines() == [f"[{rank}] {4.0 + rank}" for rank in range(4)]


def test_an_interrupt_reaches_the_ranks(kernel: Kernel) -> None:
    """Of a sleep, and of a collective that hangs; then all go on."""
    for code in (
        "import time\ntime.sleep(60)",
        "if rank != 3:\n    dist.barrier()\nelse:\n    input_",
    ):
        kernel.run("session.grace_s = 60")
        running = kernel.start(f"%%distributed\nprint('here', flush=True)\n{code}")
        kernel.wait_output(running, "here")
        kernel.interrupt()
        ended = kernel.finish(running, 30)
        assert ended.status == "error"
    kernel.run("session.grace_s = 0")

    assert check(kernel.run("%%distributed\ny = torch.ones(1)\ndist.all_reduce(y)\ny.item()")) == (
        "[0-3] 4.0"
    )


def test_a_model_goes_from_strategy_to_strategy(trained: Kernel) -> None:
    """Its losses are those of one process, before and after; that is what `trained` has done."""
    shown = check(trained.run("%dist_strategy"))

    assert shown.startswith("strategy: tp, tp 4")


def test_a_checkpoint_goes_where_all_hosts_see_it(trained: Kernel, lan: Hosts) -> None:
    """Saved under fsdp, loaded under tp; a folder that one host has for itself is refused."""
    loaded = check(trained.run(f"%dist_load {SHARED}/step6"))
    again = check(trained.run("%%distributed\nwrong_by(6, 9)"))
    exported = check(trained.run("%dist_save --export /tmp/weights.safetensors"))
    saving = trained.run("%dist_save /tmp/here/step9")
    lan.run("node1", ["cp", "-r", f"{SHARED}/step6", "/tmp/step6"])
    loading = trained.run("%dist_load /tmp/step6")
    unchanged = check(trained.run("%%distributed\nwrong_by(0, 1)"))  # step 10 is not step 1

    assert "step6 loaded at step 6: model, optimizer" in loaded
    assert "tp, tp 4, saved under fsdp, dp 4" in loaded
    assert (again, unchanged) == ("[0-3] False", "[0-3] True")
    saving.check_failure(
        "CheckpointError",
        "/tmp/here/step9 was not saved: rank 0 has made its folder on node1, and ranks 2-3 on "
        "node2 cannot see it. Save to a folder that all hosts share",
    )
    assert exported.splitlines()[1] == "rank 0 has written it on node1"
    assert lan.path("node1", "/tmp/weights.safetensors").exists()
    assert list(lan.path("node1", "/tmp/here").iterdir()) == []
    assert not lan.path("node2", "/tmp/here").exists()
    loading.check_failure(
        "CheckpointError",
        r"/tmp/step6 is not the same on all hosts: ranks 0-1 on node1: a checkpoint of step 6, "
        r"saved by 4 ranks; ranks 2-3 on node2: No nbdist checkpoint found at /tmp/step6",
        "Load from a folder that all hosts share",
    )


@pytest.mark.more_hosts
def test_the_panel_and_the_monitor_know_ranks_elsewhere(kernel: Kernel) -> None:
    """Memory and doing of every rank, which the kernel cannot read from its own /proc."""
    state = check(
        kernel.run(
            "import json, time\nfrom nbdist.commands.panel import PANEL\n%dist_panel\n"
            "end_s = time.monotonic() + 30\n"
            "while any(row.memory_bytes is None for row in PANEL.state().ranks):\n"
            "    assert time.monotonic() < end_s\n    time.sleep(0.02)\n"
            "print(json.dumps([(row.rank, row.host, row.kind, row.memory_bytes > 1e8)"
            " for row in PANEL.state().ranks]))"
        )
    )
    monitor = check(kernel.run("%dist_monitor"))
    kernel.run("PANEL.close()\n%dist_monitor --off")

    assert json.loads(state.splitlines()[-1]) == [
        [rank, host, "idle", True] for rank, host in enumerate(HOSTS)
    ]
    assert re.findall(r"^ +(\d)  idle .*?\d+\.\d+ MB", monitor, re.MULTILINE) == list("0123")


@pytest.mark.more_hosts
def test_a_trace_has_all_ranks_by_one_clock(trained: Kernel, lan: Hosts) -> None:
    """Both hosts have this machine's clock: none is moved, which one line tells."""
    shown = check(trained.run("%%dist_profile --steps 2\nwrong_by(0, 3)"))
    check(trained.run(f"%dist_trace --save {SHARED}/traces"))
    notes = [line for line in shown.splitlines() if "clock" in line]

    assert re.search(r"^ +\d +[\d.]+( +[\d.]+){6}$", shown, re.MULTILINE), shown
    assert re.search(r"trace of ranks 0-3, [\d.]+ m?s, 2 steps of ", shown)
    assert len(notes) == 1
    assert re.match(
        r"The clocks of node1 and of node2 agree as far as their collectives show, within "
        r"[\d.]+ ms: nothing was shifted\.",
        notes[0],
    )
    assert sorted(path.name for path in lan.path("head", f"{SHARED}/traces").iterdir()) == [
        "all_ranks.json.gz", *(f"rank{rank}.json.gz" for rank in range(4)),
    ]  # fmt: skip


@pytest.mark.more_hosts
def test_memory_and_a_plan_are_of_all_ranks(trained: Kernel) -> None:
    """Each rank's peak, fetched over the wire; the plan divides a host's memory by its ranks."""
    memory = check(trained.run("%%dist_memory\nwrong_by(0, 1)"))
    plan = check(trained.run("%dist_plan model --engine formulas"))

    assert re.findall(r"^ +(\d)  [\d.]+ .?B ", memory, re.MULTILINE) == list("0123")
    gigabytes, share = (
        re.search(r"CPU of the ranks' host \(([\d.]+) GB\)", plan),
        re.search(r"on 4 ranks with their host's CPU, ([\d.]+) GB each", plan),
    )
    assert gigabytes is not None, plan
    assert share is not None, plan
    assert float(share[1]) == pytest.approx(float(gigabytes[1]) / 2, abs=0.1)


@pytest.mark.more_hosts
@by_ssh_alone
def test_what_the_doctor_says_is_of_the_notebooks_machine(kernel: Kernel) -> None:
    """Its cores are not those of ranks that run elsewhere."""
    shown = check(kernel.run("%dist_doctor"))

    assert re.search(r"^ok +hosts +ranks run on node1, node2", shown, re.MULTILINE)
    assert re.search(r"^ok +cores +\d+ for 0 ranks", shown, re.MULTILINE)


@pytest.mark.more_hosts
@by_ssh_alone
def test_an_exported_script_runs_on_the_same_hosts(kernel: Kernel, lan: Hosts) -> None:
    """By the command that is shown, on each of them; here with one rank each, to save time."""
    cell = (
        "%%distributed\nz = torch.ones(1) * (rank + 1)\ndist.all_reduce(z)\nprint('sum', z.item())"
    )
    check(kernel.run(cell))
    cells = [{"cell_type": "code", "source": cell, "metadata": {}, "outputs": []}]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    lan.path("head", SHARED / "one.ipynb").write_text(json.dumps(notebook))
    shown = check(
        kernel.run(
            "get_ipython().user_ns['__vsc_ipynb_file__'] = '/srv/one.ipynb'\n"
            "%dist_export /srv/train.py\ndel __vsc_ipynb_file__"
        )
    )
    command = shown.splitlines()[-1].removeprefix("run it, on each host: ")
    words = command.replace("--nproc-per-node 2", "--nproc-per-node 1").split()
    words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    running = [
        lan.popen(host, words, env={"OMP_NUM_THREADS": "1"}, stdout=-1, stderr=-2)
        for host in ("node1", "node2")
    ]
    outputs = [process.communicate(timeout=60)[0] for process in running]

    assert command.startswith("torchrun --nnodes 2 --nproc-per-node 2 ")
    assert [process.returncode for process in running] == [0, 0], outputs
    assert "".join(outputs).count("sum 3.0") == 2


TWO_WAYS = """
from nbdist.diagnostics import kernel as links
whole = session.strategy.switch("fsdp")
hybrid = session.strategy.switch("fsdp", shard="hybrid")
axes = links.picture(session, session.strategy.current()).axes
import json
print(json.dumps([whole.notes, hybrid.notes, str(hybrid.after.degrees),
                  {axis.axis: axis.crossing for axis in axes}]))
"""


@by_ssh_alone
def test_hybrid_sharding_keeps_a_copy_on_each_host(trained: Kernel) -> None:
    """Parameters are gathered within a host, and training goes on; fsdp says it before."""
    cell = trained.run(TWO_WAYS)
    assert cell.status == "ok", cell.visible
    whole, hybrid, mesh, crossing = json.loads(cell.text.splitlines()[-1])
    check(trained.run(f"%dist_load {SHARED}/step6"))
    shown = check(
        trained.run(
            "%%distributed\nprint(next(model.parameters()).device_mesh['dp_shard'].mesh.tolist())\n"
            "wrong_by(6, 9)"
        )
    )

    assert "--shard hybrid gathers them within a host, with 2 copies" in whole[-1]
    assert not [note for note in hybrid if "over the network" in note]
    assert "dp_replicate=2, dp_shard=2" in mesh
    assert crossing == {"dp_replicate": [[0, 2], [1, 3]], "dp_shard": []}
    assert shown.splitlines() == ["[0-1] [0, 1]", "[2-3] [2, 3]", "[0-3] False"]


def beyond(hosts: Hosts) -> dict[str, Counter[str]]:
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


def targets(hosts: Hosts, host: str) -> list[tuple[str, int]]:
    """Where somebody listens on the host's address."""
    address = hosts.address(host)
    entries = [entry.rpartition(":") for entry in hosts.listeners(host)]
    return [(address, int(port)) for ip, _, port in entries if ip == address]


# Training, strategies and a hang have been there before.
STEPS = {
    "groups and a mesh": """%%distributed
pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
total = torch.ones(1)
dist.all_reduce(total, group=mesh.get_group("a"))""",
    "a rank in the place of another": "%dist_restart 3",
    "numbers for Prometheus": "%dist_monitor --prometheus 0",
}


@by_ssh_alone
def test_who_listens_where(started: tuple[Kernel, str], trained: Kernel, lan: Hosts) -> None:
    """One address per host, whatever the ranks have done; the rest is on the loopback."""
    expected = {
        name: Counter({lan.address(name): PORTS[name]} if name in PORTS else {})
        for name in lan.names
    }
    seen = {"training": beyond(lan)}
    for step, cell in STEPS.items():
        check(trained.run(cell))
        seen[step] = beyond(lan)
    hung = trained.run("%%distributed\nif rank: dist.all_reduce(torch.ones(1))")
    seen["new connections of all groups"] = beyond(lan)

    assert seen == dict.fromkeys(seen, expected)
    hung.check_failure("Deadlock", "rank 0")
    assert (
        "what GLOO and torch's store send is neither encrypted nor authenticated (5 ports on eth0, "
        f"{lan.address('node1')}: 3, {lan.address('node2')}: 2; open to these hosts alone)"
    ) in started[1]


@by_ssh_alone
def test_no_key_can_be_read_by_others(kernel: Kernel, lan: Hosts) -> None:
    """It is in no command line and no environment, and its files are their owner's alone."""
    key = engine_file(lan)["curve_serverkey"]
    lines, variables, files = [], [], []
    for name in lan.names:
        for pid in lan.pids(name):
            lines.append((lan.path(name, f"/proc/{pid}/cmdline")).read_bytes())
            variables.append((lan.path(name, f"/proc/{pid}/environ")).read_bytes())
        files += [
            (path.name, path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o077)
            for path in lan.path(name, "/tmp").glob("nbdist-*/**/*")
            if path.is_file() and key.encode() in path.read_bytes()
        ]

    assert len(lines) > len(lan.names)
    assert not [line for line in lines if key.encode() in line]
    assert not [text for text in variables if key.encode() in text]
    assert {mode for _, mode, _ in files} == {0o600}
    assert {mode for *_, mode in files} == {0}
    assert Counter(name for name, *_ in files)["engine.json"] == len(NODES)


def engine_file(hosts: Hosts) -> dict[str, Any]:
    """The controller's connection file for engines."""
    (path,) = hosts.path("head", "/tmp").glob("nbdist-*/**/ipcontroller-*-engine.json")
    connection: dict[str, Any] = json.loads(path.read_text())
    return connection


@by_ssh_alone
def test_a_stranger_changes_nothing(kernel: Kernel, lan: Hosts) -> None:
    """A scan, handshakes without and with a wrong key, and 1,000 messages to every kind of port."""
    key, controller = engine_file(lan)["curve_serverkey"], targets(lan, "head")
    check(kernel.run("%%distributed\nkept = rank"))
    before, log = controller_memory(kernel), kernel.log
    listened = {name: [e.rpartition(":")[2] for e in lan.listeners(name)] for name in lan.names}
    attack = {
        "addresses": {lan.address(n): [int(p) for p in listened[n]] for n in ("head", "node1")},
        "controller": controller,
        "password_free": [target for node in NODES for target in targets(lan, node)],
        "server_key": key,
    }
    answer = lan.run(
        STRANGER,
        [sys.executable, "-m", "tests.support.attacks"],
        cwd=ROOT,
        input=json.dumps(attack),
        timeout_s=120,
    )
    result = json.loads(answer.stdout)
    after = kernel.run(
        "%%distributed\n"
        "total = torch.ones(1) * rank\n"
        "dist.all_reduce(total, group=dist.new_group([0, 1, 2, 3]))\n"
        "print(total.item(), kept - rank)"
    )

    assert result["open"][lan.address("head")] == sorted(port for _, port in controller)
    assert result["open"][lan.address("node1")] == [22]
    assert set(result["plain"]) == set(result["wrong key"]) == {"failed"}
    assert "succeeded" in result["right key"]  # so a handshake would have been seen
    open_to_all = {f"{address}:{port}" for address, port in controller}
    assert {name for name, n in result["taken"].items() if n} == open_to_all
    assert check(after) == "[0-3] 6.0 0"
    assert kernel.log == log  # nothing is said of it
    assert controller_memory(kernel) - before < MOST_GROWTH_BYTES


def controller_memory(kernel: Kernel) -> int:
    """Bytes of the controller, which has the notebook's network, and of its child."""
    network = Path(f"/proc/{kernel.pid}/ns/net").readlink()
    controllers = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(CONTROLLER_PROGRAM) in (process.info["cmdline"] or ())
        and Path(f"/proc/{process.pid}/ns/net").readlink() == network
    ]
    assert controllers
    return sum(process.memory_info().rss for process in controllers)


@by_ssh_alone
def test_ranks_of_a_host_that_is_cut_off_come_back_on_another(kernel: Kernel, lan: Hosts) -> None:
    """Its ranks are told as unreachable; the others go on alone, then all four together.

    Rank 0's process has the store. The sums: 2 + 3 over the pair, 0 + 1 + 2 + 3 over all.
    """
    kernel.run("session.grace_s = 10")
    check(kernel.run("%%distributed\nkept = rank\npair = dist.new_group([2, 3])"))
    total = "total = torch.ones(1) * rank\ndist.all_reduce(total{})\nprint(total.item(), {})"
    lan.cut("node1")
    try:
        told = kernel.run("%%distributed\ndist.all_reduce(torch.ones(1))", START_S)
        alone = check(kernel.run("%%rank [2-3]\n" + total.format(", group=pair", "kept - rank")))
        check(kernel.run("%dist_restart", START_S))
    finally:
        lan.heal("node1")
    together = check(kernel.run("%%distributed\n" + total.format("", "globals().get('kept')")))
    place = "os.uname().nodename, os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE']"
    places = check(kernel.run(f"%%distributed\nimport os\nprint({place})"))

    assert told.status == "error"
    assert "node1 cannot be reached" in told.visible
    assert alone == "[2-3] 5.0 0"
    assert together.splitlines() == ["[0-1] 6.0 None", "[2] 6.0 2", "[3] 6.0 3"]
    assert places.splitlines() == [
        f"[{rank}] node2 {local} 4" for rank, local in ((0, 2), (1, 3), (2, 0), (3, 1))
    ]
