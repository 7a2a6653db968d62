"""The stages put together in one process, and a finite run of them."""
