"""Who holds a message between its receipt and its settlement, and what became of it."""
