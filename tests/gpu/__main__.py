"""Everything that nbdist does on this machine's GPUs, within a time limit: `make gpu`.

python -m tests.gpu [PART ...] [--cpu] [--budget SECONDS] [--wheels FOLDER]

Writes results, a log, a page and captured files into $OUT, or into build/gpu; all parts together
also write the table of docs/gpu.md and the files in tests/data. With `--cpu` the same tests run on
two CPU ranks, where they can, and nothing else is written.

Nothing is imported here but the standard library: the wheels that bring the rest are installed
first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu import assumptions, results
from tests.gpu.results import FAILED, NOT_RUN, PASSED, TIMED_OUT, Case

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "gpu"
# Ten minutes with what comes before the first part and after the last one.
BUDGET_S = 570.0
# How long a part may take to end once it is told to; what has less than twice that does not begin.
END_S = 10.0
PAGE_S = 20.0
NO_GPU = (
    "There is no GPU here: the driver lists none that CUDA_VISIBLE_DEVICES leaves visible. "
    "`python -m tests.gpu --cpu` runs the same tests on two CPU ranks."
)
# A machine's own plugins stay out (environment), and its torch may warn of anything.
_PYTEST = (
    "-m", "pytest", "-q", "-m", "", "-o", "filterwarnings=default",
    "-p", "no:cacheprovider", "-p", "pytest_timeout", "--durations=10",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """A process of its own, with its own deadline.

    Attributes:
        command: Of Python.
        weight: Its share of the time that is left, beside the weights of the parts after it.
    """

    name: str
    command: tuple[str, ...]
    weight: float


def _tests(name: str, weight: float, *files: str) -> Part:
    return Part(
        name, (*_PYTEST, *(f"tests/gpu/test_{file}.py" for file in files or [name])), weight
    )


PARTS = (
    Part("machine", ("-m", "tests.gpu.probes", "machine", "doctor"), 2),
    _tests("faults", 8, "faults", "rank_server"),
    _tests("training", 8),
    _tests("programs", 6),
    _tests("parity", 8),
    _tests("recordings", 5, "recordings", "memory", "monitor"),
    Part("probes", ("-m", "tests.gpu.probes"), 10),
    _tests("collectives", 3),
    _tests("bandwidth", 3),
)


def main(words: Sequence[str] | None = None) -> int:
    """0 where everything that ran has passed, 1 where it has not, or nothing has run."""
    began_s = time.monotonic()
    asked = _asked(words)
    if not asked.cpu and assumptions.gpu_count() == 0:
        sys.stderr.write(f"{NO_GPU}\n")
        return 1
    out = Path(os.environ.get("OUT") or WORK).resolve()
    out.mkdir(parents=True, exist_ok=True)
    log, results_path = out / "log.txt", out / results.FILE
    for path in (log, results_path):
        path.write_text("")
    with tempfile.TemporaryDirectory() as captured:
        env = environment(asked, results_path, captured)
        if asked.wheels:
            install(Path(asked.wheels), log, asked.budget)
        run_all(asked, began_s + asked.budget - PAGE_S, log, results_path, env)
        is_all = not (asked.cpu or asked.parts or asked.select)
        return conclude(results_path, out, env, is_for_docs=is_all)


def run_all(
    asked: argparse.Namespace, end_s: float, log: Path, results_path: Path, env: Mapping[str, str]
) -> None:
    """Run the parts that were asked for, each in its share of the time."""
    parts = [part for part in PARTS if not asked.parts or part.name in asked.parts]
    for number, part in enumerate(parts):
        limit_s = share(parts[number:], end_s - time.monotonic())
        print(f"{part.name}: {limit_s:.0f} s at most", flush=True)
        run(part, limit_s, log, results_path, env)


def _asked(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(p.name for p in PARTS))
    parser.add_argument("--cpu", action="store_true", help="on two CPU ranks")
    parser.add_argument("--select", default="", metavar="WORDS", help="of tests, as pytest's -k")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS")
    parser.add_argument("--wheels", metavar="FOLDER", help="install these first, without a network")
    asked = parser.parse_args(words)
    names = [part.name for part in PARTS]
    for name in set(asked.parts).difference(names):
        parser.error(f"there is no part {name!r}: choose from {', '.join(names)}")
    return asked


def environment(asked: argparse.Namespace, results_path: Path, captured: str) -> dict[str, str]:
    """What every part runs in.

    The folder of the wheels must be called site-packages: nbdist tells libraries from the user's
    code by it.
    """
    env = {**os.environ, results.LOG: str(results_path), results.DATA: captured}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    env.pop("PYTEST_CURRENT_TEST", None)
    path = [str(WORK / "site-packages")] if asked.wheels else []
    path += [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(path)
    if asked.select:
        env["PYTEST_ADDOPTS"] = shlex.join(["-k", asked.select])
    if asked.cpu:
        env |= {results.ON_CPU: "1", "CUDA_VISIBLE_DEVICES": ""}
    return env


def install(wheels: Path, log: Path, limit_s: float) -> None:
    """Install wheels beside the packages that are there.

    Raises:
        FileNotFoundError: If there are none.
        subprocess.CalledProcessError, subprocess.TimeoutExpired: If pip did not.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise FileNotFoundError(f"{wheels} has no wheels: `make wheels` brings them.")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    with log.open("a") as file:
        subprocess.run(
            [*pip, "--no-index", "--no-deps", "--upgrade", "--target", str(WORK / "site-packages"),
             *map(str, files)],
            stdout=file, stderr=file, timeout=limit_s, check=True,
        )  # fmt: skip


def share(parts: Sequence[Part], left_s: float) -> float:
    """How long the first of the parts may take, so that the others have their share."""
    return left_s * parts[0].weight / sum(part.weight for part in parts)


def run(part: Part, limit_s: float, log: Path, results_path: Path, env: Mapping[str, str]) -> None:
    """Run a part until it ends or its time is over; every case of it is in the results then."""
    if limit_s < 2 * END_S:
        results.add(
            results_path, Case(part.name, "all of it", NOT_RUN, why="no time was left for it")
        )
        return
    began_s = time.monotonic()
    with log.open("a") as file:
        file.write(f"\n=== {part.name}\n")
        file.flush()
        process = subprocess.Popen(
            [sys.executable, *part.command],
            cwd=ROOT, env={**env, results.PART: part.name},
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
        code = _wait(process, limit_s - END_S)
    took_s = round(time.monotonic() - began_s, 1)
    is_over = took_s >= limit_s - END_S
    outcomes = {case.outcome for case in results.read([results_path]) if case.part == part.name}
    if is_over or code not in {0, 1} or (code == 1 and not outcomes & {FAILED, TIMED_OUT}):
        why = "it was ended at its deadline" if is_over else f"exit code {code}: see the log"
        outcome = TIMED_OUT if is_over else FAILED
        results.add(
            results_path, Case(part.name, "the part as a whole", outcome, seconds=took_s, why=why)
        )


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int:
    """Its exit code. Past its time it is interrupted, so that ranks are ended; then killed."""
    for wait_s, then in ((limit_s, signal.SIGINT), (END_S, signal.SIGKILL), (END_S, None)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(wait_s)
            with contextlib.suppress(ProcessLookupError):  # what it has left in its group
                os.killpg(process.pid, signal.SIGKILL)
            return code
        if then is not None:
            os.killpg(process.pid, then)
    raise AssertionError(f"process {process.pid} does not end")


def conclude(results_path: Path, out: Path, env: Mapping[str, str], *, is_for_docs: bool) -> int:
    """Write the page, say what came of all, and return the exit code."""
    where = ["--docs"] if is_for_docs else []
    report = [sys.executable, "-m", "tests.gpu.report", str(out), *where]
    written = subprocess.run(report, cwd=ROOT, env=dict(env), timeout=PAGE_S, check=False)
    cases = results.read([results_path])
    counts = Counter(case.outcome for case in cases)
    for case in cases:
        if case.outcome in {FAILED, TIMED_OUT}:
            print(f"{case.outcome}: {case.part}: {case.name} {case.on}\n  {case.why[:600]}")
    print(", ".join(f"{counts[word]} {word}" for word in (PASSED, FAILED, TIMED_OUT, NOT_RUN)))
    print(f"{out}: " + ", ".join(sorted(path.name for path in out.iterdir() if path.is_file())))
    has_failed = counts[PASSED] == 0 or counts[FAILED] + counts[TIMED_OUT] > 0
    return int(has_failed or written.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
