"""Stands in for an inactive ack sensor: renews leases and settles complete generations.

A sensor in reschedule mode is not scheduled while its Dag is paused, and its state may have been
set by hand.  Running tasks continue nevertheless, and the task that records outcomes may settle
them.
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

#: Lease duration in seconds that is assumed if there is no lease to renew.
_NO_LEASE: Final = 3600.0


class StandIn:
    """Renews the leases of published generations of a run from :meth:`start` to :meth:`finish`.

    :param generations: The generations whose batches the task runs; a run may hold others.
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
        records = [run.generation(generation) for generation in generations]
        leases = [
            run.lease(record)
            for record in records
            if record.published and pipeline_of(pipeline, record).producer.renews
        ]
        self._renewer = LeaseRenewer(
            self._watcher.renewing,
            min((lease.seconds for lease in leases), default=_NO_LEASE),
            lambda: [] if self._watcher.heartbeat.is_fresh() else leases,
            renewed=run.put_lease,
            at_once=True,
        )

    def start(self) -> None:
        """Starts to renew while there is no active sensor."""
        self._renewer.start()

    def finish(self) -> None:
        """Stops renewing; settles complete generations unless there is an active sensor."""
        self._renewer.stop()
        try:
            if not self._watcher.heartbeat.is_fresh():
                log.info("No ack sensor has looked after this run lately: settling here.")
                self._watcher.settle(final=False)
        except (BroadwayError, OSError) as error:
            # The outcomes are recorded; the sensor or the next run's sweep settles by them.
            log.error("Could not settle here: %s", error)
        finally:
            self._watcher.close()
