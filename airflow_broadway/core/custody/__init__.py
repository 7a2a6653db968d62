"""Custody of messages between receipt and settlement, and the account of their outcomes."""
