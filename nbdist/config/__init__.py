"""Configurations of Accelerate, DeepSpeed and others: read, checked, corrected, written."""
