"""The cost of killed runs for the next run, compared with a run without kills."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from airflow_broadway import Batcher, Message, Processors
from airflow_broadway.producers.sqlite import SqliteProducer
from tests.benchmarks.figures import rate
from tests.unit.passing import Passing

#: Messages of the measured run; messages held by each killed task; number of kills.
MESSAGES, HELD, KILLS = 20_000, 1_000, 50


class Numbers(Passing):
    """Reads numbers."""

    name = "Sums"
    producer = SqliteProducer(queue="sums", path="/replaced")
    processors = Processors(concurrency=1, max_demand=500)
    batchers = {"default": Batcher(engine="python", batch_size=1_000, batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data({"number": int(message.data)})


def _killed(work: Callable[[], object]) -> None:
    """Does work in a child process that is killed before it publishes."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise RuntimeError("the process was not killed")


def _seconds(messages: int, held: int, kills: int) -> float:
    """Returns the seconds of a run from its sweep to its report."""
    from airflow_broadway.runs.process import Process
    from tests.unit.runs.steps import Run

    def dies(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with tempfile.TemporaryDirectory() as folder:
        names: list[str] = []
        Run(Path(folder), "first", pipeline=Numbers).send(range(messages))
        for number in range(kills):
            names.append(f"killed__{number}")
            run = Run(Path(folder), names[-1], pipeline=Numbers, finished=names[:-1])

            def killed(run: Run = run) -> None:
                Process._publish = dies  # type: ignore[method-assign,assignment]
                run.process(max_messages=held)

            _killed(killed)
        run = Run(Path(folder), "last", pipeline=Numbers, finished=names)
        started = time.perf_counter()
        run.batch(run.process())
        report = run.ack()
        seconds = time.perf_counter() - started
        if (report["totals"]["acked"], report["balanced"]) != (messages, True):
            raise RuntimeError(f"not all messages were handled: {report['totals']}")
        return seconds


def bench_crashes(
    messages: int = MESSAGES, held: int = HELD, kills: int = KILLS, tries: int = 5
) -> list[dict[str, Any]]:
    """Messages a second of a run after kills, and of one that was never killed; medians."""
    _seconds(100, 10, 0)
    # In turn, so that what else the machine does meets both.
    pairs = [(_seconds(messages, held, 0), _seconds(messages, held, kills)) for _ in range(tries)]
    calm, after = (statistics.median(times) for times in zip(*pairs, strict=True))
    return [
        rate("crashes.run.calm", messages, calm),
        rate("crashes.run.after_kills", messages, after)
        | {"ratio": round(calm / after, 3), "of": "crashes.run.calm"},
    ]
