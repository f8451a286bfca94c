"""Tensor parallelism of a live model. Which layers are split is planned in `strategy`."""
