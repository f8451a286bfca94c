"""The panel: its state, its queue of jobs, the form of strategies. A button runs a verb's line."""
