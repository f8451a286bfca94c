"""A notebook's distributed cells as one script, with nbdist where Accelerate is not enough."""
