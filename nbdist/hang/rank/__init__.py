"""The call log of a rank, aborting its collectives, and its groups made anew."""
