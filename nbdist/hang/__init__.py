"""Who waits for whom: records of collectives, the wait-for graph, the diagnosis and its words.

Pure: reading a rank stands in `hang.rank`, acting on it in `hang.kernel`.
"""
