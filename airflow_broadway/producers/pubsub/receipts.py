"""Where the ack ids of a subscription are, and what is known of its messages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from airflow_broadway.producers.kit.failures import Failures
from airflow_broadway.producers.kit.receipts.receipts import ReceiptsFolder
from airflow_broadway.producers.kit.state_files import MemoryFiles
from airflow_broadway.producers.pubsub.client import place_of
from airflow_broadway.producers.pubsub.limits import KEPT_DAYS

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.pubsub.options import PubSubOptions

__all__ = ["receipts_folder"]

#: Without a staging folder: Pub/Sub counts no failures, so this process does.
_memory: dict[str, MemoryFiles] = {}


def receipts_folder(producer: PubSubOptions, env: ProducerEnv) -> ReceiptsFolder:
    """Those of the producer's subscription.

    What others note is looked for at each receive, since Pub/Sub does not tell what comes again.
    """
    place = place_of(producer)
    return ReceiptsFolder(
        producer.kind,
        env.shared,
        place,
        failures=partial(Failures, kept_days=KEPT_DAYS, look_interval=0.0),
        files=_memory.setdefault(place, MemoryFiles()) if env.shared is None else None,
    )
