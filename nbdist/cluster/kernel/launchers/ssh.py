"""Ranks on hosts that ssh reaches: one connection per host, all at once."""

from __future__ import annotations

import re
import shlex
import socket
from typing import Any

from traitlets import List

from nbdist.cluster.hosts import OWN_NAMES
from nbdist.cluster.kernel.launchers.agent_set import AgentEngineSetLauncher, remote_command

# ssh's message -> the remedy. The message itself is always shown as well.
REMEDIES = (
    (r"Could not resolve hostname", "Check the name, or add the host to ~/.ssh/config"),
    (r"Connection refused", "Start sshd there, or name its port in ~/.ssh/config"),
    (r"Host key verification failed", "Connect once in a terminal (ssh {host}) and check its key"),
    (
        r"Permission denied|Too many authentication failures",
        (
            "ssh must work without a password: ssh-copy-id {host}, and ssh-add for a key with a "
            "passphrase"
        ),
    ),
    (
        r"timed out|No route to host|no answer within",
        "Check that it is up, and that no firewall drops port 22",
    ),
    (
        # ssh's own code is 255: then a login script may have said that, long ago.
        r"exit code 127|\[Errno 2\]|exit code 1\)[\s\S]*not found",
        (
            "That Python is not there. Name the hosts' own in the profile: "
            "c.AgentEngineSetLauncher.remote_python"
        ),
    ),
)


class SSHRankSetLauncher(AgentEngineSetLauncher):
    """Starts ranks on hosts by ssh; this machine, named localhost, is reached without it."""

    ssh_cmd = List(["ssh"], help="The ssh program.").tag(config=True)
    ssh_args: List[Any] = List([], help="More options for ssh.").tag(config=True)

    def command(self, host: str) -> list[str]:
        """`ssh HOST python -c ...`: never asks, and gives up after `connect_s`."""
        words = remote_command(self.remote_python)
        if host in OWN_NAMES or host == socket.gethostname():
            return words
        # The host gets neither the user's keys nor a way back into this machine.
        closed = ["-T", "-a", "-x", "-oClearAllForwardings=yes"]
        options = ["-oBatchMode=yes", f"-oConnectTimeout={max(1, int(self.connect_s))}"]
        return [*self.ssh_cmd, *closed, *options, *self.ssh_args, "--", host, shlex.join(words)]

    def explain(self, host: str, reason: str) -> str:
        """The reason with what to do."""
        for pattern, remedy in REMEDIES:
            if re.search(pattern, reason):
                return f"{reason.rstrip('.')}. {remedy.format(host=host)}"
        return reason
