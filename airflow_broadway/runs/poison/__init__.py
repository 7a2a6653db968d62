"""Batches that processes die of: what the next process handles, and a process that may die."""
