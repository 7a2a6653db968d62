"""What two brokers or more need."""
