"""Strategies on a rank: one file for each, and what they share."""
