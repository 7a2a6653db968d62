"""Places of work that users get in turn: the requests of one user keep no other user waiting long.

A user has some of the places at most, and the next place goes to the user who has waited longest
for a turn, however many requests of another user came before.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final

__all__ = ["USER", "Turns"]

#: The user of the request that is being served; empty outside of one.
USER: Final[ContextVar[str]] = ContextVar("USER", default="")


class Turns:
    """So many places; used from one event loop.

    :param most: Requests at work at once.
    :param each: Those of one user among them.
    """

    def __init__(self, most: int, each: int) -> None:
        self._free = most
        self._each = each
        self._at_work: Counter[str] = Counter()
        #: Who waits, by user; the user whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place, as long as this lasts."""
        user = await self.take()
        try:
            yield
        finally:
            self.give(user)

    async def take(self) -> str:
        """Wait for a place; returns the user to :meth:`give` it back for."""
        user = USER.get()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(user, deque()).append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(user)
            raise
        return user

    def give(self, user: str) -> None:
        """Give a place back."""
        self._free += 1
        self._at_work[user] -= 1
        if not self._at_work[user]:
            del self._at_work[user]
        self._serve()

    def _serve(self) -> None:
        """Give free places to those who wait, one user after the other."""
        while self._serve_each():
            pass

    def _serve_each(self) -> bool:
        """Give each user a place at most; whether any got one."""
        served = False
        for user in list(self._waiting):
            turns = self._waiting[user]
            while turns and turns[0].done():  # whoever waited has given up
                turns.popleft()
            if not turns:
                del self._waiting[user]
            elif self._free and self._at_work[user] < self._each:
                turns.popleft().set_result(None)
                self._free -= 1
                self._at_work[user] += 1
                served = True
                if turns:
                    self._waiting.move_to_end(user)
                else:
                    del self._waiting[user]
        return served
