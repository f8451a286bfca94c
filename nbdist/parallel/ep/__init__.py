"""Expert parallelism: the experts of a layer lie on several ranks, and tokens travel to them."""
