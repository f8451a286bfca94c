"""Programs that watch and end ranks, one process per host or run: the standard library alone."""
