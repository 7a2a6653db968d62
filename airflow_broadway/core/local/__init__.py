"""The stages combined in one process, and a finite run of them."""
