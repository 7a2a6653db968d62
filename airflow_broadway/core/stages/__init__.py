"""The stages that handle messages within one process."""
