"""What runs in the notebook kernel: the cluster, its ranks and the cells sent to them."""
