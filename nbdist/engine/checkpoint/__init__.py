"""Sharded checkpoints: every rank writes and reads its own parts, in torch's DCP format."""
