"""What usually goes wrong in training without an error: a file for each lint."""
