"""Ranks on this machine: one engine per GPU, or as many as asked for on the CPU.

A copy of this folder as profile_local in your IPython folder is used instead of it.
"""

c = get_config()  # noqa: F821

# Gives every engine its rank, its GPU list and its threads before anything reports.
c.Cluster.engine_launcher_class = "nbdist.cluster.kernel.launcher.RankEngineSetLauncher"

# Controller and engines come up side by side; the engines wait for its connection file.
c.Cluster.send_engines_connection_env = False
c.Cluster.delay = 0
c.RankEngineSetLauncher.delay = 0

# An engine counts as registered after a heartbeat: every 3 s by default, every 0.2 s here.
# 150 misses make up for it: an engine is given up after 30 s, as with longer beats.
c.Cluster.controller_args = [
    "--HeartMonitor.period=200",
    "--HeartMonitor.max_heartmonitor_misses=150",
    # One process with threads instead of nine: less memory, faster start.
    "--IPController.use_threads=True",
    # It would keep every request, result and printed line for as long as the ranks run.
    "--IPController.db_class=NoDB",
]
