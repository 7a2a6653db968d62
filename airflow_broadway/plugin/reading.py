"""Reads staging for a page, in separate threads and with a timeout; opens roots and runs.

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
from airflow_broadway.adapters.staging import open_existing_store
from airflow_broadway.core.errors import RequestRefused, StagingError
from airflow_broadway.plugin.declared import RunTasks
from airflow_broadway.plugin.fair_semaphore import FairSemaphore
from airflow_broadway.runs.reading.runs import iter_runs
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store

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


# -- roots and runs --------------------------------------------------------------------------------

#: The way out for a missing folder.
_ADVICE: Final = (
    " on the API server: either no run has begun yet, which makes it, or the workers have it"
    " elsewhere; then set `[broadway] staging`, here and there, to a place that all of them see"
)


def seen_root(root: str | None) -> Store:
    """Opens a staging root for reading; ``None``: that of Airflow's configuration.

    :raises StagingError: If it cannot be opened, or the folder does not exist.
    """
    return open_existing_store(root, advice=_ADVICE)


def staged_runs(dag_id: str, run_id: str, known: RunTasks) -> list[StagedRun]:
    """Returns the staged runs of a Dag run: at most one for each pipeline.

    :param known: The run in Airflow; a pipeline's tasks may have their own staging root.
    :raises RequestRefused: If neither Airflow nor staging has the run.
    :raises StagingError: If a root does not exist or cannot be read.
    """
    roots = {pipeline.staging for pipeline in known.pipelines} or {None}
    runs: dict[str, StagedRun] = {}
    for root in sorted(roots, key=str):
        try:
            store = seen_root(root)
        except StagingError:
            if known.pipelines or known.state is None:
                raise
            continue  # a Dag without pipelines needs no staging root
        for run in iter_runs(store, dag_id=dag_id, run_id=run_id):
            runs.setdefault(run.pipeline, run)
    if not runs and known.state is None:
        raise RequestRefused(
            f"Neither Airflow nor the staging folder has a run {run_id} of the Dag {dag_id}."
        )
    return list(runs.values())
