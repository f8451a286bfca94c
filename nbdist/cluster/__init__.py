"""The processes under the ranks, on one host or several: runs, agents, Slurm's jobs, the table.

Requests to ranks are defined in the packages above.
"""
