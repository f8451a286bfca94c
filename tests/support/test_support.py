"""The helpers themselves, on plain kernels and plain processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.kernel import Kernel, KernelDiedError
from tests.support.processes import (
    descendants,
    processes_of_run,
    tcp_listeners,
    wait_gone,
)

_ROOT = Path(__file__).parents[2]
_WAIT_FOREVER = "import sys; print('ready', flush=True); sys.stdin.read()"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as shared:
        yield shared


@pytest.fixture
def own_kernel(tmp_path: Path) -> Iterator[Kernel]:
    with Kernel(cwd=tmp_path, env={"GREETING": "hello"}) as own:
        yield own


def _child(**env: str) -> subprocess.Popen[bytes]:
    """A process that has started, with `env` in its environment, and waits for its stdin."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", _WAIT_FOREVER],
        env=os.environ | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def test_output_arrives_while_the_cell_runs(kernel: Kernel) -> None:
    """The first line is there long before the cell ends."""
    cell = kernel.run("import time\nprint('first', flush=True)\ntime.sleep(1.5)\nprint('last')")

    first, last = cell.arrivals
    assert (first.msg_type, first.text, last.text) == ("stream", "first\n", "last\n")
    assert last.time_s - first.time_s > 1.0
    assert cell.seconds >= last.time_s


def test_output_of_child_processes_is_captured(kernel: Kernel) -> None:
    """The kernel captures file descriptors too, which it would not with pytest's variables."""
    cell = kernel.run("import os, subprocess\nsubprocess.run(['echo', 'child'])\nos.environ.keys()")

    assert cell.text == "child\n"
    assert "PYTEST_" not in cell.plain[0]


def test_clear_output_clears_at_once_or_with_the_next_output(kernel: Kernel) -> None:
    """`wait=True` keeps the old output until there is a new one."""
    code = "from IPython.display import clear_output\nprint('old')\n"

    assert kernel.run(code + "clear_output()").outputs == []
    assert kernel.run(code + "clear_output(wait=True)").text == "old\n"
    assert kernel.run(code + "clear_output(wait=True); print('new')").text == "new\n"


def test_a_cell_that_does_not_end_tells_its_output(kernel: Kernel) -> None:
    """Past the deadline the error has the outputs so far; the cell can still be collected."""
    handle = kernel.start("import time\nprint('stuck here', flush=True)\ntime.sleep(60)")
    kernel.wait_output(handle, "stuck here")
    with pytest.raises(TimeoutError, match=r"did not reach the end in time.*\n.*stuck here"):
        kernel.finish(handle, timeout_s=0.3)
    with pytest.raises(TimeoutError, match="did not reach the output 'never'"):
        kernel.wait_output(handle, "never", timeout_s=0.3)
    kernel.interrupt()

    assert kernel.finish(handle, timeout_s=20).status == "error"


def test_endless_output_does_not_outlast_the_deadline(own_kernel: Kernel) -> None:
    """A cell that never stops printing is given up in time."""
    handle = own_kernel.start("while True: print('x' * 60, flush=True)")
    start_s = time.monotonic()
    with pytest.raises(TimeoutError, match="did not reach the end in time"):
        own_kernel.finish(handle, timeout_s=1)

    assert time.monotonic() - start_s < 10


def test_a_killed_kernel_is_reported_with_the_output_so_far(own_kernel: Kernel) -> None:
    """Whoever waits for a cell of a dead kernel hears of it well before the deadline."""
    handle = own_kernel.start("import time\nprint('last words', flush=True)\ntime.sleep(60)")
    own_kernel.wait_output(handle, "last words")
    own_kernel.kill()
    start_s = time.monotonic()
    with pytest.raises(KernelDiedError, match=r"died before the end.*\n.*last words"):
        own_kernel.finish(handle, timeout_s=60)

    assert time.monotonic() - start_s < 20
    assert not own_kernel.is_alive()


def test_a_kernel_that_does_not_start_tells_why() -> None:
    """What the process wrote before it ended stands in the error."""
    kernel = Kernel(env={"PYTHONHASHSEED": "no number"})
    with pytest.raises(KernelDiedError, match="PYTHONHASHSEED must be"), kernel:
        pass


def test_shutdown_ends_the_process() -> None:
    """After the `with` block no process of the kernel is left."""
    with Kernel() as kernel:
        process = psutil.Process(kernel.pid)

    assert wait_gone([process]) == []


def test_processes_of_a_run_are_found_by_their_environment(tmp_path: Path) -> None:
    """NBDIST_RUN tells the processes of one run from those of another."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    children = [_child(NBDIST_RUN=one), _child(NBDIST_RUN=two), _child()]
    first, second, other = (child.pid for child in children)
    try:
        assert [p.pid for p in processes_of_run(one)] == [first]
        assert [p.pid for p in processes_of_run(two.encode())] == [second]
        assert {first, second} <= {p.pid for p in processes_of_run()}
        assert other not in {p.pid for p in processes_of_run()}
        assert {first, second, other} <= {p.pid for p in descendants(os.getpid())}
        left = wait_gone([first, second], timeout_s=0.2)
        assert {p.pid for p in left} == {first, second}
    finally:
        for child in children:
            _stop(child)

    assert wait_gone([first, second, other], timeout_s=5) == []
    assert processes_of_run(one) == []


def test_a_zombie_counts_as_gone() -> None:
    """A process that has ended and that nobody has waited for is not alive."""
    child = _child()
    child.kill()

    assert wait_gone([psutil.Process(child.pid)], timeout_s=10) == []
    _stop(child)


def test_listening_sockets_are_listed(kernel: Kernel) -> None:
    """A kernel listens on loopback only, also on a port opened by a cell."""
    cell = kernel.run(
        "import socket\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "listener.getsockname()[1]"
    )
    listeners = tcp_listeners([kernel.pid])
    kernel.run("listener.close()")

    assert int(cell.plain[0]) in {listener.port for listener in listeners}
    assert {(listener.pid, listener.address) for listener in listeners} == {
        (kernel.pid, "127.0.0.1")
    }


def _pytest(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run tests elsewhere with this project's conftest."""
    (folder / "test_elsewhere.py").write_text(code)
    (folder / "pytest.ini").write_text("[pytest]\n")
    args = ["-m", "pytest", "-rs", "-p", "tests.conftest", "-p", "no:cacheprovider", str(folder)]
    env = os.environ | {
        "PYTHONPATH": str(_ROOT), "CUDA_VISIBLE_DEVICES": "", "NBDIST_TEST_END_S": "0.1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_a_process_left_behind_fails_the_session(tmp_path: Path) -> None:
    """A test that passes but leaves a process of a run fails the session, and that is ended.

    And where there are too few GPUs for a test the reason has both numbers.
    """
    done = _pytest(
        tmp_path,
        "import os, subprocess, sys\n"
        "import pytest\n"
        "def test_leaks():\n"
        "    env = os.environ | {'NBDIST_RUN': 'leak-test'}\n"
        "    code = 'import time; time.sleep(600)'\n"
        "    subprocess.Popen([sys.executable, '-S', '-c', code], env=env)\n"
        "@pytest.mark.gpu(2)\n"
        "def test_two(): raise AssertionError\n",
    )

    assert done.returncode == 1, done.stdout
    assert "1 passed, 1 skipped, 1 error" in done.stdout
    assert "needs 2 GPUs, this machine has 0" in done.stdout
    assert "1 processes with NBDIST_RUN were left running" in done.stdout
    assert "-c import time; time.sleep(600)" in done.stdout
    assert wait_gone(processes_of_run("leak-test"), timeout_s=10) == []
