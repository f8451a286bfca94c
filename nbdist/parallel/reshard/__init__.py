"""Tensors and optimizer states from one layout to another, and the user's names with them.

When that is done, and whether all ranks agree, stands in `switch` and `checkpoint`.
"""
