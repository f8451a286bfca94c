"""What one notebook remembers: its session, where plain cells run, what is displayed.

No verb: those stand in `commands`.
"""
