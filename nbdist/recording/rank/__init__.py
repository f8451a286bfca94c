"""Starts and stops recordings with a cell, and counts its training steps."""
