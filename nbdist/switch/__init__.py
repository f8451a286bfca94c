"""Another strategy for living models: the report of what was changed, and its view.

How a strategy is applied to a model stands in `parallel`.
"""
