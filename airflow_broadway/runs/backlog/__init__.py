"""Watches the depth of queues without receiving: reports and threshold events."""
