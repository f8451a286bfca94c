"""Parts that traces and memory snapshots share: options, the recording of a cell, pages.

What is recorded, and what it means, stands in `trace` and `memory`.
"""
