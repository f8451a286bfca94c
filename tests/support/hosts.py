"""Several hosts on one machine: real network, names, homes, /tmp and process tables of their own.

Linux namespaces, held by threads of the process that asks and by one small process for each host:
nothing gets a name on the machine, and all of it ends with its owner, whatever ends that. Needs
root. `python -m tests.support.hosts` brings one up by hand, with a shell on its head.
"""

import argparse
import contextlib
import ctypes
import functools
import ipaddress
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.support.host_services import SLURM_PARTITIONS, SSHD_CONFIG, slurm_files

HEAD = "head"
USER = "researcher"  # on every host beside root, with a home of their own
SHARED = Path("/srv")  # the same files on every host

_USER_ID = 4242
_HOMES = {"root": Path("/root"), USER: Path("/home") / USER}
# Empty on each host, but for what lies below and Python needs: the checkout and itself.
_PRIVATE = {
    **dict.fromkeys(("/tmp", "/var/tmp", "/dev/shm"), "1777"),
    **dict.fromkeys(("/run", "/var/log", "/home", "/root"), "755"),
}
_CHECKOUT = Path(__file__).parents[2]
_NEEDED = [
    needed
    for path in (_CHECKOUT, Path(sys.prefix), Path(sys.base_prefix))
    for needed in (path, path.resolve())
]

_NETWORK = ipaddress.ip_network("10.79.0.0/24")
_DEAD_NETWORK = ipaddress.ip_network("10.80.0.0/24")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Process 1 of a host: every other one ends with it. `cat` ends when its owner does (end of file,
# or the signal where a fork of the owner has the pipe's other end); a process whose parent ignores
# SIGCHLD leaves no zombie.
_FIRST_PROCESS = "mount -t proc proc /proc && echo up && exec env --ignore-signal=CHLD cat"

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_NAME, _NEW_IPC, _NEW_PIDS, _NEW_NET = (
    0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000,
)  # fmt: skip
_MS_BIND, _MS_RECURSIVE, _MS_PRIVATE = 0x1000, 0x4000, 0x40000

T = TypeVar("T")


class HostError(RuntimeError):
    """A host or a service on it did not come up, or a command on it failed."""


def missing(*programs: str) -> str:
    """Why no hosts can be made here, or which of the `programs` is not installed; "" if none."""
    if sys.platform != "linux":
        return f"hosts are Linux namespaces, and this is {sys.platform}"
    if os.getuid() != 0:
        return "hosts need root"
    absent = [program for program in ("ip", *programs) if not shutil.which(program, path=_PATH)]
    return f"not installed: {', '.join(absent)}" if absent else _refusal()


@functools.cache
def _refusal() -> str:
    """What the kernel says against new namespaces, as in a container without the right to."""
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(_separate, _NEW_MOUNTS | _NEW_NET).result()
        except OSError as error:
            return f"hosts need new namespaces: {error}"
    return ""


def wait_for(what: str, look: Callable[[], T], timeout_s: float = 30.0) -> T:
    """The first answer of `look` that is true; HostError with `what` after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not (answer := look()):
        if time.monotonic() > end:
            raise HostError(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.02)
    return answer


@dataclass
class _Host:
    """A host: the thread whose children run in it, and its process 1."""

    name: str
    address: str
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    first: subprocess.Popen[str] | None = None

    def do(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call `function` in the host's thread: it sees the host's files and network."""
        return self.thread.submit(function, *arguments, **options).result()


class Hosts:
    """A head and `n` nodes on one switch: `head`, `node1`, `node2`, ...; a context manager.

    `clocks` maps a host to how far its clock is off, as {"node2": "+1h"}; what Slurm starts has
    the right time. `named_loopback` are hosts whose /etc/hosts has Debian's line 127.0.1.1 with
    their own name, `dead_interface` hosts that have a first interface, up and with an address,
    that leads nowhere. `shares_homes` gives all hosts the same homes.
    """

    def __init__(
        self,
        n: int = 3,
        *,
        clocks: Mapping[str, str] | None = None,
        named_loopback: Sequence[str] = (),
        dead_interface: Sequence[str] = (),
        shares_homes: bool = False,
    ) -> None:
        self.head = HEAD
        self.nodes = [f"node{i}" for i in range(1, n + 1)]
        self.shared = SHARED
        self._clocks = dict(clocks or {})
        self._named_loopback = named_loopback
        self._dead_interface = dead_interface
        self._shares_homes = shares_homes
        self._hosts: dict[str, _Host] = {}
        self._switch = ThreadPoolExecutor(1)
        self._processes: list[subprocess.Popen[str]] = []
        for name, address in zip(self.names, _NETWORK.hosts(), strict=False):
            self._hosts[name] = _Host(name, str(address))

    @property
    def names(self) -> list[str]:
        """The head and the nodes."""
        return [self.head, *self.nodes]

    def address(self, host: str) -> str:
        """The address of `host` on the network of all hosts."""
        return self._hosts[host].address

    def path(self, host: str, path: str | Path) -> Path:
        """Where this process finds the absolute `path` of `host`, private folders included."""
        return Path(f"/proc/{self._first(host).pid}/root{path}")

    def __enter__(self) -> Self:
        try:
            self._switch.submit(self._make_switch).result()
            for host in self._hosts.values():
                # A thread that the switch's thread starts begins with its files, shared ones too.
                self._switch.submit(host.thread.submit, os.getpid).result().result()
                host.do(self._make_host, host)
                self._switch.submit(self._plug_in, host).result()
                host.do(self._configure_network, host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of every host; the kernel then takes network and files away."""
        first = [host.first for host in self._hosts.values() if host.first is not None]
        for process in first:
            process.kill()
        # A host's process 1 is gone when we have taken note of every process started there.
        for process in (*self._processes, *first):
            process.wait(30)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self._processes.clear()
        for host in self._hosts.values():
            host.first = None
        for thread in (*(host.thread for host in self._hosts.values()), self._switch):
            thread.shutdown()

    # --- commands on a host

    def popen(
        self,
        host: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        user: str = "root",
        **options: Any,
    ) -> "subprocess.Popen[str]":
        """Start `argv` on `host` in the user's home; other options are subprocess.Popen's.

        Its environment is that of a fresh login and `env`. Its pid is this machine's, for
        signals; the host's own number for it is in `pids`. It ends with the host at the latest.
        """
        ids = {} if user == "root" else {"user": _USER_ID, "group": _USER_ID, "extra_groups": []}
        environment = {
            "PATH": _PATH, "HOME": str(_HOMES[user]), "USER": user, "LOGNAME": user,
            "SHELL": "/bin/bash", "LANG": "C.UTF-8", "NBDIST_PRELOAD": "0",
            **self._clock_variables(host), **(env or {}),
        }  # fmt: skip
        defaults = {
            "cwd": _HOMES[user], "text": True, "start_new_session": True,
            "stdin": subprocess.DEVNULL,
        }  # fmt: skip
        process = self._hosts[host].do(
            subprocess.Popen, list(map(str, argv)), env=environment, **(defaults | ids | options)
        )
        self._processes.append(process)
        return process

    def run(
        self,
        host: str,
        argv: Sequence[str | Path],
        *,
        input: str | None = None,  # noqa: A002, as subprocess.run
        check: bool = True,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> "subprocess.CompletedProcess[str]":
        """Run `argv` on `host` to its end; HostError with what it wrote if it fails.

        Other options are those of `popen`. After `timeout_s` it is killed: HostError.
        """
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = " ".join(map(str, argv))
        with self.popen(host, argv, **(pipes | options)) as process:
            try:
                stdout, stderr = process.communicate(input, timeout_s)
            except subprocess.TimeoutExpired as error:
                os.killpg(process.pid, signal.SIGKILL)  # its children have the pipes too
                stdout, stderr = process.communicate()
                raise HostError(
                    f"{host}: {command}\nstill ran after {timeout_s:g} s\n{stdout}{stderr}"
                ) from error
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            finally:
                self._processes.remove(process)
        if check and process.returncode:
            raise HostError(f"{host}: {command}\nended with {process.returncode}\n{stdout}{stderr}")
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def pids(self, host: str, words: str = "") -> dict[int, str]:
        """Process id on `host` and command line of all (with `words` in it), but process 1."""
        lines = {}
        for folder in self.path(host, "/proc").iterdir():
            if folder.name.isdecimal() and folder.name != "1":
                with contextlib.suppress(OSError):  # it ended meanwhile
                    line = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
                    lines[int(folder.name)] = line.strip()
        return {pid: line for pid, line in lines.items() if line and words in line}

    def kill(self, host: str, pid: int, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the process that `host` knows as `pid`."""
        self.run(host, ["kill", f"-{int(signal_number)}", str(pid)])

    def listeners(self, host: str) -> list[str]:
        """Address and port of every TCP socket that listens on `host`, as "10.79.0.2:22"."""
        lines = self.run(host, ["ss", "-ltnH"]).stdout.splitlines()
        return [line.split()[3] for line in lines]

    # --- faults

    def cut(self, host: str) -> None:
        """Take the cable of `host` out: nobody on either side is told."""
        self._ip_on_switch("link", "set", f"p-{host}", "down")

    def heal(self, host: str) -> None:
        """Put the cable of `host` back."""
        self._ip_on_switch("link", "set", f"p-{host}", "up")

    def firewall_drop(self, host: str, ports: str = "1024-65535") -> None:
        """Drop, without an answer, what comes to these TCP ports of `host` from other hosts.

        Replies to what the host itself has begun come through, as with every firewall.
        """
        rules = (
            "add table inet wall; "
            "add chain inet wall input { type filter hook input priority 0; }; "
            "add rule inet wall input iif lo accept; "
            "add rule inet wall input ct state established,related accept; "
            f"add rule inet wall input tcp dport {{ {ports} }} drop"
        )
        self.firewall_off(host)
        self.run(host, ["nft", rules])

    def firewall_off(self, host: str) -> None:
        """Let everything in again."""
        self.run(host, ["nft", "flush", "ruleset"])

    def fill_disk(self, host: str, folder: str | Path) -> None:
        """Make `folder` of `host` an own file system without a byte left (ENOSPC)."""
        self._hosts[host].do(_mount, "tmpfs", folder, "tmpfs", options="size=4k,mode=1777")
        self.path(host, folder).joinpath("full").write_bytes(b"\0" * 4096)

    def empty_disk(self, host: str, folder: str | Path) -> None:
        """Undo `fill_disk`."""
        self.run(host, ["umount", "--lazy", folder])

    # --- services

    def start_sshd(self, hosts: Sequence[str] | None = None) -> None:
        """Start sshd on `hosts` (all nodes); from the head `ssh NAME` needs no password."""
        hosts = self.nodes if hosts is None else list(hosts)
        private, public = self._ssh_key(self.head, "/root/.ssh/id_ed25519")
        host_private, host_public = self._ssh_key(self.head, "/etc/ssh/ssh_host_ed25519_key")
        names = ",".join([*self.names, *map(self.address, self.names)])
        known_hosts = f"{names} {host_public}"
        for user, home in _HOMES.items():
            self._write(self.head, home / ".ssh/id_ed25519", private, user, 0o600)
            self._write(self.head, home / ".ssh/known_hosts", known_hosts, user)
        for host in hosts:
            for user, home in _HOMES.items():
                self._write(host, home / ".ssh/authorized_keys", public, user, 0o600)
            self._write(host, "/etc/ssh/ssh_host_ed25519_key", host_private, mode=0o600)
            variables = self._clock_variables(host)
            extra = "SetEnv " + " ".join(f"{k}={v}" for k, v in variables.items())
            config = SSHD_CONFIG + (extra + "\n" if variables else "")
            self._write(host, "/etc/ssh/sshd_config", config)
            self._service(host, ["/usr/sbin/sshd", "-D", "-e"])
        for host in hosts:
            wait_for(f"sshd on {host}", lambda host=host: "0.0.0.0:22" in self.listeners(host))

    def start_slurm(
        self,
        *,
        gpus: int = 2,
        cpus: int = 4,
        partitions: Sequence[str] = SLURM_PARTITIONS,
        **settings: object,
    ) -> None:
        """Start munge on all hosts, slurmctld on the head, slurmd on the nodes.

        `gpus` a node are copies of /dev/null, for which Slurm sets CUDA_VISIBLE_DEVICES;
        `partitions` and `settings` are lines of slurm.conf, as ("main Nodes=ALL",) and KillWait=2.
        """
        texts = slurm_files(len(self.nodes), gpus, cpus, partitions, settings)
        key = os.urandom(128).hex()
        for host in self.names:
            for name, text in texts.items():
                self._write(host, f"/etc/slurm/{name}", text)
            self._write(host, "/run/munge/munge.key", key, mode=0o600)
            for gpu in range(gpus):
                file = self.path(host, f"/run/slurm/gpu{gpu}")
                if not file.exists():
                    os.mknod(file, 0o666 | stat.S_IFCHR, Path("/dev/null").stat().st_rdev)
            files = [f"--{kind}-file=/run/munge/munge.{kind}" for kind in ("key", "seed")]
            self._service(host, ["munged", "-F", "--force", *files])
        for host in self.names:
            socket_path = self.path(host, "/run/munge/munge.socket.2")
            wait_for(f"munged on {host}", socket_path.exists)
        self._service(self.head, ["slurmctld", "-D", "-i"])
        for node in self.nodes:
            self._service(node, ["slurmd", "-D"])
        wait_for("Slurm's nodes to be idle", lambda: set(self.slurm_states().values()) == {"idle"})

    def slurm_states(self) -> dict[str, str]:
        """What Slurm says of each node: idle, mixed, allocated, down, ...; {} without Slurm."""
        answer = self.run(self.head, ["sinfo", "-h", "-N", "-o", "%N %T"], check=False)
        return dict(line.split() for line in answer.stdout.splitlines())

    def _service(self, host: str, argv: list[str]) -> None:
        log = self.path(host, f"/var/log/{Path(argv[0]).name}.log")
        with log.open("w") as output:
            self.popen(host, argv, stdout=output, stderr=subprocess.STDOUT)

    def log(self, host: str, service: str) -> str:
        """What `service` (sshd, munged, slurmctld, slurmd) has said on `host`."""
        return self.path(host, f"/var/log/{service}.log").read_text()

    # --- how a host is made

    def _first(self, host: str) -> "subprocess.Popen[str]":
        first = self._hosts[host].first
        if first is None:
            raise HostError(f"{host} is not up; use `with Hosts() as hosts`")
        return first

    def _make_switch(self) -> None:
        _separate(_NEW_NET | _NEW_MOUNTS)
        _mount("tmpfs", SHARED, "tmpfs", options="mode=1777")
        if self._shares_homes:
            for home in ("/home", "/root"):
                _cover(home, "755")
            _make_homes()
        _ip("link", "add", "br0", "type", "bridge")
        _ip("link", "set", "br0", "up")

    def _make_host(self, host: _Host) -> None:
        _separate(_NEW_NET | _NEW_MOUNTS | _NEW_NAME | _NEW_IPC | _NEW_PIDS)
        socket.sethostname(host.name)
        for folder, mode in _PRIVATE.items():
            if not (self._shares_homes and folder in {"/home", "/root"}):
                _cover(folder, mode)
        if not self._shares_homes:
            _make_homes()
        _mount("sysfs", "/sys", "sysfs")  # with this network's interfaces
        for folder in ("etc", "work", "sshd", "munge", "slurm/state", "slurm/spool"):
            Path("/run", folder).mkdir(parents=True)
        _mount(
            "overlay",
            "/etc",
            "overlay",
            options="lowerdir=/etc,upperdir=/run/etc,workdir=/run/work",
        )
        self._write_etc(host)
        host.first = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "sh", "-c", _FIRST_PROCESS],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", env={"PATH": _PATH},
        )  # fmt: skip
        assert host.first.stdout is not None
        if host.first.stdout.readline() != "up\n":
            raise HostError(f"process 1 of {host.name} ended at its start")

    def _write_etc(self, host: _Host) -> None:
        loopback = [f"127.0.1.1 {host.name}"] if host.name in self._named_loopback else []
        lines = [f"{other.address} {other.name}" for other in self._hosts.values()]
        names = ["127.0.0.1 localhost", "::1 localhost", *loopback, *lines]
        passwd = Path("/etc/passwd").read_text()
        passwd += f"{USER}:x:{_USER_ID}:{_USER_ID}::{_HOMES[USER]}:/bin/bash\n"
        users = [line.split(":")[0] for line in passwd.splitlines()]
        texts = {
            "hosts": "\n".join(names) + "\n",
            "resolv.conf": "",
            "passwd": passwd,
            "group": Path("/etc/group").read_text() + f"{USER}:x:{_USER_ID}:\n",
            # sshd takes an account with "!" for locked; no password fits "*".
            "shadow": "".join(f"{user}:*:19000:0:99999:7:::\n" for user in users),
        }
        for name, text in texts.items():
            file = Path("/etc", name)
            file.unlink(missing_ok=True)  # it may be a link to elsewhere
            file.write_text(text)
        Path("/etc/shadow").chmod(0o600)

    def _plug_in(self, host: _Host) -> None:
        """On the switch: a cable for the host, with its other end there."""
        pid = str(self._first(host.name).pid)
        if host.name in self._dead_interface:
            _ip(
                "link",
                "add",
                f"d-{host.name}",
                "type",
                "veth",
                "peer",
                "name",
                "eno1",
                "netns",
                pid,
            )
            _ip("link", "set", f"d-{host.name}", "up")  # a carrier, but no way on from here
        _ip("link", "add", f"p-{host.name}", "type", "veth", "peer", "name", "eth0", "netns", pid)
        _ip("link", "set", f"p-{host.name}", "master", "br0", "up")

    def _configure_network(self, host: _Host) -> None:
        _ip("link", "set", "lo", "up")
        if host.name in self._dead_interface:
            last = int(ipaddress.ip_address(host.address)) - int(_NETWORK.network_address)
            _ip("addr", "add", f"{_DEAD_NETWORK[last]}/24", "dev", "eno1")
            _ip("link", "set", "eno1", "up")
        _ip("addr", "add", f"{host.address}/24", "dev", "eth0")
        _ip("link", "set", "eth0", "up")

    def _ip_on_switch(self, *words: str) -> None:
        self._switch.submit(_ip, *words).result()

    def _clock_variables(self, host: str) -> dict[str, str]:
        if host not in self._clocks:
            return {}
        library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
        if library is None:
            raise HostError("a clock that is off needs libfaketime (Debian: faketime)")
        return {
            "LD_PRELOAD": str(library), "FAKETIME": self._clocks[host],
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }  # fmt: skip

    def _write(
        self, host: str, path: str | Path, text: str, user: str = "root", mode: int = 0o644
    ) -> None:
        file = self.path(host, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
        if user == USER:
            os.chown(file.parent, _USER_ID, _USER_ID)
            os.chown(file, _USER_ID, _USER_ID)

    def _ssh_key(self, host: str, path: str) -> tuple[str, str]:
        """The private and the public half of a new key of `host`, or of the one it has."""
        file = self.path(host, path)
        if path.startswith("/etc"):
            file.unlink(missing_ok=True)  # the machine's own
        if not file.exists():
            self.path(host, Path(path).parent).mkdir(exist_ok=True)
            self.run(host, ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host, "-f", path])
        return file.read_text(), file.with_name(f"{file.name}.pub").read_text()


def _separate(namespaces: int) -> None:
    """Give this thread, and what it starts, namespaces of its own."""
    if _LIBC.unshare(namespaces):
        raise _os_error("unshare")
    _mount("none", "/", None, _MS_RECURSIVE | _MS_PRIVATE)


def _mount(
    what: str, where: str | Path, kind: str | None, flags: int = 0, options: str = ""
) -> None:
    arguments = (what.encode(), os.fsencode(where), kind.encode() if kind else None)
    if _LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None):
        raise _os_error(f"mount {what} on {where}")


def _os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def _cover(folder: str, mode: str) -> None:
    """Put an empty private folder over `folder`; what Python needs below it stays."""
    below = [path for path in _NEEDED if path.is_relative_to(folder) and str(path) != folder]
    handles = [(path, os.open(path, os.O_PATH)) for path in dict.fromkeys(below)]
    _mount("tmpfs", folder, "tmpfs", options=f"mode={mode}")
    for path, handle in handles:
        if not path.exists():  # or it lies in one that is back already
            path.mkdir(parents=True)
            _mount(f"/proc/self/fd/{handle}", path, None, _MS_BIND | _MS_RECURSIVE)
        os.close(handle)


def _make_homes() -> None:
    home = _HOMES[USER]
    home.mkdir()
    os.chown(home, _USER_ID, _USER_ID)


def _ip(*words: str) -> None:
    answer = subprocess.run(
        ["ip", *words], capture_output=True, text=True, timeout=20, check=False, cwd="/",
        env={"PATH": _PATH},
    )  # fmt: skip
    if answer.returncode:
        raise HostError(f"ip {' '.join(words)}: {answer.stderr.strip()}")


def main() -> int:
    """Bring hosts up, give a shell on the head, take them down again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=3, help="how many nodes beside the head")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run on the head (bash)")
    options = parser.parse_args()
    if reason := missing("sshd", "slurmctld", "slurmd", "munged"):
        parser.exit(1, f"{reason}\n")
    with Hosts(options.n) as hosts:
        hosts.start_sshd()
        hosts.start_slurm()
        print(f"{' '.join(hosts.names)} are up, with ssh and Slurm; {SHARED} is shared.")  # noqa: T201
        shell = hosts.popen(
            hosts.head,
            options.command or ["bash", "-i"],
            env={"TERM": os.environ.get("TERM", "dumb"), "PS1": r"\u@\h:\w\$ "},
            start_new_session=False,
            stdin=None,
        )
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the shell's
        return shell.wait()


if __name__ == "__main__":
    sys.exit(main())
