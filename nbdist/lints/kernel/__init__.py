"""Lints reported once in the notebook, and %dist_check over all ranks."""
