"""ipyparallel's own launchers (mpiexec, batch systems, users' profiles), and what they leave out.

They start ranks as their profile says. nbdist adds what a profile leaves open, asks for what they
do not report, and never lets an error of theirs hide an earlier one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import (
    BatchSystemLauncher,
    ControllerLauncher,
    HTCondorLauncher,
    LocalEngineSetLauncher,
    LSFLauncher,
    MPILauncher,
    PBSLauncher,
    SlurmLauncher,
)
from traitlets import Integer, Unicode
from traitlets.config import Config

from nbdist.cluster.hosts import Host
from nbdist.cluster.kernel.launchers.rank_set import RankSet
from nbdist.errors import OptionError, StartError

# Less than a stop waits for the loop in which these commands run.
COMMAND_DEADLINE_S = 50.0
STATE_DEADLINE_S = 10.0
# A lost rank is known after 5 to 6 s; ipyparallel's own 3000 ms x 10 take 35 s.
HEARTBEAT = ("--HeartMonitor.period=1000", "--HeartMonitor.max_heartmonitor_misses=5")
# How a batch system is asked for the state of a job; SGE's launcher is one of PBS's.
STATE_COMMANDS = {
    SlurmLauncher: ("squeue", "--format=%i %T %r", "--jobs={job}"),
    PBSLauncher: ("qstat", "{job}"),
    LSFLauncher: ("bjobs", "{job}"),
    HTCondorLauncher: ("condor_q", "{job}"),
}
ENDS_ALL = (
    "mpiexec ends all ranks when one of them ends. %dist_restart cannot bring one back; "
    "%dist_reset starts all again."
)


class KeptOutput:
    """A launcher whose processes' output is text whatever its bytes are, and is kept."""

    output_file: str
    _written = ""

    def get_output(self, remove: bool = False) -> str:
        """The processes' output outside of cells; the text of a removed file is kept.

        ipyparallel's own raises for bytes that are no UTF-8. It is called when the process has
        ended, before waiters are notified: an error here would leave them waiting.
        """
        path = Path(self.output_file)
        with contextlib.suppress(FileNotFoundError):
            self._written = path.read_text("utf-8", errors="replace")
        if remove:
            path.unlink(missing_ok=True)
        return self._written


class DistantController(ControllerLauncher):  # type: ignore[misc]
    """A controller of another machine: this kernel reaches it by its files, and cannot end it."""

    # The pid on the other machine; it is kept for a kernel there.
    pid = Integer(-1).tag(to_dict=True)
    output_file = Unicode().tag(to_dict=True)

    def poll(self) -> None:
        """It is not seen from here."""

    async def stop(self) -> None:
        """Leave the end to the engine's own guardian, which acts once the run's folder is gone."""


def complete(config: Config) -> None:
    """Let lost ranks be reported after some seconds, unless the profile sets heartbeats itself."""
    if "HeartMonitor" in config:
        return
    given = controller_args(config)
    new = [a for a in HEARTBEAT if not any(a.split("=")[0] in argument for argument in given)]
    config.Cluster.controller_args = [*given, *new]


def controller_args(config: Config) -> list[str]:
    """The arguments with which a profile starts the controller."""
    given = config.Cluster.get("controller_args", [])
    # No list: the profile has only appended to the default.
    return list(given if isinstance(given, list) else given.get_value([]))


def keep_scripts(config: Config, run_dir: Path) -> None:
    """Let batch scripts lie in the run's folder, where ipyparallel takes the notebook's."""
    for name, script in (
        ("BatchControllerLauncher", "controller.batch"),
        ("BatchEngineSetLauncher", "engines.batch"),
    ):
        config[name].setdefault("batch_file_name", str(run_dir / script))


def spread(config: Config, engine_launcher: type, profile: str, hosts: Sequence[Host]) -> None:
    """Let mpiexec start the ranks on these hosts; none for those that it finds itself.

    Raises:
        OptionError: If the profile's launcher takes no list of hosts.
    """
    if not hosts:
        return
    if not issubclass(engine_launcher, MPILauncher):
        raise OptionError(
            f"The hosts of the profile {profile!r} are its launcher's own. --hosts works with the "
            "profiles ssh, mpi and pretended."
        )
    listed = ",".join(f"{host.name}:{host.places or 1}" for host in hosts)
    section = config[engine_launcher.__name__]
    section.mpi_args = [*_unstarted(engine_launcher, config).mpi_args, "--host", listed]


def _unstarted(launcher: type, config: Config) -> Any:
    """A launcher that has its settings, and no file: a batch system's makes a folder for one."""
    has_file = "output_file" in launcher.class_traits()  # type: ignore[attr-defined]
    return launcher(config=config, **({"output_file": os.devnull} if has_file else {}))


def check_command(config: Config, launchers: Sequence[type], profile: str) -> None:
    """Find the commands that start a profile's processes.

    Raises:
        StartError: If one is not on this machine; nothing has been started.
    """
    for launcher in launchers:
        unstarted = _unstarted(launcher, config)
        command = getattr(unstarted, "mpi_cmd", None) or getattr(unstarted, "submit_command", None)
        if command and shutil.which(command[0]) is None:
            raise StartError(
                f"{command[0]!r}, by which the profile {profile!r} starts processes, is not "
                "installed here, or is not in PATH. Install it (OpenMPI's mpiexec: `apt-get "
                "install openmpi-bin`), start the notebook on a machine that has it (a cluster's "
                "login node), or use another --profile."
            )


def watched(launcher: type) -> type:
    """The launcher; for mpiexec and batch systems a subclass that keeps their output.

    Commands of a batch system get a deadline, and their stderr is in their error. That
    overrides the private `_run_command`, as ipyparallel lets stderr go wherever the notebook's
    goes, and waits for ever. (ipyparallel 9.2; held by tests/cluster/test_ipp_launchers.py.)
    Without it the error has only the exit status.
    """
    is_known = issubclass(launcher, (BatchSystemLauncher, MPILauncher))
    if not is_known or issubclass(launcher, KeptOutput):
        return launcher

    def run_command(self: Any, command: list[str], **options: Any) -> str:
        options = {"stderr": subprocess.PIPE, "timeout": COMMAND_DEADLINE_S, **options}
        try:
            output: str = run_original(self, command, **options)
        except subprocess.CalledProcessError as error:
            part = self.job_id_regexp.search((error.output or b"").decode(errors="replace"))
            if part and command == self.args:  # some of it is there: a stop has to delete it
                self.job_id = part.group(self.job_id_regexp_group)
            raise
        return output

    run_original: Any = getattr(launcher, "_run_command", None)
    members = {} if run_original is None else {"_run_command": run_command}
    # It keeps its name: profiles configure it by that.
    return type(launcher.__name__, (KeptOutput, launcher), members)


def rank_set(launcher: type) -> type:
    """The launcher of engines, with the plain answers of a RankSet where it has none."""
    if issubclass(launcher, RankSet):
        return launcher
    # Not what derives from ipyparallel's local one: its own for SSH does.
    members = {"is_on_this_machine": launcher is LocalEngineSetLauncher}
    return type(launcher.__name__, (launcher, RankSet), members)


def explain(error: Exception) -> str:
    """A launcher's error, with the output of its command."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"`{_line(error.cmd)}` did not end in {error.timeout:g} s."
    if not isinstance(error, subprocess.CalledProcessError):
        return f"{type(error).__name__}: {error}"
    said = (error.stderr or b"").decode(errors="replace").strip()
    status = f"`{_line(error.cmd)}` failed (exit status {error.returncode})"
    return f"{status}:\n    " + "\n    ".join(said.splitlines()) if said else f"{status}."


def _line(command: Any) -> str:
    return command if isinstance(command, str) else shlex.join(command)


def has_job(launcher: Any) -> bool:
    """Whether a launcher has something that it could end; a refused job has no number."""
    is_batch = isinstance(launcher, BatchSystemLauncher)
    return launcher is not None and (not is_batch or bool(launcher.job_id))


def output(started: Any) -> str:
    """The output of mpiexec or of a batch system's job, as far as it is on this machine."""
    return started.get_output() if isinstance(started, KeptOutput) else ""


def last_words(started: Any) -> str:
    """Mpiexec's own last sentence, which names the rank that ended first; empty without one."""
    blocks = re.split(r"^-{20,}$", output(started), flags=re.MULTILINE)
    said = [block for block in blocks[1:] if block.strip()]
    return " ".join(said[-1].split()) if said else ""


def state(config: Config, engine_set: Any) -> str:
    """The batch system's word on the job now, with its command; empty without one."""
    job = getattr(engine_set, "job_id", "")
    commands = [c for kind, c in STATE_COMMANDS.items() if isinstance(engine_set, kind)]
    command = config.Nbdist.get("state_command") or (commands[0] if commands else None)
    if not job or not command:
        return ""
    command = [word.replace("{job}", job) for word in command]
    try:
        done = subprocess.run(  # noqa: S603  # the profile's, or the batch system's own
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=STATE_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{shlex.join(command)}: {error}"
    said = (done.stdout + done.stderr).decode(errors="replace").strip()
    return f"{shlex.join(command)}:\n{said}" if said else ""


def notes(config: Config, engine_launcher: type) -> list[str]:
    """Notes on a profile at the start: what it cannot do, and what it says itself."""
    return [
        ENDS_ALL if issubclass(engine_launcher, MPILauncher) else "",
        str(config.Nbdist.get("note", "")),
    ]
