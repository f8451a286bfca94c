"""Two hosts in name only, on this machine: to learn what more than one host is like.

A copy of this folder as profile_pretended in your IPython folder is used instead of it.
"""

c = get_config()  # noqa: F821

# Each pretended host has an agent, a name and a folder of its own. Nothing needs root or a network.
c.Cluster.engine_launcher_class = (
    "nbdist.cluster.kernel.launchers.pretended.PretendedHostSetLauncher"
)
c.AgentEngineSetLauncher.hosts = [("host-a", 1), ("host-b", 1)]
