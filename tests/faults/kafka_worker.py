"""A process that drains a Kafka topic run by run, and may be killed at any instant.

``python -m tests.faults.kafka_worker FOLDER BOOTSTRAP TOPIC ORDER MAX_MESSAGES``: what
``rabbitmq_worker`` does, at another broker.  It ends with 0 once the group has finished the topic.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from airflow_broadway.core.custody.verdicts import Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.kafka import KafkaProducer
from tests.faults.rabbitmq_worker import AGAIN, Worker, verdict_on

__all__ = [
    "FAILS_EACH",
    "GROUP",
    "PAUSED",
    "PAUSE_AT",
    "KafkaWorker",
    "verdict_in_order",
    "verdict_on",
]

GROUP = "faults"
#: Where order counts, one message in so many fails at first: it holds up all behind it.
FAILS_EACH = 600
#: A file in the worker's folder: the number of the receive at which it waits to be killed.
PAUSE_AT = "pause-at"
#: A file in an execution's folder: the worker waits there.
PAUSED = "paused"


def verdict_in_order(number: int, attempt: int) -> Verdict:
    """What becomes of a message whose failure holds up others."""
    if number % FAILS_EACH == 0 and attempt == 1:
        return AGAIN
    return verdict_on(number, 2)


class KafkaWorker(Worker):
    """The runs of one group.

    :param order: The producer's option.
    """

    portion = 20
    _receives = 0

    def __init__(self, folder: Path, bootstrap: str, topic: str, order: str, most: int) -> None:
        self.folder = folder
        self.most = most
        if order != "none":
            self.verdict_on = verdict_in_order
        self.producer = KafkaProducer(  # type: ignore[assignment]
            hosts=bootstrap,
            conn_id=None,
            group_id=GROUP,
            topics=[topic],
            order=order,
            offset_reset_policy="earliest",
            # What a killed process held comes back by the next one's word, never by time alone.
            lease=3600.0,
            settings={"fetch.wait.max.ms": 50},
            on_failure="retry",
        )

    def take(self, place: Path, messages: Sequence[Message]) -> None:
        """Note what was handled: whoever gets it again is to know."""
        lines = [f"{int(m.data)} {m.attempt} {int(m.redelivered)}\n" for m in messages]
        with (place / "taken").open("a") as file:
            file.write("".join(lines))
        time.sleep(0.02)  # long enough to be killed at it
        self._pause_where_wanted(place)

    def _pause_where_wanted(self, place: Path) -> None:
        """Wait to be killed, if the test wants that at this receive."""
        self._receives += 1
        try:
            pause_at = int((self.folder / PAUSE_AT).read_text())
        except FileNotFoundError:
            return
        if self._receives == pause_at:
            (place / PAUSED).touch()
            time.sleep(3600)


def main() -> int:
    folder, bootstrap, topic, order, most = sys.argv[1:]
    return KafkaWorker(Path(folder), bootstrap, topic, order, int(most)).drain()


if __name__ == "__main__":
    sys.exit(main())
