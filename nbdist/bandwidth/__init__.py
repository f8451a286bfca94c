"""How fast collectives are between the ranks: sizes, results, the model of a message."""
