"""Pipeline parallelism: stages, what travels between them, the loss as one autograd node."""
