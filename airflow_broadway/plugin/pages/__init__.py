"""The pages: one module each, whose ``router`` has its routes."""
