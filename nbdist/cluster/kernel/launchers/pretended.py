"""Several hosts in name only, on this machine and without root: to learn, and to test notebooks."""

from __future__ import annotations

from nbdist.cluster.kernel.launchers.agent_set import AgentEngineSetLauncher, remote_command
from nbdist.core.units import make_up_host


class PretendedHostSetLauncher(AgentEngineSetLauncher):
    """Starts ranks on this machine as if on hosts: own agents, folders and names, one network."""

    is_on_this_machine = True

    def command(self, host: str) -> list[str]:
        """An agent of this machine that says it is `host`."""
        make_up_host(host)
        return ["env", f"NBDIST_HOST={host}", *remote_command(self.remote_python)]
