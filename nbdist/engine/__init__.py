"""A rank's process, on top of all that runs on a rank: it joins, gets its names, answers.

No feature stands here: those have a `rank` of their own.
"""
