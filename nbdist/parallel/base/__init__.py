"""Foundations of every axis: the mesh, steps of a transform, votes, precision, recomputation."""
