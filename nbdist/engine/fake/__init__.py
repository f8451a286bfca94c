"""A step of training without memory: fake tensors and a fake process group, counted."""
