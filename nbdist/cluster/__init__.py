"""The processes under the ranks, on one host or several: runs, agents, Slurm's jobs, the table.

What ranks are asked to do stands in the packages above.
"""
