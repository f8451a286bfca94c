"""A notebook's distributed cells as one script that runs without nbdist."""
