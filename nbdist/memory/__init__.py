"""Memory snapshots: blocks, categories, peak, differences, findings; running out of memory.

What a plan predicts stands in `planner`.
"""
