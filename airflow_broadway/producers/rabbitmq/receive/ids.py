"""The ids of one generation's messages: no two of them share one.

An id is made at a message's first receipt.  When the message is published again, its mark keeps the
id.  Programs that copy messages copy marks too: so an id that comes twice names two messages, and
the second is given another id.  There is one exception: what two turns of one settlement published,
as the journal shows, is the same message once more.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable

#: Bytes of an id that are kept when it is given an addition; with it, a mark still takes it.
_MAX_BASE_BYTES = 160
#: Ids that are remembered, at 130 bytes each, or 280 with a mark.  Those that come later are given
#: an addition, which nobody has to remember.
_MAX_REMEMBERED = 1_000_000

#: Of a message with a mark: a hash of all of it, and the turns that published it.
_Origin = tuple[int, tuple[str, ...]]


class Ids:
    """Gives out ids; for the connection's thread.

    :param prefix: Of the ids that are made here; unique.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._number = 0
        # By its hash, every id that was not made here, and the mark that it came by.
        self._taken: dict[int, _Origin] = {}
        self._unsecured: set[int] = set()

    def fresh(self) -> str:
        """An id of its own."""
        self._number += 1
        return f"{self.prefix}-{self._number:x}"

    def marked(
        self, message_id: str, content: int, turn: str, turns: Collection[str]
    ) -> str | None:
        """The id of a message with a mark; ``None`` if another turn's copy of it is here already.

        :param content: A hash of all that its repetition has in common with it.
        :param turn: The turn of settling that published it.
        :param turns: Those that the journal of who released it names.
        """
        key = hash(message_id)
        before = self._taken.get(key)
        if before is not None:
            same, given = before
            if same == content and turn in turns and turn not in given and {*given} <= {*turns}:
                self._taken[key] = (same, (*given, turn))
                return None
        known = self.prefix in message_id or before is not None
        if known or len(self._taken) >= _MAX_REMEMBERED:
            base = message_id.partition("~")[0].encode()[:_MAX_BASE_BYTES].decode("utf-8", "ignore")
            return f"{base}~{self.fresh()}"
        self._taken[key] = (content, (sys.intern(turn),))
        self._unsecured.add(key)
        return message_id

    def secured(self, loads: Iterable[object]) -> None:
        """Messages are secured: the next connection knows their ids too."""
        if self._unsecured:
            for load in loads:
                for held in load if isinstance(load, list) else ():
                    self._unsecured.discard(hash(held.message_id))

    def reconnect(self) -> None:
        """What was not secured comes again."""
        for key in self._unsecured:
            del self._taken[key]
        self._unsecured.clear()
