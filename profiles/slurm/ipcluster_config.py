"""Ranks on the hosts of a Slurm job: %dist_init --profile slurm -n 16 --gpus-per-node 8.

A copy of this folder as profile_slurm in your IPython folder is used instead of it.
"""

c = get_config()  # noqa: F821

# The job is submitted by sbatch, or is the one that the notebook runs in; one srun per host then
# starts an agent there, and the agent the host's ranks.
c.Cluster.engine_launcher_class = "nbdist.cluster.kernel.launchers.slurm.SlurmRankSetLauncher"

# What counts where the options of the same names are not typed.
# c.SlurmRankSetLauncher.gpus_per_node = 8
# c.SlurmRankSetLauncher.partition = "gpu"
# c.SlurmRankSetLauncher.account = "physics"
# c.SlurmRankSetLauncher.time = "2:00:00"
# c.SlurmRankSetLauncher.sbatch = "--constraint=h100 --cpus-per-task=8 --mem=0"

# The hosts' Python, with nbdist and torch installed; by default the path of the notebook's own.
# c.AgentEngineSetLauncher.remote_python = "/opt/venv/bin/python"

# Variables of every rank.
# c.AgentEngineSetLauncher.common_environment = {"NCCL_SOCKET_IFNAME": "ib0"}
