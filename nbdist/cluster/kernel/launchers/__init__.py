"""How a cluster's hosts are reached, one module for each kind."""
