"""Allocations recorded on a rank, whose they are, and what held memory when it ran out."""
