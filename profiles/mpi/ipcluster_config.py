"""Ranks by Open MPI's mpiexec, on this machine or on hosts: %dist_init --hosts n1:4,n2:4.

A copy of this folder as profile_mpi in your IPython folder is used instead of it.
"""

from ipyparallel.cluster.launcher import MPIEngineSetLauncher


class EngineSetByMpiexec(MPIEngineSetLauncher):
    """Leaves `--mpi` out: mpi4py need not be installed. A cell that imports it uses MPI as ever."""

    program = property(lambda self: self.engine_cmd)


c = get_config()  # noqa: F821

c.Cluster.engine_launcher_class = EngineSetByMpiexec
c.Cluster.delay = 0  # the controller's connection file is waited for

c.MPIEngineSetLauncher.mpi_args = [
    # Open MPI hands on no variables but these. The first has the controller's address and key.
    "-x",
    "IPP_CONNECTION_INFO",
    "-x",
    "IPP_CLUSTER_ID",
    "-x",
    "NBDIST_RUN",
    # Otherwise each rank may use one core alone.
    "--bind-to",
    "none",
    # More ranks than cores: "--oversubscribe".
    # Hosts with several networks, the one to use: "--mca", "oob_tcp_if_include", "eth0",
    # and for MPI calls of your own "--mca", "btl_tcp_if_include", "eth0".
]

# The ranks' Python where it has another path on the hosts:
# c.MPIEngineSetLauncher.engine_cmd = ["/opt/venv/bin/python", "-m", "ipyparallel.engine"]
