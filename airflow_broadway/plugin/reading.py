"""Reads staging for a page, in separate threads and with a timeout.

A staging root may be a remote bucket or a disk that hangs.  Pages therefore read in separate
threads, so that neither the event loop nor Airflow's thread pool blocks.  The number of concurrent
reads is limited, and a read fails after a timeout::

    overview = await READING(overview_of, run)
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

#: Seconds before a read times out.
SECONDS: Final = 30.0
#: Concurrent reads per API server process, and per user.
MOST: Final = 8
MOST_OF_USER: Final = 4


class Reading:
    """Runs functions that read staging, with limited concurrency; used from one event loop."""

    def __init__(
        self, *, seconds: float = SECONDS, most: int = MOST, most_of_user: int = MOST_OF_USER
    ) -> None:
        self._seconds = seconds
        self._slots = FairSemaphore(most, most_of_user)

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the result of the function.

        :raises StagingError: If a file was deleted, or on a timeout.  The function cannot be
            interrupted, and keeps its slot until it has ended.
        """
        context = contextvars.copy_context()
        try:
            async with asyncio.timeout(self._seconds) as bound:
                user = await self._slots.acquire()
                work = partial(context.run, function, *args, **kwargs)
                result: T = await self._start(work, user)
                return result
        except FileNotFoundError as error:
            raise StagingError(
                f"the file {error.filename or error} of a run was deleted from the staging folder"
            ) from None
        except TimeoutError:
            if not bound.expired():
                raise
            raise StagingError(
                f"the staging folder did not answer within {self._seconds:g} s"
            ) from None

    def _start(self, work: Callable[[], Any], user: str) -> asyncio.Future[Any]:
        """Starts the function in a daemon thread."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Any] = loop.create_future()

        def finish(value: Any, error: BaseException | None) -> None:
            self._slots.release(user)
            if ended.done():
                return  # timed out or cancelled
            if error is None:
                ended.set_result(value)
            else:
                ended.set_exception(error)

        def run() -> None:
            value, error = None, None
            try:
                value = work()
            except BaseException as caught:  # shown on the page
                error = caught
            with suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(finish, value, error)

        try:
            threading.Thread(target=run, name="broadway-reading", daemon=True).start()
        except BaseException:  # the thread could not be started
            self._slots.release(user)
            raise
        return ended


#: The reader of this API server process.
READING: Final = Reading()
