"""Reading staging for a page: beside the API server's own work, and not for ever.

A staging root may be a bucket far away, or a disk that hangs.  So pages read in threads of their
own: neither the event loop nor the threads that Airflow's other routes need wait for it.  Only some
read at once, and whoever waits is told so in time::

    found = await READING(overview_of, run)
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from airflow_broadway.core.errors import StagingError
from airflow_broadway.plugin.fair_semaphore import FairSemaphore

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds for which a page waits.
SECONDS: Final = 30.0
#: Pages that read at once in each process of the API server, and those of one user.
MOST: Final = 8
MOST_OF_USER: Final = 4


class Reading:
    """Runs functions that read staging, so many at once; used from one event loop."""

    def __init__(
        self, *, seconds: float = SECONDS, most: int = MOST, most_of_user: int = MOST_OF_USER
    ) -> None:
        self._seconds = seconds
        self._slots = FairSemaphore(most, most_of_user)

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns.

        :raises StagingError: If a file is gone; or if it does not in time.  It cannot be stopped,
            and keeps its place until it has ended.
        """
        context = contextvars.copy_context()
        try:
            async with asyncio.timeout(self._seconds) as bound:
                user = await self._slots.acquire()
                work = partial(context.run, function, *args, **kwargs)
                found: T = await self._started(work, user)
                return found
        except FileNotFoundError as error:
            raise StagingError(
                f"the file {error.filename or error} of a run is gone from the staging folder"
            ) from None
        except TimeoutError:
            if not bound.expired():
                raise
            raise StagingError(
                f"the staging folder did not answer within {self._seconds:g} s"
            ) from None

    def _started(self, work: Callable[[], Any], user: str) -> asyncio.Future[Any]:
        """Begin it in a thread that the end of the process does not wait for."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Any] = loop.create_future()

        def tell(value: Any, error: BaseException | None) -> None:
            self._slots.release(user)
            if ended.done():
                return  # nobody waits any more
            if error is None:
                ended.set_result(value)
            else:
                ended.set_exception(error)

        def run() -> None:
            value, error = None, None
            try:
                value = work()
            except BaseException as caught:  # the page says it
                error = caught
            with suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(tell, value, error)

        try:
            threading.Thread(target=run, name="broadway-reading", daemon=True).start()
        except BaseException:  # no room for one more: its place is another's
            self._slots.release(user)
            raise
        return ended


#: That of this process of the API server.
READING: Final = Reading()
