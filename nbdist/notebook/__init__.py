"""State of one notebook: its session, the place of plain cells, the displays.

No verb: those stand in `commands`.
"""
