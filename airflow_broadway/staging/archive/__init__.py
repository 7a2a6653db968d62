"""The archive of a pipeline: every message that was settled, by time, as it was received."""
