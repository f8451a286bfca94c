"""A model under a strategy: everything here runs on a rank and may import torch.

What may be chosen stands in `strategy`; what a user types in `commands`.
"""
