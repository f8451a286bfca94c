"""Splits along the sequence, and values that are equal on ranks which share a batch."""
