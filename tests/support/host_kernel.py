"""A notebook's kernel on one of the hosts of tests.support.hosts, driven from outside of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient

from tests.support.hosts import SHARED, Hosts
from tests.support.kernel import Kernel

_END_TIMEOUT_S = 15.0


class HostKernel(Kernel):
    """As `Kernel`, on a host: it sees the host's files, network and processes alone."""

    def __init__(self, hosts: Hosts, host: str, env: Mapping[str, str]) -> None:
        super().__init__(cwd=SHARED, env=env)
        self._env = dict(env)  # nothing of this machine's
        manager: Any = _HostManager(hosts, host)
        self._manager = manager


class _HostManager:
    """What `Kernel` asks of jupyter_client's manager, over sockets in a folder that hosts share."""

    def __init__(self, hosts: Hosts, host: str) -> None:
        self._hosts = hosts
        self._host = host
        self._place = SHARED / f"kernel-{uuid.uuid4().hex[:8]}"
        self._connection: dict[str, Any] = {
            "transport": "ipc", "key": uuid.uuid4().hex, "signature_scheme": "hmac-sha256",
            **{f"{name}_port": number for number, name in enumerate(
                ("shell", "iopub", "stdin", "control", "hb"), 1
            )},
        }  # fmt: skip
        self.process: subprocess.Popen[str] | None = None

    @property
    def provisioner(self) -> "_HostManager":
        return self

    @property
    def has_kernel(self) -> bool:
        return self.process is not None

    @property
    def pid(self) -> int:
        """As this machine knows it."""
        assert self.process is not None
        return self.process.pid

    def start_kernel(
        self, *, cwd: str, env: dict[str, str], extra_arguments: list[str], **pipes: Any
    ) -> None:
        folder = self._hosts.path(self._host, self._place)
        folder.mkdir()
        written = self._connection | {"ip": str(self._place / "s")}
        (folder / "connection.json").write_text(json.dumps(written))
        file = self._place / "connection.json"
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", file, *extra_arguments]
        self.process = self._hosts.popen(self._host, command, cwd=cwd, env=env, **pipes)

    def blocking_client(self) -> BlockingKernelClient:
        client = BlockingKernelClient()
        ip = self._hosts.path(self._host, self._place / "s")
        client.load_connection_info(self._connection | {"ip": str(ip)})
        return client

    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def interrupt_kernel(self) -> None:
        os.killpg(self.pid, signal.SIGINT)

    def shutdown_kernel(self, *, now: bool) -> None:
        assert self.process is not None
        if not now:
            client = self.blocking_client()
            client.start_channels(stdin=False, hb=False)
            client.shutdown()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_TIMEOUT_S)
            client.stop_channels()
        if self.is_alive():
            os.killpg(self.pid, signal.SIGKILL)
            self.process.wait(_END_TIMEOUT_S)

    def cleanup_resources(self) -> None:
        """Nothing to do: the folder goes with the hosts."""
