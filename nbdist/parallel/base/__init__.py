"""What every axis stands on: the mesh, steps of a transform, votes, precision, recomputation."""
