"""A run's files: where they lie, what they hold, and how they are written."""
