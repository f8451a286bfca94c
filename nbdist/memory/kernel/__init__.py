"""Snapshots asked of the ranks and kept, and ranks asked for what held memory when it ran out."""
