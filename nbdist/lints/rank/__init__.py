"""What a rank observes for a lint, one file for each observation."""
