"""Watching cells from the kernel, and bringing groups and ended ranks back."""
