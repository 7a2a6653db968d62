"""Where a run's messages come from: which source, and the producer that serves it."""
