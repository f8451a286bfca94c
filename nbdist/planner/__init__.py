"""Will a model fit, and how long will a step take: formulas, their sources, advice.

Measurements of a live model come from `planner.rank` and `planner.fake`.
"""
