"""What the data of a batcher looks like, and its strict conversion."""
