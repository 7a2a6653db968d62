"""The source ``dead_letters``: a run sends all of them back, and drains the queue behind that.

So a dead letter goes the way of any message of its queue: by its own route, in the hands of one
run at a time, on its first attempt, through the code of today.  Whoever is killed on the way leaves
each of them in the queue or among the dead letters.
"""

from __future__ import annotations

import logging
from contextlib import closing

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.model.run_source import DEAD_LETTERS
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import many

__all__ = ["send_back"]

log = logging.getLogger(__name__)


def send_back(pipeline: Pipeline, env: ProducerEnv) -> None:
    """Send all dead letters back, if they are the source of the run, before it receives.

    Of a run's producers the first does so.

    :raises BroadwayError: If the place for dead letters is not there, or cannot be reached.
    """
    if pipeline.run.source.kind != DEAD_LETTERS or env.index:
        return
    with closing(pipeline.producer.dead_letters(env)) as letters:
        moved = letters.requeue()
        place = letters.place
    log.info("Sent %s of %s back: this run drains them.", many(moved.count, "dead letter"), place)
    for key, why in moved.refused.items():
        log.error("The dead letter %s of %s stays there: %s", key, place, why)
