"""Notebooks as tests, in pytest's process: its plugin, and which rank printed something else."""
