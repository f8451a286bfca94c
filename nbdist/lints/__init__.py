"""Mistakes without an error: the rules, their sentences, whether replicas are equal.

Pure: what a rank observes for them stands in `lints.rank`.
"""
