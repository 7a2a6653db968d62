"""Runs that are killed from outside at such a rate that none ends untouched; then it is quiet.

As on preemptible machines.  Within three quiet runs all is handled, and only that is a dead letter
which the pipeline fails for good.
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

from tests.living.brokers import DEAD, Lapsing, LivingBroker
from tests.living.ledger import Account
from tests.living.pipelines import fails_for_good
from tests.living.series import Series
from tests.living.workers import Worker

#: Runs after the last kill within which the queue is empty.
QUIET_RUNS = 3
#: As for the other runs in traffic: they follow each other at once.
HARM = {"young_queues": True, "no_grace": True}
#: Seconds until a retry is delivered, with something to spare.
_RETRY_DELAY = 0.5


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """One series.

    :param make: Makes the queue, with its files in a folder.
    :param rate: Messages published per second.
    :param seconds: How long runs are killed, at least.
    :param kills: How many are, at least.
    :param longest: Seconds between two kills, at most.
    """

    make: Callable[[Path], LivingBroker]
    folder: Path
    rate: float
    seconds: float
    kills: int = 0
    dice: random.Random
    longest: float = 2.0
    tell: Callable[[str], None] = print


def preempt(given: Preemption) -> tuple[Account, int]:
    """Plays it; the account, and the number of kills."""
    broker = given.make(given.folder)
    kills = 0
    with Series(broker, given.folder, rate=given.rate) as series:
        end = time.monotonic() + given.seconds
        while time.monotonic() < end or kills < given.kills:
            worker = Worker(given.folder / "worker.log")
            budget = {"wait_seconds": 60.0, "idle_seconds": 60.0, "max_seconds": 30.0}
            series.begin(worker, flow="staged", budget=budget, harm=HARM)
            time.sleep(given.dice.uniform(0.1, given.longest))
            if kills % 3 == 2:  # a grace that may be too short
                with suppress(psutil.NoSuchProcess):
                    worker.signal(signal.SIGTERM)
                time.sleep(given.dice.uniform(0.0, 0.3))
            worker.end()
            kills += 1
        summary = close_quietly(series, broker, given.folder, given.tell)
    return summary, kills


def close_quietly(
    series: Series,
    broker: LivingBroker,
    folder: Path,
    tell: Callable[[str], None] = print,
    **command: Any,
) -> Account:
    """Ends a series by undisturbed runs; returns its account with the remaining messages.

    :param command: More of these runs.
    """
    series.publisher.stop()
    if isinstance(broker, Lapsing):
        broker.lapse()
    worker = Worker(folder / "quiet.log")
    for number in range(QUIET_RUNS):
        quiet = {"flow": "staged", "budget": {"wait_seconds": 1.0}, "harm": HARM, **command}
        answer = series.run(worker, **quiet)
        tell(f"  quiet run {number + 1}: {answer['report']}, {answer['seconds']} s")
        time.sleep(_RETRY_DELAY)
    worker.end()
    summary = series.close(exact=False)
    waiting = {place: count for place, count in summary.places.items() if place != DEAD and count}
    if waiting:
        summary.mistakes.append(f"after {QUIET_RUNS} quiet runs messages wait: {waiting}")
    innocent = [
        message.number
        for message in series.left
        if message.place == DEAD and not fails_for_good(message.number)
    ]
    if innocent:
        summary.mistakes.append(f"dead-lettered without cause: {sorted(innocent)[:20]}")
    return summary
