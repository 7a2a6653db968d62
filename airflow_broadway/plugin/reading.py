"""Reads staging for a page, in separate threads and with a timeout.

A staging root may be a remote bucket or a disk that hangs.  Pages therefore read in separate
threads, so that neither the event loop nor Airflow's thread pool blocks.  The number of concurrent
reads is limited, and a read fails after a timeout::

    overview = await READING(overview_of, run)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, ParamSpec, TypeVar

from airflow_broadway.adapters.backlog import run_in_thread
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
        work = partial(function, *args, **kwargs)
        try:
            async with asyncio.timeout(self._seconds) as bound:
                release = await self._slots.acquire()
                thread = asyncio.ensure_future(run_in_thread(work, name="broadway-reading"))
                thread.add_done_callback(lambda _: release())
                return await asyncio.shield(thread)
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


#: The reader of this API server process.
READING: Final = Reading()
