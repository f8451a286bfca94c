"""Traces asked of the ranks and kept, and Perfetto's page served from this machine."""
