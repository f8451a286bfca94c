"""A process without ranks that runs a step with fake tensors and counts their memory."""
