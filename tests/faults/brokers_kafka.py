"""Kafka in the fault runs: a broker of its own, which no kill of a task reaches.

What is left is told by Kafka itself: the group's offsets against the ends of the log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.faults.broker import Dead
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
        """Also what is finished behind the first that is not: Kafka keeps one number."""
        return sum(self.server.lag(_GROUP, topic) for topic in (_TOPIC, _RETRIES))

    def leased(self) -> int:
        """Always 0: a held message holds up the group's offset, so ``waiting`` counts it."""
        return 0

    def dead(self) -> list[Dead]:
        letters = []
        for message in self.server.read(f"{_TOPIC}-dlt"):
            headers: Any = message.headers()
            why = {name: value.decode() for name, value in headers}
            letters.append(
                Dead(
                    int(message.value() or b""),
                    int(why["broadway.attempt"]),
                    why["__connect.errors.exception.message"],
                    marked=why["broadway.again"] == "1",
                )
            )
        return letters

    def close(self) -> None:
        self.server.stop()
