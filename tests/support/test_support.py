"""The helpers themselves, on plain kernels and plain processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import scripts
from tests.support.kernel import Kernel, KernelDiedError
from tests.support.processes import processes_of_run, wait_gone

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as shared:
        yield shared


@pytest.fixture
def own_kernel(tmp_path: Path) -> Iterator[Kernel]:
    with Kernel(cwd=tmp_path, env={"GREETING": "hello"}) as kernel:
        yield kernel


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
        own_kernel.finish(handle, timeout_s=0.3)

    assert time.monotonic() - start_s < 10
    own_kernel.kill()  # it would print on until it is asked to end


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


def test_a_zombie_counts_as_gone() -> None:
    """A process that has ended and that nobody has waited for is not alive."""
    with subprocess.Popen(["true"]) as child:
        assert wait_gone([psutil.Process(child.pid)], timeout_s=10) == []


def _pytest(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run tests elsewhere with this project's conftest."""
    (folder / "test_elsewhere.py").write_text(code)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs GPUs\n")
    plugins = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:nbval"]
    args = ["-m", "pytest", "-rs", *plugins, str(folder)]
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


@pytest.mark.parametrize(
    ("wait", "is_told"),
    [("threading.Event().wait()", True), ("exec('while True: pass')", True), ("spin()", False)],
)
def test_a_script_may_be_left_waiting_at_its_own_end_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: str, is_told: bool
) -> None:
    """There torch does now and then; in any other call it is a hang, which is told."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, threading\ndef spin():\n    while True: pass\n"
        f"if os.environ['RANK'] == '1': {wait}\nprint('done')\n"
    )
    monkeypatch.setattr(scripts, "_BEHIND_S", 2.0)
    if is_told:
        with pytest.raises(subprocess.TimeoutExpired):
            scripts.started(script)
        return
    ended = scripts.started(script)

    assert ended.codes == [0, scripts.ABORTED]
    assert ended.lines[0] == ["done"]
