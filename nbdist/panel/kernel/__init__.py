"""The panel at work: what it asks of ranks, when its jobs run, and which verb a button runs."""
