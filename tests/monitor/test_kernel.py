"""What ranks use and do, sampled beside them while they work, wait, hang and end."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nbdist.cells.kernel import wait
from nbdist.cells.kernel.cell_request import CellRequest
from nbdist.cells.kernel.cell_run import CellRun
from nbdist.cluster.kernel import run_dir
from nbdist.cluster.kernel.start import StartOptions
from nbdist.errors import NotRunning, OptionError
from nbdist.monitor.kernel import monitor as monitors
from nbdist.monitor.kernel.monitor import Monitor
from nbdist.monitor.kernel.sampler import Samples, _Answers, usage
from nbdist.monitor.samples import Allocator, Answer, Sample
from nbdist.notebook.session import Session
from tests.support.gpus import Card, Driver, play, smi_text
from tests.support.ranks import session_of, temporary_folder, until

SOON_S = 10.0


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Two ranks, whose deadlocks are left alone for a while."""
    with (
        temporary_folder(tmp_path_factory.mktemp("monitor") / "tmp"),
        session_of(StartOptions(world_size=2, grace_s=60.0)) as started,
    ):
        started.run("import torch._dynamo")  # else an idle rank does that by and by, and is busy
        started.monitor._period_s = 0.2
        yield started


def seen(monitor: Monitor, is_it: Callable[[Samples], bool]) -> Samples:
    """The first samples from now on of which something is true."""
    after_s, end_s = time.monotonic(), time.monotonic() + SOON_S
    while time.monotonic() < end_s:
        samples = monitor.wait(after_s, SOON_S)
        if is_it(samples):
            return samples
        after_s = samples[0].time_s
    raise AssertionError(f"never seen; last: {samples}")


def states(samples: Samples) -> list[str]:
    return [sample.doing.state for sample in samples]


def waited_s(sample: Sample) -> float:
    """How long a rank has waited; 0 for one that does not."""
    if sample.doing.state != "waiting":
        return 0.0
    return sample.time_s - (sample.doing.since_s or 0.0)


def begin(session: Session, code: str) -> CellRun:
    """Send a cell to both ranks, as cell [7]; `end` sees it through."""
    return session.begin(CellRequest(code, (0, 1), number=7))


def end(cell: CellRun) -> None:
    """Wait for the end of a cell that was begun."""
    wait.wait(lambda: cell)


def test_nothing_is_sampled_before_somebody_asks(session: Session) -> None:
    """The first who asks begins; then there is a sample of each rank, with its memory."""
    assert not session.monitor.is_running
    assert session.monitor.latest() == ()
    samples = session.monitor.wait(time.monotonic(), SOON_S)
    pids = session.health.pids()

    assert session.monitor.is_running
    assert [sample.rank for sample in samples] == [0, 1]
    assert states(samples) == ["idle", "idle"]
    for of_rank in samples:
        assert of_rank.usage is not None
        apart = abs(of_rank.usage.rss_bytes - psutil.Process(pids[of_rank.rank]).memory_info().rss)
        assert apart < 100_000_000
        assert of_rank.usage.pss_bytes is not None
        assert of_rank.usage.pss_bytes <= of_rank.usage.rss_bytes
        assert of_rank.gpu is None
        assert of_rank.age_s == 0.0


def test_a_rank_is_seen_running_and_another_waiting_for_it(
    session: Session, tmp_path: Path
) -> None:
    """The state is that of the moment: the call in which a rank waits, its line, for how long."""
    gate = tmp_path / "gate"
    code = (
        "import os, time, torch.distributed as dist\nif rank == 1:\n"
        f"    while not os.path.exists({str(gate)!r}): time.sleep(0.01)\ndist.barrier()"
    )
    cell = begin(session, code)
    both = seen(session.monitor, lambda samples: states(samples) == ["waiting", "running"])
    later = seen(session.monitor, lambda samples: waited_s(samples[0]) > 1)
    gate.touch()
    end(cell)
    idle = seen(session.monitor, lambda samples: states(samples) == ["idle", "idle"])

    assert both[0].doing.text.startswith("running cell [7], waiting in barrier()")
    assert both[1].doing.text == "running cell [7]"
    assert later[0].doing_text.endswith(f"line 4 of cell [7] for {waited_s(later[0]):.1f} s")
    assert both[0].doing.last_collective == ""
    assert [sample.doing.last_collective for sample in idle] == ["barrier()"] * 2
    assert all((sample.doing.collective_age_s or 0) < SOON_S for sample in idle)


# Rank 0 has a GPU from now on, for the monitor alone: its allocator counts how often it is asked.
_ALLOCATOR = """
import itertools, types
from nbdist.monitor import rank as monitor_rank
was, asked = vars(monitor_rank).copy(), itertools.count(1)
monitor_rank.torch = types.SimpleNamespace(cuda=types.SimpleNamespace(
    is_initialized=lambda: True,
    memory_stats=lambda device: {"allocated_bytes.all.current": next(asked)},
))
place = types.SimpleNamespace(device="cuda:0", device_uuid="x")
monitor_rank.this_rank = lambda: types.SimpleNamespace(place=place)
"""


def test_a_rank_that_waits_in_a_collective_is_not_asked_for_its_allocator(
    session: Session, tmp_path: Path
) -> None:
    """The lock that this takes may be held until the collective ends; what was said last is old."""
    gate = tmp_path / "gate"
    code = (
        "import os, time, torch, torch.distributed as dist\nif rank == 1:\n"
        f"    while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        "dist.all_reduce(torch.ones(1))"
    )

    def answer() -> Answer:
        future = session.ask(lambda ask, engine: usage(ask, engine, False), 0)
        assert future is not None
        return future.result(SOON_S)

    session.run(_ALLOCATOR, ranks=[0])
    idle = answer()
    cell = begin(session, code)
    seen(session.monitor, lambda samples: states(samples) == ["waiting", "running"])
    waiting = [answer(), answer()]
    gate.touch()
    end(cell)
    after = answer()
    session.run("vars(monitor_rank).update(was)", ranks=[0])

    assert idle.allocator == waiting[0].allocator == waiting[1].allocator == Allocator(1, 0, 0)
    assert idle.allocator_age_s < waiting[0].allocator_age_s < waiting[1].allocator_age_s
    assert after.allocator == Allocator(2, 0, 0)
    answers = _Answers(session, session.monitor._note)
    assert answers.allocator(idle, 0.0) == Allocator(1, 0, 0)
    assert answers.allocator(replace(idle, allocator_age_s=60.0), 0.0) is None


def test_a_rank_that_computes_is_busy_and_one_that_sleeps_is_not(session: Session) -> None:
    """Processor time is told of the process that spends it, C code that holds the GIL included."""
    # A power of a long number is one call of C code: no thread of that rank runs meanwhile.
    code = (
        "import time\nend_s = time.process_time() + 1\n"
        "while rank == 0 and time.process_time() < end_s:\n    pow(3, 3_000_000)"
    )
    before = session.monitor.wait(time.monotonic(), SOON_S)
    cell = begin(session, code)
    busy = seen(
        session.monitor, lambda s: states(s)[0] == "running" and (s[0].cpu_percent or 0) > 5
    )
    end(cell)
    after = session.monitor.wait(time.monotonic(), SOON_S)
    spent_s = [
        now.usage.cpu_s - then.usage.cpu_s
        for now, then in zip(after, before, strict=True)
        if now.usage is not None and then.usage is not None
    ]

    assert spent_s[0] >= 1
    assert spent_s[1] < 0.5
    assert busy[0].age_s == 0.0
    assert busy[0].utilisation == busy[0].cpu_percent


def test_listeners_are_called_and_their_errors_kept(session: Session) -> None:
    """One that fails is told once, called again, and takes nothing from another."""
    got: list[Sample] = []
    failed = threading.Event()

    def fails(_samples: Samples) -> None:
        if got:
            failed.set()
        raise ValueError("no canvas")

    ends = [session.monitor.listen(fails), session.monitor.listen(got.extend)]
    assert until(lambda: len(got) >= 4)
    assert failed.wait(SOON_S)
    for stop in (*ends, *ends):
        stop()
    session.monitor.wait(time.monotonic(), SOON_S)
    count = len(got)
    session.monitor.wait(time.monotonic(), SOON_S)

    assert {sample.rank for sample in got} == {0, 1}
    assert len(got) == count
    assert [problem for problem in session.monitor.problems if "no canvas" in problem] == [
        "a listener failed: ValueError: no canvas"
    ]


def test_sampling_stops_when_told_and_begins_when_asked(session: Session) -> None:
    """No thread is left; the history stays, and goes on in the order of time."""
    session.monitor.wait(time.monotonic(), SOON_S)
    session.monitor.stop()
    names = [thread.name for thread in threading.enumerate()]
    count = len(session.monitor.history)
    session.monitor.wait(time.monotonic(), SOON_S)
    times, _ = session.monitor.history.series(0, "state")

    assert not {"nbdist-monitor", "nbdist-prometheus", "nbdist-gpus"}.intersection(names)
    assert count > 0
    assert len(session.monitor.history) == count + 1
    assert (times[1:] > times[:-1]).all()


def test_sampling_stops_by_itself_when_nobody_asks_any_more(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while a cell runs, and not while somebody listens."""
    monkeypatch.setattr(monitors, "UNASKED_S", 0.0)
    monitor = Monitor(session, session.health, period_s=0.05)
    cell = begin(session, "import time\ntime.sleep(1)")
    monitor.start()  # the only question while the cell runs
    end(cell)
    assert until(lambda: not monitor.is_running)
    count = len(monitor.history)
    monitor.start()
    assert until(lambda: not monitor.is_running)
    when_idle = len(monitor.history) - count
    stop = monitor.listen(lambda _samples: None)
    assert until(lambda: len(monitor.history) > count + 10)
    stop()
    assert until(lambda: not monitor.is_running)

    assert count >= 5
    assert when_idle <= 1


@pytest.fixture
def on_gpus(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    """A monitor that takes both ranks for ranks on GPUs, the second one of which does not exist."""
    uuids = ("8c2a1f", "GPU-missing")
    places = [
        replace(place, device="cuda:0", device_uuid=uuid)
        for place, uuid in zip(session.topology.ranks, uuids, strict=True)
    ]
    monkeypatch.setattr(session, "topology", replace(session.topology, ranks=tuple(places)))
    monitor = Monitor(session, session.health, period_s=0.1)
    yield monitor
    monitor.close()


def test_gpus_are_read_by_nvidia_smi(
    on_gpus: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call for all GPUs, each rank's by its UUID. When it fails that is told once."""
    answer = play(monkeypatch, tmp_path, None, smi_text([Card(), Card("GPU-other")]))
    well, other = seen(on_gpus, lambda samples: samples[0].gpu is not None)
    answer.unlink()
    failed = seen(on_gpus, lambda samples: samples[0].gpu is None)
    count = len(on_gpus.history)
    assert until(lambda: len(on_gpus.history) > count + 20)

    assert well.gpu is not None
    assert (well.gpu.index, well.utilisation, well.gpu.used_bytes) == (0, 97.0, 1024 * 2**20)
    assert well.usage is not None
    assert other.gpu is None
    assert [sample.usage is not None for sample in failed] == [True, True]
    missing, gone = on_gpus.problems
    assert missing.startswith(
        "rank 1: the driver reports nothing for its GPU GPU-missing (nvidia-smi"
    )
    assert gone.startswith("no GPU can be read: NVML: ")
    assert gone.endswith("nvidia-smi: driver gone")


def test_gpus_are_read_by_nvml_and_one_that_is_lost_is_told(
    on_gpus: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the driver still tells of the others goes on."""
    driver = Driver(Card(), Card("GPU-missing"))
    play(monkeypatch, tmp_path, driver, None)
    both = seen(on_gpus, lambda samples: samples[1].gpu is not None)
    driver.lost.add(0)
    without_one = seen(
        on_gpus, lambda samples: samples[0].gpu is None and samples[1].gpu is not None
    )
    driver.lost.clear()
    back = seen(on_gpus, lambda samples: samples[0].gpu is not None)

    assert [sample.gpu and sample.gpu.index for sample in both] == [0, 1]
    assert without_one[1].gpu is not None
    assert back[0].gpu is not None
    assert on_gpus.problems == ("GPU 0 cannot be read: GPU is lost",)
    assert on_gpus.history.summary(1, "power").peak == 512.33


def test_without_any_driver_ranks_are_sampled_all_the_same(
    on_gpus: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host and state are there, and it is told that GPUs are not."""
    play(monkeypatch, tmp_path, None, None)
    samples = seen(on_gpus, lambda samples: samples[0].cpu_percent is not None)
    assert until(lambda: len(on_gpus.problems) == 2)

    assert [sample.gpu for sample in samples] == [None, None]
    assert all(sample.usage is not None for sample in samples)
    assert on_gpus.problems[0].startswith("rank 0: the driver reports nothing for its GPU 8c2a1f")


def test_ranks_on_other_hosts_answer_for_themselves(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read here is asked for; where C code holds the GIL its age grows."""
    pids = session.health.pids()
    monkeypatch.setattr(session.health, "pids", dict)
    monitor = Monitor(session, session.health, period_s=0.2)
    answered = seen(
        monitor, lambda samples: all(sample.cpu_percent is not None for sample in samples)
    )
    # One call of C code: the control thread gets no turn until it ends.
    cell = begin(session, "if rank == 0:\n    pow(3, 12_000_000)\n")
    old = seen(monitor, lambda samples: samples[0].age_s > max(0.5, 2 * samples[1].age_s))
    end(cell)
    fresh = seen(monitor, lambda samples: samples[0].age_s < 0.5)
    monitor.close()

    for sample in answered:
        assert sample.usage is not None
        resident = psutil.Process(pids[sample.rank]).memory_info().rss
        assert abs(sample.usage.rss_bytes - resident) < 100_000_000
    assert old[0].doing.state == "running"
    assert states(fresh) == ["idle", "idle"]


def test_a_rank_that_is_killed_is_dead_until_another_takes_its_place(session: Session) -> None:
    """The rest is sampled on; what replaces it is sampled under the same rank."""
    seen(session.monitor, lambda samples: states(samples) == ["idle", "idle"])
    pid = session.health.pids()[1]
    psutil.Process(pid).kill()
    dead = seen(session.monitor, lambda samples: states(samples) == ["idle", "dead"])
    session.restart([1])
    back = seen(session.monitor, lambda samples: states(samples) == ["idle", "idle"])

    assert "SIGKILL" in dead[1].doing.text
    assert dead[1].usage is None
    assert back[1].usage is not None
    assert session.health.pids()[1] != pid


def test_sampling_goes_on_while_the_controller_is_replaced(session: Session) -> None:
    """Ranks of this host need no connection to be read; nothing failed, and all are back."""
    before = len(session.monitor.history)
    pid = session.cluster.processes.controller_pid()
    assert pid is not None
    psutil.Process(pid).kill()
    assert until(lambda: None in session.cluster.processes.exits)
    between = session.monitor.wait(time.monotonic(), SOON_S)
    session.run("1 + 1")
    back = seen(session.monitor, lambda samples: states(samples) == ["idle", "idle"])

    assert all(sample.usage is not None for sample in (*between, *back))
    assert set(states(between)) <= {"idle", "unknown"}
    assert len(session.monitor.history) > before
    assert [problem for problem in session.monitor.problems if "sample failed" in problem] == []


def test_sampling_ends_with_the_ranks(session: Session) -> None:
    """No thread and no port is left, what was seen last stays, and who asks begins nothing.

    Also where they are stopped in a terminal, of which the notebook hears at its next verb only.
    """
    monitor = session.monitor
    monitor.wait(time.monotonic(), SOON_S)
    served = monitor.serve(0)
    with pytest.raises(OptionError, match="is already being served"):
        monitor.serve(served.port + 1)
    run_dir.leave_note(session.cluster.run_dir)
    assert until(lambda: not monitor.is_running)
    assert until(lambda: not served._thread.is_alive())
    with pytest.raises(NotRunning):
        monitor.serve(0)
    session.stop()
    samples = monitor.latest()
    names = [thread.name for thread in threading.enumerate()]

    assert [sample.rank for sample in samples] == [0, 1]
    assert not monitor.is_running
    assert not {"nbdist-monitor", "nbdist-prometheus", "nbdist-gpus"}.intersection(names)
