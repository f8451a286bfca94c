"""A cell on many ranks: its outputs as one, equal lines once, long ones cut, names completed.

Pure: sending a cell stands in `cells.kernel`, drawing it in `cells.view`.
"""
