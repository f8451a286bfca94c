"""Lints told once in the notebook, and %dist_check asked of all ranks."""
