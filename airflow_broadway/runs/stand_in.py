"""Stand in for the ack sensor while nobody sees it: renew leases, and settle what is done.

A sensor that waits in reschedule mode is not looked at while its Dag is paused, and somebody may
have marked it.  Running tasks go on all the same, and who records an outcome may settle it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from airflow_broadway.core.custody.lease_renewer import LeaseRenewer
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.runs.ports import Ports
from airflow_broadway.runs.sources.pipelines import pipeline_of
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.run_folder import StagedRun

log = logging.getLogger(__name__)

#: Seconds of a lease where there is none to renew.
_NO_LEASE: Final = 3600.0


class StandIn:
    """Looks after published generations of a run, from :meth:`start` to :meth:`finish`.

    :param generations: Those whose batches the task runs; a run may hold others', on other queues.
    """

    def __init__(
        self,
        run: StagedRun,
        pipeline: Pipeline,
        generations: Collection[str],
        *,
        ports: Ports | None = None,
    ) -> None:
        self._watcher = RunWatcher(run, pipeline, generations=generations, ports=ports)
        records = [run.generation(each) for each in generations]
        leases = [
            run.lease(each)
            for each in records
            if each.published and pipeline_of(pipeline, each).producer.renews
        ]
        self._renewer = LeaseRenewer(
            self._watcher.renewing,
            min((lease.seconds for lease in leases), default=_NO_LEASE),
            lambda: [] if self._watcher.heartbeat.is_fresh() else leases,
            renewed=run.put_lease,
            at_once=True,
        )

    def start(self) -> None:
        """Begin to renew, wherever no sensor does."""
        self._renewer.start()

    def finish(self) -> None:
        """Stop renewing; settle whatever is done, unless a sensor is there to do it."""
        self._renewer.stop()
        try:
            if not self._watcher.heartbeat.is_fresh():
                log.info("No ack sensor has looked after this run lately: settling here.")
                self._watcher.settle(final=False)
        except (BroadwayError, OSError) as error:
            # The outcomes stand; the sensor or the next run's sweep settles by them.
            log.error("Could not settle here: %s", error)
        finally:
            self._watcher.close()
