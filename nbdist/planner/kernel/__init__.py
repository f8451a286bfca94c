"""Models described by the ranks, and the process that measures fake tensors."""
