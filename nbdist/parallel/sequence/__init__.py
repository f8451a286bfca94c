"""What splits along the sequence, and what is alike on the ranks that share a batch."""
