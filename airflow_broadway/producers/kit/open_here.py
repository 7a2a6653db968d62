"""Which generations this process receives for: one that ends while it is open here did not crash.

Receiving notes it, settling asks for it, and neither imports the other.
"""

from __future__ import annotations

import weakref

__all__ = ["is_open_here", "note_closed", "note_open"]

#: Source → its generation.  A source that nobody holds any more is open no more.
_open: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()


def note_open(source: object, generation: str) -> None:
    """Note that ``source`` receives for a generation."""
    _open[source] = generation


def note_closed(source: object) -> None:
    """Note that it does so no more; nothing happens if it never did."""
    _open.pop(source, None)


def is_open_here(generation: str) -> bool:
    """Whether this process receives for the generation."""
    return generation in list(_open.values())
