"""Samples of devices and processes: records, findings, Prometheus' names, the view."""
