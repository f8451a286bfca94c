"""Pure functions and frozen records: no torch, no Jupyter, no sockets."""
