"""The step on a rank, under the strategy and under its reference, and what differs between them."""
