"""The values of a pipeline: messages, batches, options and the rules of their values."""
