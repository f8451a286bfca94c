"""The launcher by its former name, as profiles that were copied have it."""

from nbdist.cluster.kernel.launcher import RankEngineSetLauncher

__all__ = ["RankEngineSetLauncher"]
