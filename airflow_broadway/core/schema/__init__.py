"""Schemas of batchers, and strict conversion of values to them."""
