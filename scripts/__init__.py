"""What the Makefile's targets run; not part of the installed package."""
