"""The panel of a notebook: its state, when its jobs run, and what its buttons do."""
