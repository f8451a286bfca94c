"""Context parallelism: attention over a sequence that is split between ranks."""
