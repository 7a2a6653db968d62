"""Crash isolation: child processes for batches, and the search for the message that crashes one."""
