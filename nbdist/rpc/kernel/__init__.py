"""The kernel's end: the channel, rank functions, gathered answers, pending interrupts.

What is asked of ranks, and why, stands in the features.
"""
