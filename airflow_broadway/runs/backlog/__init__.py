"""Looking at a queue without taking of it: who looks, when that is told, and who serves it."""
