"""What nbdist takes for granted of torch, CUDA, NCCL and Gloo, each looked at in its own process.

python -m tests.gpu.probes [NAME ...]     all but `machine` and `doctor`, or these
python -m tests.gpu.probes --here NAME    one, in this process

A probe that crashes or hangs ends itself alone. What it returns is shown on the page; where it
raises an AssertionError, nbdist's assumption does not hold. tests/gpu/assumptions.py has them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu import assumptions, results
from tests.gpu.assumptions import PROBES
from tests.gpu.results import FAILED, NOT_RUN, PASSED, RUNNING, TIMED_OUT, Case

_RESULT = "RESULT "
_WHY_CHARACTERS = 1500


def main(words: Sequence[str] | None = None) -> int:
    """1 where a probe has failed."""
    parser = argparse.ArgumentParser("python -m tests.gpu.probes")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--here", action="store_true")
    asked = parser.parse_args(words)
    names = asked.names or [name for name in PROBES if name not in {"machine", "doctor"}]
    if asked.here:
        _look_here(names[0])
    path, part = os.environ.get(results.LOG), os.environ.get(results.PART, "probes")
    results_path = Path(path or os.devnull)
    for name in names:
        results.add(results_path, Case(part, name, NOT_RUN, why="no time was left for it"))
    failed = False
    for name in names:
        results.add(results_path, Case(part, name, RUNNING))
        case = run(part, name)
        results.add(results_path, case)
        failed = failed or case.outcome in {FAILED, TIMED_OUT}
    return int(failed)


def run(part: str, name: str) -> Case:
    """A probe in a process of its own, and how it ended."""
    chosen = PROBES[name]
    if not chosen.on_cpu and assumptions.gpu_count() == 0:
        return Case(part, name, NOT_RUN, why="needs 1 GPU, this machine has 0")
    began_s, said = time.monotonic(), ""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.probes", "--here", name],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=chosen.limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        said, _ = process.communicate()
        return Case(part, name, TIMED_OUT, seconds=chosen.limit_s, why=said[-_WHY_CHARACTERS:])
    finally:
        _end(process)
        print(said, flush=True)
    took_s = round(time.monotonic() - began_s, 1)
    answers = [line for line in said.splitlines() if line.startswith(_RESULT)]
    if not answers:
        why = f"exit code {process.returncode}: {said[-_WHY_CHARACTERS:]}"
        return Case(part, name, FAILED, seconds=took_s, why=why)
    answer = json.loads(answers[-1].removeprefix(_RESULT))
    outcome = FAILED if answer["why"] else PASSED
    return Case(part, name, outcome, "", took_s, answer["measured"], answer["why"])


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a probe and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _look_here(name: str) -> None:
    """Look, say it in a line, and end without what may hang at a process' end."""
    measured: dict[str, Any] = {}
    try:
        measured, why = PROBES[name].look(), ""
    except BaseException as error:  # noqa: BLE001  # whatever it is, the page says it
        traceback.print_exc()
        why = "".join(traceback.format_exception_only(error)).strip()
    print(_RESULT + json.dumps({"measured": measured, "why": why}, default=str), flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
