"""Pub/Sub in the fault runs: a stub in the parent process, which is never killed.

Google's emulator does not report a subscription's backlog; the stub does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults.broker import DeadLetter
from tests.pubsub_server import PROJECT, StubServer


class PubSub:
    """The subscription ``killed``, whose dead letters go to the topic ``killed-dead``."""

    stable_ids = True

    def __init__(self, folder: Path) -> None:
        self.server = StubServer()
        self._topic, dead = self.server.topic("killed"), self.server.topic("killed-dead")
        self._subscription = self.server.subscription(self._topic, "killed")
        self._dead = self.server.subscription(dead, "killed-dead")

    def variables(self) -> Mapping[str, str]:
        connection = {"conn_type": "google_cloud_platform", "extra": {"project": PROJECT}}
        return {
            "AIRFLOW_CONN_KILLED_PUBSUB": json.dumps(connection),
            "PUBSUB_EMULATOR_HOST": self.server.host,
        }

    def send(self, bodies: Sequence[bytes]) -> None:
        self.server.publish(self._topic, bodies)

    def waiting(self) -> int:
        return len(self.server.attempts(self._subscription))

    def leased(self) -> int:
        """Counts outstanding messages and retries: Pub/Sub does not separate them."""
        with self.server.broker.changed:
            return len(self.server.broker.subscriptions[self._subscription].flying)

    def dead_letters(self) -> list[DeadLetter]:
        """Reads all dead letters; a repeated message id marks a duplicate."""
        letters: list[DeadLetter] = []
        seen: set[str] = set()
        for held in self.server.held(self._dead):
            attributes = held.attributes
            letters.append(
                DeadLetter(
                    int(held.data),
                    int(attributes["broadway_attempt"]),
                    attributes["broadway_reason"],
                    marked=attributes["broadway_message_id"] in seen,
                )
            )
            seen.add(attributes["broadway_message_id"])
        return letters

    def close(self) -> None:
        self.server.stop()
