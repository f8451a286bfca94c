"""Will a model fit, and how long will a step take: formulas, their sources, advice.

What is measured of a live model comes from `planner.rank` and `planner.fake`.
"""
