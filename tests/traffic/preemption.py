"""Kills every run for a while, as on preemptible machines, then lets runs finish.

Three runs without kills must then handle all messages.  Only messages that the pipeline fails at
every attempt may be dead-lettered.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.traffic.accounting import Account
from tests.traffic.brokers import DEAD, BrokerAdapter, LeaseExpiring
from tests.traffic.pipelines import fails_for_good
from tests.traffic.series import Series
from tests.traffic.workers import Worker

#: Runs without kills after which the queue must be empty.
FINAL_RUNS = 3
#: The runs follow each other immediately, see :func:`inject_faults`.
FAULTS = {"young_queues": True, "no_grace": True}
#: Seconds until a retry is delivered, with a margin.
_RETRY_DELAY = 0.5


@dataclass(frozen=True, kw_only=True)
class PreemptionCase:
    """A case of killed runs.

    :param make: Creates the queue, with its files in a folder.
    :param rate: Messages published per second.
    :param seconds: Minimum duration of the kills.
    :param kills: Minimum number of kills.
    :param max_interval: Maximum seconds between two kills.
    """

    make: Callable[[Path], BrokerAdapter]
    folder: Path
    rate: float
    seconds: float
    kills: int = 0
    rng: random.Random
    max_interval: float = 2.0
    log: Callable[[str], None] = print


def run_preemption(case: PreemptionCase) -> tuple[Account, int]:
    """Runs the case; returns the counts and the number of kills."""
    broker = case.make(case.folder)
    kills = 0
    with Series(broker, case.folder, rate=case.rate) as series:
        end = time.monotonic() + case.seconds
        while time.monotonic() < end or kills < case.kills:
            worker = Worker(case.folder / "worker.log")
            budget = {"wait_seconds": 60.0, "idle_seconds": 60.0, "max_seconds": 30.0}
            series.start_run(worker, flow="staged", budget=budget, faults=FAULTS)
            time.sleep(case.rng.uniform(0.1, case.max_interval))
            if kills % 3 == 2:  # SIGTERM with a grace period that may be too short
                with suppress(psutil.NoSuchProcess):
                    worker.signal(signal.SIGTERM)
                time.sleep(case.rng.uniform(0.0, 0.3))
            worker.kill()
            kills += 1
        summary = finish_without_kills(series, broker, case.folder, case.log)
    return summary, kills


def finish_without_kills(
    series: Series,
    broker: BrokerAdapter,
    folder: Path,
    log: Callable[[str], None] = print,
    **command: Any,
) -> Account:
    """Finishes a series with runs that are not killed; returns the counts.

    :param command: Additional fields of these runs' commands.
    """
    series.publisher.stop()
    if isinstance(broker, LeaseExpiring):
        broker.expire_leases()
    worker = Worker(folder / "quiet.log")
    for number in range(FINAL_RUNS):
        quiet = {"flow": "staged", "budget": {"wait_seconds": 1.0}, "faults": FAULTS, **command}
        response = series.run(worker, **quiet)
        log(f"  final run {number + 1}: {response['report']}, {response['seconds']} s")
        time.sleep(_RETRY_DELAY)
    worker.kill()
    summary = series.close(exact=False)
    waiting = {place: count for place, count in summary.places.items() if place != DEAD and count}
    if waiting:
        summary.mistakes.append(
            f"after {FINAL_RUNS} runs without kills messages are left: {waiting}"
        )
    innocent = [
        message.number
        for message in series.left
        if message.place == DEAD and not fails_for_good(message.number)
    ]
    if innocent:
        summary.mistakes.append(f"dead-lettered without cause: {sorted(innocent)[:20]}")
    return summary
