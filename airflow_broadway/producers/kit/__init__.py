"""Shared parts of producers; ``docs/producers.md`` lists them."""
