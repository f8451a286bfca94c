"""How ranks on other hosts start: one agent per host, reached by ssh, srun or directly."""
