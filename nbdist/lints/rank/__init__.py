"""Observations of a rank for lints, one file for each observation."""
