"""Commands of batch systems that stand in for the real ones, and really start the processes.

Each is a program: `python batch_stubs.py FOLDER COMMAND ARGUMENTS...`. What it was called with, and
the processes that it has started, it writes into FOLDER.
"""

import base64
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

CALLS = "calls"
REFUSAL = "refusal"  # of a submission: what the command says on stderr before it fails


def install(folder: Path, *commands: str) -> Path:
    """Put programs of these names into FOLDER/bin, to be prepended to PATH."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in commands:
        program = programs / name
        program.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "{folder}" {name} "$@"\n'
        )
        program.chmod(0o700)
    return programs


def calls(folder: Path) -> list[list[str]]:
    """What the commands were called with so far."""
    path = folder / CALLS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def pids(folder: Path, job: str, state: str = "pids") -> list[int]:
    """The processes of a job that was not deleted yet, or with "ended" of one that was."""
    path = folder / f"{job}.{state}"
    return json.loads(path.read_text()) if path.exists() else []


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _start(folder: Path, job: str, processes: Iterable[dict[str, Any]]) -> None:
    started = [
        subprocess.Popen(
            options.pop("args"),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )
        for options in processes
    ]
    (folder / f"{job}.pids").write_text(json.dumps([process.pid for process in started]))


def _end(folder: Path, job: str) -> bool:
    """End a job's processes; whether there was such a job."""
    if not (folder / f"{job}.pids").exists():
        return False
    for pid in pids(folder, job):
        try:
            os.killpg(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue
    (folder / f"{job}.pids").rename(folder / f"{job}.ended")
    return True


def _refuse(folder: Path) -> None:
    path = folder / REFUSAL
    if path.exists():
        sys.exit(path.read_text())


def kubectl(folder: Path, arguments: list[str]) -> None:
    """Creates a Secret and an Indexed Job, lists pods, and deletes both by their name."""
    match arguments:
        case ["create", "-f", file]:
            objects = list(yaml.safe_load_all(Path(file).read_text()))
            (folder / "objects.json").write_text(json.dumps(objects))
            by_kind = {entry["kind"]: entry for entry in objects}
            secret, job = by_kind["Secret"], by_kind["Job"]
            _say(f"secret/{secret['metadata']['name']} created")
            _refuse(folder)
            _start(folder, job["metadata"]["name"], _pods(folder, job, secret))
            _say(f"job.batch/{job['metadata']['name']} created")
        case ["delete", *_, "job,secret", name]:
            if _end(folder, name):
                _say(f'job.batch "{name}" deleted')
            _say(f'secret "{name}" deleted')
        case ["get", "pods", "--selector", selector]:
            _say(f"NAME STATUS\n{selector.removeprefix('job-name=')}-0 ImagePullBackOff")
        case _:
            sys.exit(f"error: unknown command {arguments}")


def _pods(folder: Path, job: dict[str, Any], secret: dict[str, Any]) -> Any:
    """What a kubelet would start: nothing of the notebook's environment is there."""
    spec = job["spec"]
    [container] = spec["template"]["spec"]["containers"]
    values = {name: str(value) for name, value in secret["stringData"].items()}
    values |= {n: base64.b64decode(v).decode() for n, v in secret.get("data", {}).items()}
    for index in range(spec["completions"]):
        home = folder / f"pod-{index}"
        home.mkdir()
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1"}
        environment["NBDIST_PRELOAD"] = "0"  # no import that no cell asks for
        for source in container.get("envFrom", []):
            if source["secretRef"]["name"] == secret["metadata"]["name"]:
                environment |= values
        environment["JOB_COMPLETION_INDEX"] = str(index)
        command = [sys.executable if word == "python" else word for word in container["command"]]
        with (home / "log").open("wb") as log:
            yield {"args": command, "env": environment, "cwd": home, "stdout": log}


def qsub(folder: Path, arguments: list[str]) -> None:
    """Runs a PBS script with an array once for each number, all with the caller's environment."""
    _refuse(folder)
    [script] = arguments
    text = Path(script).read_text()
    (folder / "script").write_text(text)
    options = dict(re.findall(r"^#PBS -(\w)\s+(\S.*)$", text, flags=re.MULTILINE))
    first, last = map(int, options["t"].split("-"))
    assert re.search(r"^#PBS -V$", text, flags=re.MULTILINE)
    with Path(options["o"]).open("ab") as log:
        _start(
            folder,
            "4711",
            [
                {"args": ["/bin/sh", script], "stdout": log, "env": environment}
                for index in range(first, last + 1)
                for environment in [
                    {**os.environ, "PBS_JOBID": "4711[]", "PBS_ARRAYID": str(index)}
                ]
            ],
        )
    _say("4711[].head")


def qdel(folder: Path, arguments: list[str]) -> None:
    """Ends a job."""
    [job] = arguments
    if not _end(folder, job):
        sys.exit(f"qdel: Unknown Job Id {job}")


def qstat(_folder: Path, arguments: list[str]) -> None:
    """Says that the job waits."""
    _say(f"Job ID  S  Queue\n{arguments[0]}[].head  Q  batch")


COMMANDS = {"kubectl": kubectl, "qsub": qsub, "qdel": qdel, "qstat": qstat}


def main() -> None:
    """Run one command."""
    folder, name, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    with (folder / CALLS).open("a") as file:
        file.write(json.dumps([name, *arguments]) + "\n")
    COMMANDS[name](folder, arguments)


if __name__ == "__main__":
    main()
