"""`make gpu` itself: its time is shared out, whatever ends is told, and its page says it."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import threading
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gpu import __main__ as command
from tests.gpu import assumptions, probes, report, results
from tests.gpu.assumptions import Probe, staging
from tests.gpu.results import FAILED, NOT_RUN, PASSED, RUNNING, TIMED_OUT, Case
from tests.support.kernel import run_python

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "tests" / "gpu" / "wheels.txt"
# What a machine with GPUs has, with what that needs.
THERE = (
    "torch", "transformers", "accelerate", "peft", "numpy", "matplotlib", "pandas", "psutil",
    "nvidia-ml-py",
)  # fmt: skip
# What tests/conftest.py and what it imports need beside nbdist.
OF_TESTS = ("jupyter-client", "nbformat", "pytest", "pytest-timeout")
GPU = {"gpus": "NVIDIA H100 80GB HBM3, 81559 MiB, 580.1", "torch": "2.11.0"}


def cpu_run(out: Path, *words: str) -> tuple[list[Case], str]:
    """Every case of a run on two CPU ranks, none of which may fail, and its page."""
    done = run_python(
        "-m", "tests.gpu", *words, "--cpu", "--budget", "250",
        cwd=ROOT, timeout_s=270, OUT=str(out),
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{(out / 'log.txt').read_text()}"
    cases = results.read([out / results.FILE])
    assert {case.outcome for case in cases} <= {PASSED, NOT_RUN}
    return cases, (out / "gpu.md").read_text()


def test_it_runs_on_a_machine_without_gpus(tmp_path: Path) -> None:
    """What the machine is and the doctor says; the page has a row for each."""
    cases, page = cpu_run(tmp_path, "machine")
    passed = {case.name for case in cases if case.outcome == PASSED}

    assert passed == {"machine", "doctor"}
    for name in passed:
        assert f"| machine | {name} |" in page


@pytest.mark.parity
@pytest.mark.timeout(280)
def test_it_runs_on_two_cpu_ranks(tmp_path: Path) -> None:
    """A recording through real ranks, with what it has measured; it is kept."""
    cases, page = cpu_run(tmp_path, "recordings", "--select", "trace and ddp")

    assert {case.name for case in cases if case.outcome == PASSED} == {"a trace: ddp"}
    assert {case.why for case in cases if case.outcome == NOT_RUN} == {
        "not selected",
        *(f"needs {n}, this machine has 0" for n in ("1 GPU", "2 GPUs")),
    }
    assert report.CPU_PAGE in page
    assert "| recordings | a trace: ddp | 2 CPU ranks, Gloo | passed |" in page
    assert "step, ms" in page
    with tarfile.open(tmp_path / report.CAPTURES) as archive:
        assert "traces/cpu_ddp/rank1.json.gz" in archive.getnames()


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    """And fails: nothing is taken for tested."""
    done = run_python("-m", "tests.gpu", cwd=ROOT, OUT=str(tmp_path), CUDA_VISIBLE_DEVICES="")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{command.NO_GPU}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_part_gives_what_it_does_not_need_to_those_after_it() -> None:
    """By their weights, of the time that is left."""
    parts = [command.Part(name, (), weight) for name, weight in (("a", 1), ("b", 3), ("c", 2))]

    assert command.share(parts, 600) == pytest.approx(100)
    assert command.share(parts[1:], 590) == pytest.approx(354)
    assert command.share(parts[2:], 236) == pytest.approx(236)


_HANGS = f"""
import os, pathlib, signal, time
from tests.gpu import results
path = pathlib.Path(os.environ["{results.LOG}"])
for name, outcome in (("first", "passed"), ("second", "running"), ("third", "not run")):
    results.add(path, results.Case(os.environ["{results.PART}"], name, outcome))
signal.signal(signal.SIGINT, signal.SIG_IGN)
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("code", "outcomes"),
    [
        (_HANGS, [PASSED, TIMED_OUT, NOT_RUN, TIMED_OUT]),
        ("1 / 0", [FAILED]),
        ("import os; os.abort()", [FAILED]),
    ],
    ids=["hangs", "fails", "crashes"],
)
def test_a_part_that_goes_wrong_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, outcomes: list[str]
) -> None:
    """At its deadline, whatever it does about it; all cases of it have an outcome."""
    monkeypatch.setattr(command, "END_S", 0.5)
    path = tmp_path / results.FILE
    path.touch()
    env = {**os.environ, results.LOG: str(path), "PYTHONPATH": str(ROOT)}

    command.run(command.Part("odd", ("-c", code), 1), 3.0, tmp_path / "log.txt", path, env)

    assert [case.outcome for case in results.read([path])] == outcomes


def test_a_part_without_time_is_listed(tmp_path: Path) -> None:
    """As not run, with the reason."""
    path = tmp_path / results.FILE
    command.run(command.Part("late", ("-c", "1 / 0"), 1), 5.0, tmp_path / "log.txt", path, {})

    assert results.read([path]) == [
        Case("late", "all of it", NOT_RUN, why="no time was left for it")
    ]


@pytest.mark.faults
def test_a_probe_that_fails_or_hangs_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process of its own, where no GPU is; without one being there it is not tried."""
    monkeypatch.setattr(assumptions, "gpu_count", lambda: 0)
    assert probes.run("probes", "staging").outcome == NOT_RUN
    monkeypatch.setattr(assumptions, "gpu_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    failed = probes.run("probes", "staging")
    monkeypatch.setitem(probes.PROBES, "staging", Probe(staging, 0.1))
    hung = probes.run("probes", "staging")

    assert failed.outcome == FAILED
    assert "CUDA" in failed.why or "NVIDIA" in failed.why
    assert (hung.outcome, hung.seconds) == (TIMED_OUT, 0.1)


def test_a_watch_sees_where_and_how_the_main_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In which frame, with which pending calls; and how looks at one wait become words."""
    monkeypatch.setattr(assumptions, "_pending", lambda: ["nccl:all_reduce"])
    watch, stop = assumptions._Watch(), threading.Event()
    here = (threading.get_ident(), threading.get_native_id(), stop)
    looking = threading.Thread(target=watch.look, args=here)

    def spin() -> None:
        while not watch.seen or len(watch.seen.get("spin", [])) < 3:
            pass

    looking.start()
    watch.way = "spin"
    spin()
    stop.set()
    looking.join()

    assert watch.seen is not None
    looks = watch.seen["spin"]
    assert {look["place"][1] for look in looks} <= {"spin"}
    assert all(look["pending"] == ["nccl:all_reduce"] for look in looks)
    made = {"place": ("cell", "<module>"), "pending": ["nccl:all_reduce"], "dump_s": 0.0}
    spinning = [{**made, "states": "RR", "spent_s": 0.05}, {**made, "states": "SR", "spent_s": 0.0}]
    assert assumptions._wait_text(spinning) == "RS, spins in <module>: nccl:all_reduce"
    idle = {**made, "states": "SS", "spent_s": 0.0, "pending": []}
    assert assumptions._wait_text([idle]) == "S, sleeps in <module>: nothing pending"


def made_up(folder: Path, *cases: Case) -> Path:
    folder.mkdir()
    for case in cases:
        results.add(folder / results.FILE, case)
    return folder


def test_commands_are_put_together(tmp_path: Path) -> None:
    """What a later command did not run does not take back what an earlier one did."""
    first = made_up(
        tmp_path / "first",
        Case("machine", "machine", PASSED, measured=GPU),
        Case("faults", "a hang", NOT_RUN, "one", why="no time was left for it"),
        Case("faults", "a hang", RUNNING, "one"),
        Case("faults", "a hang", PASSED, "one", 4.25, {"back after, s": 3.1}),
    )
    second = made_up(
        tmp_path / "second",
        Case("machine", "machine", RUNNING),
        Case("machine", "machine", PASSED, measured=GPU),
        Case("faults", "a hang", NOT_RUN, "one", why="no time was left for it"),
        Case("probes", "waits", FAILED, why="no pending call | is seen\nin item"),
        Case("faults", "a hang", NOT_RUN, "own", why="needs 2 GPUs, this machine has 1"),
    )
    with tarfile.open(second / report.CAPTURES, "w:gz") as archive:
        archive.add(WHEELS, "traces/cuda_ddp/rank0.json.gz")
    page = tmp_path / "page.md"
    page.write_text(report.PAGE.read_text())

    report.keep([first, second], page, tmp_path / "data")

    lines = page.read_text().splitlines()
    assert lines[0] == "# On GPUs"
    assert "- gpus: NVIDIA H100 80GB HBM3, 81559 MiB, 580.1" in lines
    assert "2 passed, 1 failed, 0 timed out, 1 not run." in lines
    assert "- probes / waits: no pending call \\| is seen in item" in lines
    assert "| faults | a hang | 1 rank, NCCL | passed | 4.2 | back after, s 3.1 |" in lines
    assert lines[lines.index("- needs 2 GPUs, this machine has 1:") + 1] == (
        "  - faults, 2 GPUs, NCCL: a hang"
    )
    assert report.CPU_PAGE not in lines
    assert (tmp_path / "data/traces/cuda_ddp/rank0.json.gz").exists()


def test_results_of_cpu_ranks_stay_out_of_the_docs(tmp_path: Path) -> None:
    """The page and the data are as they were."""
    folder = made_up(
        tmp_path / "cpu", Case("machine", "machine", PASSED, measured={**GPU, "gpus": ""})
    )
    page = tmp_path / "page.md"
    page.write_text(report.PAGE.read_text())

    with pytest.raises(ValueError, match="results of CPU ranks"):
        report.keep([folder], page, tmp_path / "data")
    assert page.read_text() == report.PAGE.read_text()
    assert not (tmp_path / "data").exists()


def test_the_page_claims_only_what_was_run() -> None:
    """Either a machine with its GPUs stands there, or that nothing has been run."""
    text = report.PAGE.read_text()
    claims = text.partition("<!-- table:")[2].partition("<!-- end")[0]

    assert ("- gpus: " in claims) != ("Nothing of nbdist has been run on a GPU yet." in claims)
    assert {part.name for part in command.PARTS} <= {
        line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")
    }


def needs(names: tuple[str, ...]) -> dict[str, str]:
    """Name -> version of installed packages with all that they need."""
    versions: dict[str, str] = {}
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in versions:
            continue
        distribution = importlib.metadata.distribution(name)
        versions[name] = distribution.version
        required = map(Requirement, distribution.requires or [])
        waiting += [
            canonicalize_name(requirement.name)
            for requirement in required
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ]
    return versions


def test_the_wheels_are_all_that_is_missing() -> None:
    """What nbdist and its tests need, less what a machine with GPUs has; as it is pinned."""
    lines = [line for line in WHEELS.read_text().splitlines() if not line.startswith("#")]
    listed = dict(line.split("==") for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [Requirement(line).name for line in project["dependencies"]]
    missing = needs((*ours, *OF_TESTS))
    there = needs(THERE)

    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )  # fmt: skip

    assert listed.keys() == missing.keys() - there.keys()
    assert listed == {**listed, **{name: pinned[name] for name in listed if name in pinned}}
    assert lines == sorted(lines)


def test_the_supervisor_needs_nothing_but_python(tmp_path: Path) -> None:
    """It installs the rest first: what it imports is the standard library and itself."""
    program = (
        "import sys; before = {*sys.modules}; import tests.gpu.__main__, json;"
        "print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules if m not in before})))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    assert {*json.loads(done.stdout)} - {*sys.stdlib_module_names} == {"nbdist", "tests"}
