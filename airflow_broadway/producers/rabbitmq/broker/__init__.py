"""What stands at the broker: queues, their names, policies and checks."""
