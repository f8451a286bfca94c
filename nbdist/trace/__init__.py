"""Profiler traces of all ranks: read, set to one clock, broken down, searched for findings.

What a trace has in common with a memory snapshot stands in `recording`.
"""
