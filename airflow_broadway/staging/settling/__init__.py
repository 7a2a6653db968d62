"""Settles a generation: messages with verdicts, the settlement, and its journal."""
