"""The archive of a pipeline: all settled messages by time, as received."""
