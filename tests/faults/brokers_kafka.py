"""Kafka in the fault runs: a server that the task kills do not reach.

The consumer group's lag shows what is left.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.faults.broker import DeadLetter
from tests.kafka_server import nearest_kafka

_TOPIC, _GROUP, _RETRIES = "killed", "killed", "killed.retry"
_PARTITIONS = 4


class Kafka:
    """The topic ``killed``, read by the group ``killed``."""

    stable_ids = True

    def __init__(self, folder: Path) -> None:
        self.server = nearest_kafka().start(folder / "kafka")
        self.server.topic(_TOPIC, _PARTITIONS)
        self.server.topic(f"{_TOPIC}-dlt")
        self.server.topic(_RETRIES)

    def variables(self) -> Mapping[str, str]:
        return {"AIRFLOW_CONN_KILLED_KAFKA": json.dumps(self.server.connection())}

    def send(self, bodies: Sequence[bytes]) -> None:
        self.server.fill(_TOPIC, bodies)

    def waiting(self) -> int:
        """Counts the group's lag: also finished messages behind the first unfinished one."""
        return sum(self.server.lag(_GROUP, topic) for topic in (_TOPIC, _RETRIES))

    def leased(self) -> int:
        """Returns 0: an unfinished message holds back the group's offset, so it is in the lag."""
        return 0

    def dead_letters(self) -> list[DeadLetter]:
        letters = []
        for message in self.server.read(f"{_TOPIC}-dlt"):
            headers: Any = message.headers()
            attributes = {name: value.decode() for name, value in headers}
            letters.append(
                DeadLetter(
                    int(message.value() or b""),
                    int(attributes["broadway.attempt"]),
                    attributes["__connect.errors.exception.message"],
                    marked=attributes["broadway.again"] == "1",
                )
            )
        return letters

    def close(self) -> None:
        self.server.stop()
