"""Models that are prepared: what was built, who has what, where it stays the same object."""
