"""Pub/Sub in the fault runs: the tests' own stub, in the process that kills, and so never killed.

Google's emulator says of no subscription how much is left in it; the stub knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults.broker import Dead
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
        known = {"conn_type": "google_cloud_platform", "extra": {"project": PROJECT}}
        return {
            "AIRFLOW_CONN_KILLED_PUBSUB": json.dumps(known),
            "PUBSUB_EMULATOR_HOST": self.server.host,
        }

    def send(self, bodies: Sequence[bytes]) -> None:
        self.server.publish(self._topic, bodies)

    def waiting(self) -> int:
        return len(self.server.attempts(self._subscription))

    def leased(self) -> int:
        """Includes scheduled retries, which Pub/Sub does not tell apart."""
        with self.server.broker.changed:
            return len(self.server.broker.subscriptions[self._subscription].flying)

    def dead(self) -> list[Dead]:
        """The mark of a second letter of one message is the id that stands in both."""
        letters: list[Dead] = []
        seen: set[str] = set()
        for held in self.server.held(self._dead):
            why = held.attributes
            letters.append(
                Dead(
                    int(held.data),
                    int(why["broadway_attempt"]),
                    why["broadway_reason"],
                    marked=why["broadway_message_id"] in seen,
                )
            )
            seen.add(why["broadway_message_id"])
        return letters

    def close(self) -> None:
        self.server.stop()
