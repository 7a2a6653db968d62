"""Settles a generation: its messages with their verdicts, the journal, the settlement itself."""
