"""%dist_monitor in a notebook: what it shows, what Prometheus reads, and what is left of it."""

import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nbdist.core.units import compared
from tests.front.test_variables import RAISING, left, run_of
from tests.support import processes
from tests.support.kernel import Kernel
from tests.support.ranks import until

_MISTAKES = {
    "%dist_monitor --seconds 0": "0 is not above 0",
    "%dist_monitor --seconds soon": "'soon' is not a number",
    "%dist_monitor --prometheus 65536": "is not a valid port (0 to 65535; 0 picks a free one)",
    "%dist_monitor --prometheus -1": "'-1' is not a valid port",
    "%dist_monitor --prometheus web": "'web' is not a valid port",
    "%dist_monitor --seconds 3 --off": "choose one of --seconds, --off",
    "%dist_monitor 5": "unrecognized arguments: 5",
}
_WORK = (
    "%%distributed\nimport torch.distributed as dist\nfor _ in range(20):\n"
    "    dist.all_reduce(torch.ones(3))"
)
_THREADS = (
    "import json, threading\n"
    "print(json.dumps([t.name for t in threading.enumerate() if t.name.startswith('nbdist-')]))"
)


@pytest.fixture(autouse=True)
def _off(kernel: Kernel) -> Iterator[None]:
    """Each test begins and ends without samples."""
    kernel.run("%dist_monitor --off")
    yield
    kernel.run("%dist_monitor --off")


def rows(text: str) -> dict[int, str]:
    """Rank -> its line of the table."""
    return {int(n): rest for n, rest in re.findall(r"^ *(\d)  (.+)$", text, re.MULTILINE)}


def fetched(url: str, token: str) -> str:
    """What Prometheus would read."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def served(text: str) -> tuple[str, int, Path]:
    """(address, port, file of the token) in what %dist_monitor --prometheus shows."""
    url = re.search(r"(http://127\.0\.0\.1:(\d+)/metrics), to this host only", text)
    token = re.search(r"the token is in (\S+);", text)
    assert url is not None, text
    assert token is not None, text
    return url[1], int(url[2]), Path(token[1])


def is_open(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.usefixtures("drawn")
def test_it_shows_every_rank_and_goes_on(kernel: Kernel) -> None:
    """The first one begins; the next one has more samples, the last collective, and a picture."""
    first = kernel.run("%dist_monitor")
    kernel.run(_WORK)
    kernel.run("%dist_monitor --seconds 1.5")
    kernel.run("%%distributed\nimport time\ntime.sleep(1.1)")  # the newest sample is of this cell
    later = kernel.run("%dist_monitor")
    counts = [int(re.findall(r"of (\d+) samples", shown.plain[-1])[0]) for shown in (first, later)]
    table = rows(later.plain[-1])

    assert (first.status, later.status) == ("ok", "ok")
    assert "recording from now on" in first.plain[-1]
    assert "recording from now on" not in later.plain[-1]
    assert sorted(table) == [0, 1]
    assert all(line.startswith("idle") for line in table.values())
    assert all("all_reduce(float32[3])" in line for line in table.values())
    assert counts[1] > counts[0]
    assert 'src="data:image/png;base64,' in later.outputs[-1]["data"]["text/html"]


def test_recording_for_a_while_is_shown_when_it_is_interrupted(kernel: Kernel) -> None:
    """An interrupt ends the wait, not the cell's result; the ranks are not disturbed."""
    handle = kernel.start("%dist_monitor --seconds 60")
    kernel.wait_output(handle, "left; interrupt to stop early")
    kernel.interrupt()
    cell = kernel.finish(handle)
    after = kernel.run("%%distributed\nrank")

    assert cell.status == "ok"
    assert cell.seconds < 30
    assert "interrupted after" in cell.visible
    assert sorted(rows(cell.visible)) == [0, 1]
    assert after.text == "[0] 0\n[1] 1\n"


def test_prometheus_reads_what_the_ranks_use(kernel: Kernel) -> None:
    """With the token from its file; another port is refused while one is served; --off ends it."""
    cell = kernel.run("%dist_monitor --prometheus 0")
    url, port, token_path = served(cell.plain[-1])
    token = token_path.read_text()
    text = fetched(url, token)
    again = kernel.run("%dist_monitor --prometheus 0")
    other = kernel.run(f"%dist_monitor --prometheus {port % 60000 + 1024}")
    off = kernel.run("%dist_monitor --off")

    assert cell.status == "ok"
    assert token not in cell.visible
    assert f'targets: ["127.0.0.1:{port}"]' in cell.plain[-1]
    for rank in (0, 1):
        match = re.search(rf'\nnbdist_rank_resident_bytes{{rank="{rank}",.*}} (\d+)\n', text)
        assert match is not None
        assert int(match[1]) > 50_000_000
        assert re.search(rf'\nnbdist_rank_state{{rank="{rank}",.*state="idle"}} 1\n', text)
    assert served(again.plain[-1])[0] == url
    assert f"{url} is already being served" in other.failure.evalue
    assert off.plain[-1].startswith("recording stopped")
    assert not is_open(port)
    assert not token_path.exists()


@pytest.mark.parametrize("code", _MISTAKES)
def test_a_mistake_is_told_and_nothing_begins(kernel: Kernel, code: str) -> None:
    """An ordinary error; no sampling was begun by it."""
    cell = kernel.run(code)
    threads = json.loads(kernel.run(_THREADS).text)

    cell.check_failure("OptionError", re.escape(_MISTAKES[code]))
    assert "nbdist-monitor" not in threads


def test_stored_outputs_are_alike(kernel: Kernel) -> None:
    """With NBDIST_TEST=1 two outputs compare as equal."""
    kernel.run("import os\nos.environ['NBDIST_TEST'] = '1'")
    try:
        cells = [kernel.run("%dist_monitor --seconds 1.2") for _ in range(2)]
        address = kernel.run("%dist_monitor --prometheus 0")
    finally:
        kernel.run("del os.environ['NBDIST_TEST']")

    assert [*map(compared, cells[0].plain)] == [*map(compared, cells[1].plain)]
    assert len(cells[0].plain) == 1, "no progress is stored"
    assert "now / mean / peak of # samples over # s" in compared(cells[0].plain[0])
    assert "http://127.0.0.1:#/metrics" in compared(address.plain[-1])


def test_nothing_is_left_when_the_kernel_is_killed(bare_kernel: Kernel, tmp_path: Path) -> None:
    """Port, token and ranks end with it, and what is on its way to them in shared memory."""
    bare_kernel.run("%load_ext nbdist\n%dist_init -n 1", 60.0)
    _, port, token_path = served(bare_kernel.run("%dist_monitor --prometheus 0").plain[-1])
    run = run_of(bare_kernel)
    bare_kernel.run(RAISING)
    bare_kernel.start("%dist_push stuck")
    assert until((tmp_path / "reached").exists, 20)
    on_the_way, is_open_before = left(run), is_open(port)
    everybody = [psutil.Process(bare_kernel.pid), *processes.descendants(bare_kernel.pid)]
    bare_kernel.kill()

    assert len(on_the_way) == 1
    assert is_open_before
    assert processes.wait_gone(everybody, 10.0) == []
    assert not is_open(port)
    assert not token_path.exists()
    assert until(lambda: not left(run), 20)
