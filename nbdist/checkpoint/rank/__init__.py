"""Saving and loading on a rank through torch's distributed checkpoints."""
