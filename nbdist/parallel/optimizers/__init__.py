"""Whether an optimizer computes under a strategy what it computes in one process."""
