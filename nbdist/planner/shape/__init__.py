"""The shape of a model: its numbers, and how a config says them."""
