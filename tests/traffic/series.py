"""Runs on one queue during continuous publishing, and the counts of its messages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

from tests.traffic.accounting import (
    Account,
    check_attempts,
    check_order,
    check_report_limits,
    check_reports,
    count_messages,
)
from tests.traffic.brokers import BrokerAdapter, QueuedMessage
from tests.traffic.publisher import Publisher
from tests.traffic.sink import read_handled
from tests.traffic.workers import Worker

#: Seconds within which a message that moves between two queues is in one of them.
_SETTLING = 15.0


class Series:
    """Starts runs on one queue while a publisher publishes.

    :param folder: The folder of the sink and the staging area.
    :param rate: Initial publish rate in messages per second.
    """

    def __init__(self, broker: BrokerAdapter, folder: Path, *, rate: float) -> None:
        self._broker = broker
        self._sink = folder / "sink.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self._place = {
            "kind": broker.kind,
            "options": dict(broker.options),
            "connections": dict(broker.connections),
            "staging": f"file://{folder}/staging",
            "sink": str(self._sink),
        }
        self.publisher = Publisher(broker.sender(), rate=rate)
        #: The runs' responses, in the order in which they ended.
        self.responses: list[dict[str, Any]] = []
        #: The messages that were in queues at the end.
        self.left: list[QueuedMessage] = []
        self._count = 0

    def __enter__(self) -> Self:
        self.publisher.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.stop()

    def start_run(self, worker: Worker, **command: Any) -> None:
        """Starts a run."""
        self._count += 1
        worker.send({"place": self._place, "run": f"run-{self._count}", **command})

    def end(self, worker: Worker) -> dict[str, Any]:
        """Waits for a run; returns its response."""
        response = worker.wait_for_response()
        self.responses.append(response)
        return response

    def run(self, worker: Worker, **command: Any) -> dict[str, Any]:
        """Starts a run and waits for its response."""
        self.start_run(worker, **command)
        return self.end(worker)

    def close(self, *, exact: bool = True, forgetful: bool = False, quiet: float = 0.2) -> Account:
        """Publishes a little longer, drains the broker and counts the messages; call it last.

        :param exact: Whether the reports must equal the counts: no run was killed or taken over.
            Ignored if a run ended without a report.
        :param forgetful: Whether the broker may have lost acknowledgements, so that messages are
            redelivered although a report counts them.
        """
        time.sleep(quiet)
        self.publisher.stop()
        left = self.left
        lines = read_handled(self._sink)
        limit = time.monotonic() + _SETTLING
        while True:
            left += self._broker.drain()
            summary = count_messages(
                self.publisher.confirmed, self.publisher.published, lines, left
            )
            if not summary.lost or time.monotonic() > limit:
                break
            time.sleep(0.5)
        check_order(summary, lines, left, self._broker.group_of)
        check_attempts(summary, lines)
        reports = [result["report"] for result in self.responses]
        if exact and all(reports):
            check_reports(summary, reports)
        if not forgetful:
            reports_ = {
                result["run"]: result["report"] for result in self.responses if result["report"]
            }
            check_report_limits(summary, reports_, lines)
        summary.mistakes += [
            f"{result['run']} does not balance: {result['report']}"
            for result in self.responses
            if result["report"] and not result["report"]["balanced"]
        ]
        return summary
