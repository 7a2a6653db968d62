"""Our queues at the broker: names, declarations, policies and checks."""
