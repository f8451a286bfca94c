"""Basics that every package uses: ranks, topology, units, failures, findings, views.

Nothing here knows a feature. Only `rank.py`, a rank's own record, may need torch.
"""
