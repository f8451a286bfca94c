"""Distributed cells leave the kernel free, queue up, and fall back where nothing can await."""

from pathlib import Path

import pytest

from tests.support.kernel import Kernel

_ECHO = """
def echo(comm, _message):
    comm.on_msg(lambda message: comm.send({"echo": message["content"]["data"]}))
get_ipython().kernel.comm_manager.register_target("echo", echo)
"""
_WAIT = "import os, time\nprint('go')\nwhile not os.path.exists({!r}): time.sleep(0.01)"


def test_waiting_costs_no_processor_time(kernel: Kernel) -> None:
    """The kernel sleeps while ranks work: no polling."""
    kernel.run("import time; began = time.process_time()")
    kernel.run("%%distributed\nimport time; time.sleep(1.5)")
    cell = kernel.run("time.process_time() - began")

    assert float(cell.plain[0]) < 0.5


def test_the_kernel_answers_comms_while_a_cell_runs(kernel: Kernel, shared_folder: Path) -> None:
    """A widget's message is answered by the kernel during a distributed cell."""
    gate = shared_folder / "gate"
    kernel.run(_ECHO)
    client = kernel._connected()
    opening = {"comm_id": "c1", "target_name": "echo", "data": {}}
    client.shell_channel.send(client.session.msg("comm_open", opening))
    handle = kernel.start(f"%%distributed\n{_WAIT.format(str(gate))}")
    kernel.wait_output(handle, "go")
    message = client.session.msg("comm_msg", {"comm_id": "c1", "data": {"n": 1}})
    client.shell_channel.send(message)
    answer = None
    while answer is None:
        received = client.get_iopub_msg(timeout=20)
        if received["msg_type"] == "comm_msg":
            answer = received["content"]["data"]
    running = kernel.so_far(handle)
    gate.touch()
    kernel.finish(handle)
    gate.unlink()

    assert answer == {"echo": {"n": 1}}
    assert running.status == "running"


def test_tasks_of_the_notebook_go_on_while_a_cell_runs(kernel: Kernel) -> None:
    """The kernel's event loop is free: a ticking task ticks during a distributed cell."""
    kernel.run(
        "import asyncio\nticks = 0\nasync def tick():\n    global ticks\n"
        "    while True:\n        ticks += 1; await asyncio.sleep(0.01)\n"
        "ticking = asyncio.create_task(tick())"
    )
    kernel.run("before = ticks")
    kernel.run("%%distributed\nimport time; time.sleep(0.5)")
    cell = kernel.run("ticking.cancel(); ticks - before")

    assert int(cell.plain[0]) > 5


def test_capture_above_it_falls_back(kernel: Kernel) -> None:
    """%%capture gets text and displays."""
    captured = kernel.run(
        "%%capture got\n%%distributed\nfrom IPython.display import HTML, display\n"
        "display(HTML('h'))\nprint(rank)"
    )
    text = kernel.run("got.stdout, len(got.outputs)")

    assert captured.visible == ""
    assert "[0] 0\\n[1] 1\\n" in text.plain[0]
    assert text.plain[0].endswith(" 1)")


@pytest.mark.parametrize(
    "code",
    [
        "got = get_ipython().run_cell('%%distributed\\nrank')\ngot.raise_error()",
        "get_ipython().run_cell_magic('distributed', '', 'rank')",
        "get_ipython().run_cell_magic('rank', '[0,1]', 'rank')",
        "import nbdist\nresult = nbdist.session().run('rank')",
        "async def later():\n    return nbdist.session().run('rank')\nresult = await later()",
        "for i in range(1):\n    get_ipython().run_cell_magic('distributed', '', 'rank')",
    ],
)
def test_nested_calls_block(kernel: Kernel, code: str) -> None:
    """From Python code that already runs, the same cell runs without await."""
    cell = kernel.run(code)

    assert cell.status == "ok", cell.visible
    assert cell.text == "[0] 0\n[1] 1\n"


def test_an_error_inside_another_magic_fails_the_cell(kernel: Kernel) -> None:
    """%%time passes a rank's failure on (%%capture passes over every error, IPython's too)."""
    cell = kernel.run("%%time\n%%distributed\n1 / 0")

    cell.check_failure("DistributedError")


def test_queued_cells_run_in_order(kernel: Kernel) -> None:
    """Cells sent at once run one after the other, on the ranks and in the kernel."""
    cells = kernel.run_all(
        [
            "%%distributed\nimport time; seen = [1]; time.sleep(0.3)",
            "here = 'kernel'",
            "%%rank[1]\nseen.append(2)",
            "here",
            "%%distributed\nseen",
        ]
    )

    assert [cell.status for cell in cells] == ["ok"] * 5
    assert cells[3].plain == ["'kernel'"]
    assert cells[4].text == "[0] [1]\n[1] [1, 2]\n"


def test_an_error_aborts_the_cells_behind_it(kernel: Kernel) -> None:
    """After a rank's failure no queued cell runs, and a new one does."""
    kernel.run("%%distributed\ncount = 0")
    cells = kernel.run_all(
        ["%%distributed\ncount += 1", "%%rank[1]\n1 / 0", "%%distributed\ncount += 1", "late = 1"]
    )
    after = kernel.run("%%distributed\ncount")

    assert [cell.status for cell in cells] == ["ok", "error", "aborted", "aborted"]
    assert after.text == "[0-1] 1\n"
