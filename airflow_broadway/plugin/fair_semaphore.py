"""A semaphore that is fair across users: many requests of one user do not starve others."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final

#: The user of the request that is being served; empty outside of one.
USER: Final[ContextVar[str]] = ContextVar("USER", default="")


class FairSemaphore:
    """Limits concurrent requests, in all and per user; waiting users are served round robin.

    Use one from one event loop only.

    :param limit: Concurrent requests of all users.
    :param per_user: Concurrent requests of one user.
    """

    def __init__(self, limit: int, per_user: int) -> None:
        self._free = limit
        self._per_user = per_user
        self._active: Counter[str] = Counter()
        #: Waiting requests by user; the user to be served next comes first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Holds a slot until the context ends."""
        user = await self.acquire()
        try:
            yield
        finally:
            self.release(user)

    async def acquire(self) -> str:
        """Waits for a slot; returns the user for :meth:`release`."""
        user = USER.get()
        request: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(user, deque()).append(request)
        self._serve()
        try:
            await request
        except asyncio.CancelledError:
            if request.done() and not request.cancelled():
                self.release(user)
            raise
        return user

    def release(self, user: str) -> None:
        """Releases a slot of this user."""
        self._free += 1
        self._active[user] -= 1
        if not self._active[user]:
            del self._active[user]
        self._serve()

    def _serve(self) -> None:
        """Grants free slots to waiting users, round robin."""
        while self._serve_round():
            pass

    def _serve_round(self) -> bool:
        """Grants at most one slot to each waiting user; returns whether any was granted."""
        served = False
        for user in list(self._waiting):
            requests = self._waiting[user]
            while requests and requests[0].done():  # cancelled meanwhile
                requests.popleft()
            if not requests:
                del self._waiting[user]
            elif self._free and self._active[user] < self._per_user:
                requests.popleft().set_result(None)
                self._free -= 1
                self._active[user] += 1
                served = True
                if requests:
                    self._waiting.move_to_end(user)
                else:
                    del self._waiting[user]
        return served
