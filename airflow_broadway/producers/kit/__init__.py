"""What two brokers or more need; ``docs/producers.md`` lists it."""
