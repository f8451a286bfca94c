"""The processes under the ranks: who owns a run, host and shared memory, the table of ranks.

What ranks are asked to do stands in the packages above.
"""
