"""Ranks on hosts that ssh reaches without a password: %dist_init --hosts n1:4,n2:4.

A copy of this folder as profile_ssh in your IPython folder is used instead of it.
"""

c = get_config()  # noqa: F821

# One ssh connection per host, all at once. An agent at its other end starts the host's ranks.
c.Cluster.engine_launcher_class = "nbdist.cluster.kernel.launchers.ssh.SSHRankSetLauncher"

# The hosts, with the most ranks on each (None: one per GPU), where --hosts is not typed.
# c.AgentEngineSetLauncher.hosts = [("n1", 4), ("n2", 4)]

# The hosts' Python, with nbdist and torch installed; by default the path of the notebook's own.
# c.AgentEngineSetLauncher.remote_python = "/opt/venv/bin/python"

# Variables of every rank, and more options for ssh (better placed in ~/.ssh/config).
# c.AgentEngineSetLauncher.common_environment = {"NCCL_SOCKET_IFNAME": "ib0"}
# c.SSHRankSetLauncher.ssh_args = ["-p", "2222"]
