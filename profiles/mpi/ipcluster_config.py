"""Ranks by Open MPI's mpiexec, on this machine or on hosts: %dist_init --hosts n1:4,n2:4.

A copy of this folder as profile_mpi in your IPython folder is used instead of it.
"""

c = get_config()  # noqa: F821

c.Cluster.engine_launcher_class = "mpi"

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

# The engines' Python where it has another path on the hosts:
# c.MPIEngineSetLauncher.engine_cmd = ["/opt/venv/bin/python", "-m", "ipyparallel.engine"]

# So that mpi4py need not be installed; a cell that imports it uses MPI as ever.
c.MPIEngineSetLauncher.engine_args = ["--IPEngine.use_mpi=False"]
