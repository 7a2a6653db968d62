"""Pub/Sub's stub with a clock per project: ``python -m tests.crashes.pubsub_clocks``.

The file that is named like a project contains its clock offset in seconds, so that concurrent cases
share a server but not the time.
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
    """The clock of the current request's project; the stub executes one request at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clock_offset = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self._clock_offset)

    def switch_clock(self, call: str, request: Any) -> Refused | None:
        """Switches to the clock of the request's project; never rejects the request."""
        name = next(
            value
            for name in ("subscription", "topic", "name")
            if (value := getattr(request, name, ""))
        )
        try:
            self._clock_offset = float((self._folder / name.split("/")[1]).read_text())
        except FileNotFoundError:
            self._clock_offset = 0.0
        return None


def main() -> None:
    """Serves until killed; the argument is the folder of the offsets and the port file."""
    folder = Path(sys.argv[1])
    clocks = _Clocks(folder)
    get_subscription = Broker.get_subscription

    def get_with_count(self: Broker, request: Any) -> Any:
        settings = get_subscription(self, request)
        settings.labels[LEFT] = str(len(self.subscriptions[settings.name].left))
        return settings

    setattr(Broker, "get_subscription", get_with_count)  # noqa: B010
    stub = Stub(clocks, patience=0.0)
    stub.broker.answer = clocks.switch_clock
    (folder / "port.new").write_text(str(stub.port))
    (folder / "port.new").rename(folder / "port")
    signal.pause()


if __name__ == "__main__":
    main()
