"""A semaphore that is fair across users: many requests of one user do not starve others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final
from weakref import WeakValueDictionary

#: The user of the request that is being served; empty outside of one.
USER: Final[ContextVar[str]] = ContextVar("USER", default="")


class FairSemaphore:
    """Limits concurrent requests, per user and in all.

    A request first waits for those of its user, so that no user has more than ``per_user`` requests
    among those that wait for the others, which are served in order.

    :param limit: Concurrent requests of all users.
    :param per_user: Concurrent requests of one user.
    """

    def __init__(self, limit: int, per_user: int) -> None:
        self._limit = limit
        self._per_user = per_user
        #: The semaphores in use: of a user, and of all (``None``).
        self._semaphores: WeakValueDictionary[str | None, asyncio.Semaphore] = WeakValueDictionary()

    async def acquire(self) -> Callable[[], None]:
        """Waits for a slot; returns the function that releases it."""
        own = self._semaphores.setdefault(USER.get(), asyncio.Semaphore(self._per_user))
        shared = self._semaphores.setdefault(None, asyncio.Semaphore(self._limit))
        await own.acquire()
        try:
            await shared.acquire()
        except asyncio.CancelledError:
            own.release()
            raise

        def release() -> None:
            shared.release()
            own.release()

        return release
