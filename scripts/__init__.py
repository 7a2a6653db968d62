"""Programs of the Makefile's targets; not part of the installed package."""
