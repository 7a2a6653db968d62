"""The files of a run: their layout, content, and how they are written."""
