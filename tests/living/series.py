"""Runs one after another on one queue, in traffic, and the account of it all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

from tests.living.brokers import Left, LivingBroker
from tests.living.ledger import Account, account, bound, check_attempts, check_order, compare
from tests.living.publisher import Publisher
from tests.living.sink import handled
from tests.living.workers import Worker

#: Seconds within which what is on its way between two queues is in one of them.
_SETTLING = 15.0


class Series:
    """Runs on one queue while a publisher is at work, from before the first to after the last.

    :param folder: Its own.
    :param rate: Messages per second to begin with.
    """

    def __init__(self, broker: LivingBroker, folder: Path, *, rate: float) -> None:
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
        #: What the runs said, in the order in which they ended.
        self.told: list[dict[str, Any]] = []
        #: What lay in the queues at the end.
        self.left: list[Left] = []
        self._count = 0

    def __enter__(self) -> Self:
        self.publisher.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.stop()

    def begin(self, worker: Worker, **command: Any) -> None:
        """Begins a run."""
        self._count += 1
        worker.tell({"place": self._place, "run": f"run-{self._count}", **command})

    def end(self, worker: Worker) -> dict[str, Any]:
        """Waits for the end of a run."""
        answer = worker.answer()
        self.told.append(answer)
        return answer

    def run(self, worker: Worker, **command: Any) -> dict[str, Any]:
        """A whole run."""
        self.begin(worker, **command)
        return self.end(worker)

    def close(self, *, exact: bool = True, forgetful: bool = False, quiet: float = 0.2) -> Account:
        """Publishes a little longer, drain the broker, and counts.  No worker is at work any more.

        :param exact: Whether the reports must agree with the truth to the message: no run was
            killed, or taken for dead.  Runs that ended without a report make them disagree too.
        :param forgetful: Whether the broker may have forgotten what it acknowledged last, so that a
            report may be true and its messages come again all the same.
        """
        time.sleep(quiet)
        self.publisher.stop()
        left = self.left
        lines = handled(self._sink)
        limit = time.monotonic() + _SETTLING
        while True:
            left += self._broker.drain()
            summary = account(self.publisher.confirmed, self.publisher.published, lines, left)
            if not summary.lost or time.monotonic() > limit:
                break
            time.sleep(0.5)
        check_order(summary, lines, left, self._broker.group_of)
        check_attempts(summary, lines)
        reports = [result["report"] for result in self.told]
        if exact and all(reports):
            compare(summary, reports)
        if not forgetful:
            reports_ = {result["run"]: result["report"] for result in self.told if result["report"]}
            bound(summary, reports_, lines)
        summary.mistakes += [
            f"{result['run']} does not balance: {result['report']}"
            for result in self.told
            if result["report"] and not result["report"]["balanced"]
        ]
        return summary
