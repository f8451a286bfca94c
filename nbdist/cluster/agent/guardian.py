"""Waits for the notebook kernel to end, then ends all that it had started and cleans up.

Ranks that are kept go on without a kernel: then it waits until another kernel holds the run, which
has a guardian of its own, or until their time is over.

A program of its own (`python -I -S guardian.py KERNEL_PID RUN_DIR`), not a module: it must
outlive the kernel and start in milliseconds, so it uses the standard library alone.
A line of its standard input is JSON: the sessions to end, by the process that leads each, the
command that ends what is elsewhere, and for how long the ranks are kept, with the kernel's mark in
owner.json. The newest line counts. The line `stop` means that the cluster stops; the input's end
means the same unless the ranks are kept. It ends nothing that the kernel did not start: only
members of the sessions it was told of, processes that carry this run's NBDIST_RUN, and what the
command ends. Its output says nothing, but its end is seen.
"""

from __future__ import annotations

import io
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Mapping

# The prefix of the names of agents' folders, which are beside those of runs.
RANKS = "ranks-"
END_S = 3.0
END_POLL_S = 0.01
# Not on macOS, which has no list of sessions or environments.
HAS_PROC = os.path.isdir("/proc/self")
# A process that is being started has no environment yet: it has one when this is over.
START_S = 0.05
# The limit of the command that ends processes elsewhere; it is run again if it fails.
COMMAND_DEADLINE_S = 20.0
COMMAND_PAUSE_S = 1.0
# Seconds between looks at whether another kernel holds a kept run.
HOLD_POLL_S = 0.25
# The guardian's exit code where another kernel holds the run now.
TAKEN = 3
# cluster/run_owner.py has the same names.
OWNER, DETACHED = "owner.json", "detached.json"
# Before ranks whose time is over are ended, what they have is saved, if that was asked for.
SAVE_DEADLINE_S = 1800.0
# Behind the checkpoint's path: the file that says how it was written.
LOG = ".log"


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name; None once it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()
    except OSError:
        return None


def start_ticks(pid: int) -> str | None:
    """When a process started, in clock ticks: a pid that was used again differs in it."""
    fields = stat_fields(pid)
    return fields[19] if fields else None


def members(sessions: Mapping[int, str | None], marker: bytes = b"") -> dict[int, str]:
    """Processes of these sessions, or with this marker in their environment: pid -> start time."""
    # A session's leader with another start time is a stranger that got the pid again.
    ours = {pid for pid, start in sessions.items() if start_ticks(pid) in (None, start)}
    starts = {}
    for entry in os.listdir("/proc") if HAS_PROC else ():
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        fields = stat_fields(int(entry))
        if fields is None or fields[0] == "Z":
            continue
        if int(fields[3]) in ours or (marker and has_marker(int(entry), marker)):
            starts[int(entry)] = fields[19]
    return starts


def has_marker(pid: int, marker: bytes) -> bool:
    """Whether the process was started with this run's NBDIST_RUN."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read().split(b"\0")
    except OSError:
        return False


def process_descriptor(pid: int) -> int:
    """A descriptor (pidfd) of this process, however long it is open; -1 where there are none.

    Raises:
        ProcessLookupError: If the process has gone already.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # macOS, or refused by a sandbox
        return -1


def send(pid: int, start: str, number: int) -> bool:
    """Signal a process; whether it was still the one that started then."""
    descriptor = -1
    try:
        descriptor = process_descriptor(pid)
        # From here on the descriptor means this process, even if another gets its pid later.
        if start_ticks(pid) not in (None, start):
            return False
        if descriptor < 0:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
    except OSError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True


def end_all(
    sessions: Mapping[int, str | None], marker: bytes = b"", deadline_s: float = END_S
) -> tuple[set[int], set[int]]:
    """Kill until nothing is left, or the time is over; a dying process may just be forking.

    Returns:
        The processes that were killed, and those that live on.
    """
    killed: set[int] = set()
    if not HAS_PROC:
        for pid in sessions:
            try:
                os.killpg(pid, signal.SIGKILL)
            except OSError:
                continue
    was_empty, end_s = not marker, time.monotonic() + deadline_s
    while (left := members(sessions, marker)) or not was_empty:
        if time.monotonic() > end_s:
            break
        was_empty = not left or not marker
        killed.update(pid for pid, start in left.items() if send(pid, start, signal.SIGKILL))
        time.sleep(END_POLL_S if left else START_S)
    return killed, set(left)


def run(words: list[str], deadline_s: float, output: io.TextIOWrapper | None = None) -> str:
    """Run one of the kernel's commands; why it failed, or ""."""
    import subprocess  # most guardians run none

    try:
        subprocess.run(  # noqa: S603  # the kernel's own command
            words,
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.DEVNULL,
            stderr=output or subprocess.DEVNULL,
            timeout=deadline_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


def run_command(words: list[str]) -> bool:
    """Run the command that ends processes elsewhere, such as a batch job; return whether it did."""
    for pause_s in (COMMAND_PAUSE_S, 0.0):
        if not run(words, COMMAND_DEADLINE_S):
            return True
        time.sleep(pause_s)
    return False


class Orders:
    """The content of the pipe so far.

    Attributes:
        sessions: pid -> start time of the processes to end.
        command: The command that ends the part of the run that is elsewhere.
        keep_s: How long ranks are kept without a kernel; 0 for not.
        hold: The kernel's mark in owner.json: another one there is another kernel's.
        is_stopped: `stop` was said.
    """

    def __init__(self, run_dir: str):
        self.run_dir = run_dir
        self.sessions: dict[int, str] = {}
        self.command: list[str] = []
        self.keep_s = 0.0
        self.hold = ""
        self.machine: object = None  # of this guardian, as owner.json has it
        self.is_stopped = False
        self._text = b""

    def read(self) -> bool:
        """Take in the pipe's new lines; return False when it has ended or said `stop`."""
        while True:
            try:
                chunk = os.read(0, 4096)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            *lines, self._text = (self._text + chunk).split(b"\n")
            for line in lines:
                if line == b"stop":
                    self.is_stopped = True
                    return False
                self._take(**json.loads(line))

    def _take(self, sessions: dict[str, str], command: list[str], keep_s: float, hold: str) -> None:
        self.sessions = {int(pid): start for pid, start in sessions.items()}
        self.command, self.keep_s, self.hold = command, keep_s, hold
        owner = owner_of(self.run_dir)
        self.machine = owner.get("machine") if owner.get("hold") == hold else self.machine

    @property
    def is_taken(self) -> bool:
        """Whether another kernel holds the run."""
        return bool(self.keep_s) and is_held_by_another(self.run_dir, self.hold)


def hold_of(run_dir: str) -> str:
    """The mark of the kernel that holds a run; empty where it cannot be read."""
    return str(owner_of(run_dir).get("hold", ""))


def is_held_by_another(run_dir: str, hold: str) -> bool:
    """Whether the kernel that holds a run has another mark than this."""
    return hold_of(run_dir) not in {hold, ""}


def owner_of(run_dir: str) -> dict[str, object]:
    """The kernel that holds a run, as owner.json has it; empty where that cannot be read."""
    try:
        with open(os.path.join(run_dir, OWNER)) as file:
            return dict(json.load(file))
    except (OSError, ValueError, TypeError):
        return {}


def is_removed(path: str) -> bool:
    """Whether there is no such file; a network's file system that does not answer says nothing."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def wait(kernel: int, orders: Orders) -> None:
    """Return once the kernel is gone, has closed the pipe, or does not hold the run any more."""
    os.set_blocking(0, False)
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    try:
        kernel_descriptor = process_descriptor(kernel)
    except ProcessLookupError:
        orders.read()  # what it had still said
        return
    if kernel_descriptor >= 0:  # without it the pipe's end still tells
        poller.register(kernel_descriptor, select.POLLIN)
    while True:
        pause_ms = HOLD_POLL_S * 1000 if orders.keep_s else None
        ready = {descriptor for descriptor, _ in poller.poll(pause_ms)}
        if (0 in ready and not orders.read()) or kernel_descriptor in ready or orders.is_taken:
            orders.read()
            return


def keep(orders: Orders) -> bool:
    """Let kept ranks go on without a kernel; return whether they are to be ended then.

    They are not where another kernel holds the run. A file says until when they are kept.
    """
    if not orders.keep_s or orders.is_stopped:
        return True
    begun_s = time.monotonic()
    note = {"since_s": time.time(), "until_s": time.time() + orders.keep_s, "pid": os.getpid()}
    path = os.path.join(orders.run_dir, DETACHED)
    try:
        with open(path + ".new", "w") as file:
            json.dump(note, file)
        os.replace(path + ".new", path)
    except OSError:
        pass  # a full disk, or the folder is gone: see below
    while time.monotonic() < begun_s + orders.keep_s:
        if orders.is_taken:
            return False
        if is_removed(orders.run_dir):
            return True  # nobody can attach any more
        time.sleep(HOLD_POLL_S)
    return not save(orders)


def outlasts(orders: Orders) -> bool:
    """Wait for the end of a run that another machine's kernel holds; False if one of this has it.

    That kernel's own guardian cannot end the run's processes here, such as its controller.
    """
    os.dup2(2, 1)  # nowhere: for the kernel this guardian ends with its output
    while not is_removed(os.path.join(orders.run_dir, OWNER)):
        if owner_of(orders.run_dir).get("machine", orders.machine) == orders.machine:
            return False
        time.sleep(HOLD_POLL_S)
    return True


def read_at_end(run_dir: str) -> tuple[list[str], str]:
    """The command to run when kept ranks' time is over, and its output file; empty without."""
    for name in ("keep.json", "keep.copy.json"):
        try:
            with open(os.path.join(run_dir, name)) as file:
                written = json.load(file)
            return written["at_end"], written["save"] + LOG
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return [], ""


def save(orders: Orders) -> bool:
    """Let another process save kept ranks' state and end them; return whether it holds the run.

    Its output is in a file beside the checkpoint.
    """
    words, path = read_at_end(orders.run_dir)
    if words:
        with open_log(path) as log:
            if problem := run(words, SAVE_DEADLINE_S, log):
                log.write(f"{problem}\n")
    return orders.is_taken


def open_log(path: str) -> io.TextIOWrapper:
    """The file, made anew with its folder; where that cannot be, one that takes all to nowhere."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return open(path, "w")
    except OSError:
        return open(os.devnull, "w")


def sweep_shm(run_dir: str, killed: set[int], shm: str = "/dev/shm") -> None:  # noqa: S108
    """Remove files that were in transit in /dev/shm when processes were killed.

    The run's own folders, and torch's files, which a DataLoader's worker removes as soon as it has
    made them: `torch_PID_...`.
    """
    # cluster/shm.py has the same names.
    prefix = f"nbdist-{os.getuid()}-{os.path.basename(run_dir)}-"
    of_killed = tuple(f"torch_{pid}_" for pid in killed)
    try:
        names = os.listdir(shm)
    except OSError:
        return  # macOS has none
    for name in names:
        path = os.path.join(shm, name)
        if name.startswith(prefix):
            shutil.rmtree(path, ignore_errors=True)
        elif name.startswith(of_killed):
            try:
                os.unlink(path)
            except OSError:  # gone just now, or somebody else's
                continue


def sweep(folder: str, sessions: Mapping[int, str | None]) -> None:
    """Kill these sessions and what else is of an agent's ranks, and remove its folder."""
    killed, _ = end_all(sessions, b"NBDIST_RUN=" + os.fsencode(folder))
    sweep_shm(folder, killed | sessions.keys())
    shutil.rmtree(folder, ignore_errors=True)


def agents_folders(run_dir: str) -> list[str]:
    """List folders of this machine's agents that were killed before they could tidy up."""
    base, run = os.path.split(run_dir)
    try:
        names = os.listdir(base)
    except OSError:
        return []
    return [os.path.join(base, name) for name in names if name.startswith(f"{RANKS}{run}-")]


def main() -> None:
    """Wait for the kernel's end, then end its processes and remove its run folder."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    kernel, run_dir = int(sys.argv[1]), sys.argv[2]
    orders = Orders(run_dir)
    wait(kernel, orders)
    # The exit code reports to the kernel, if it lives; the process that stays is a child.
    if (orders.is_taken or not keep(orders)) and (os.fork() or not outlasts(orders)):
        sys.exit(TAKEN)
    command = orders.command
    killed, _ = end_all(orders.sessions, b"NBDIST_RUN=" + os.fsencode(run_dir))
    for folder in agents_folders(run_dir):
        sweep(folder, {})
    # Not before: a process that was just being started there is there now, or never will be.
    is_ended = not command or run_command(command)
    sweep_shm(run_dir, killed)
    if not is_ended:
        return  # the folder tells whoever cleans up later what there is to end
    shutil.rmtree(run_dir, ignore_errors=True)
    try:
        os.rmdir(os.path.dirname(run_dir))  # the folder of this user's runs, if it was the last
    except OSError:
        return


if __name__ == "__main__":
    main()
