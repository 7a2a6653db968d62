"""Pub/Sub's stub, with a clock for each project: ``python -m tests.crashes.pubsub_clocks``.

A project's clock goes by the seconds in the file that is called as the project: so many cases share
one server, and none sees the time of another.
"""

from __future__ import annotations

import signal
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from airflow_broadway.core.clock import SystemClock
from tests.pubsub_stub.broker import Broker
from tests.pubsub_stub.errors import Refused
from tests.pubsub_stub.server import Stub

#: The label with the number of a subscription's messages.
LEFT = "left"


class _Clocks(SystemClock):
    """The clock of the project that is asked for: the broker does one request at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ahead = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self._ahead)

    def turn_to(self, call: str, request: Any) -> Refused | None:
        """Goes by the clock of a request's project; refuses nothing."""
        name = next(
            value
            for name in ("subscription", "topic", "name")
            if (value := getattr(request, name, ""))
        )
        try:
            self._ahead = float((self._folder / name.split("/")[1]).read_text())
        except FileNotFoundError:
            self._ahead = 0.0
        return None


def main() -> None:
    """Serves until killed; the argument is the folder of the clocks, which gets the port."""
    folder = Path(sys.argv[1])
    clocks = _Clocks(folder)
    look = Broker.get_subscription

    def result(self: Broker, request: Any) -> Any:
        settings = look(self, request)
        settings.labels[LEFT] = str(len(self.subscriptions[settings.name].left))
        return settings

    setattr(Broker, "get_subscription", result)  # noqa: B010
    stub = Stub(clocks, patience=0.0)
    stub.broker.answer = clocks.turn_to
    (folder / "port.new").write_text(str(stub.port))
    (folder / "port.new").rename(folder / "port")
    signal.pause()


if __name__ == "__main__":
    main()
