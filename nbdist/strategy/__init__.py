"""Choices for training in parallel, as records and rules without torch.

How a model is put under it stands in `parallel`; changing it in `switch`.
"""
