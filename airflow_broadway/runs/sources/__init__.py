"""The source of a run's messages, and the producer that serves it."""
