"""The arithmetic of ``docs/scale.md``, from figures that other documents have measured."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Messages a second: a whole run, one queue, settling, Spark on two cores; microseconds a message.
BENCH, QUEUE, SETTLED, SPARK = 15_198, 33_724, 687_673, 17_652
PROCESS, PLAN = 19e-6, 5e-6
GOAL = 1_000 * BENCH
QUEUES = ceil(GOAL / QUEUE)
RUN = 10_000_000


def words(document: str) -> str:
    return " ".join((ROOT / document).read_text("utf-8").split())


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("docs/rabbitmq.md", f"a whole DAG run of 1,000,000 with two Spark batchers | {BENCH:,}"),
        ("docs/rabbitmq.md", f"two process tasks concurrently | {QUEUE:,}"),
        ("docs/rabbitmq.md", f"settling a run whose every message succeeded | {SETTLED:,}"),
        ("docs/rabbitmq.md", f"The process task costs {PROCESS * 1e6:g} µs of processor time"),
        ("docs/staging.md", f"4–{PLAN * 1e6:g} µs to plan"),
        ("docs/sqs.md", "148 µs of processor time a message"),
        ("docs/sqs.md", "defaults, full receives, all acknowledged | 0.20"),
        ("docs/pubsub.md", "one run of 100,000 messages takes 32 µs"),
        ("docs/pubsub.md", "defaults, all acknowledged | 0.010"),
        ("README.md", f"Spark 328,521 18.6 {SPARK:,}"),
    ],
)
def test_figures_are_those_of_other_documents(document, says):
    assert says in words(document)


@pytest.mark.parametrize(
    "says",
    [
        f"{BENCH:,} messages/s from the queue to settled",
        f"A thousand times that is {GOAL:,} messages/s",
        f"queues of RabbitMQ | {QUEUES}",
        f"cores in process tasks | {round(GOAL * PROCESS)}",
        f"{round(1 / PLAN):,} messages/s, at {PLAN * 1e6:g} µs each",
        f"batchers | {ceil(GOAL * PLAN)}",
        f"cores in Spark | {round(GOAL * 2 / SPARK):,} | {2e6 / SPARK:.0f} µs a message",
        f"`ack` tasks at a time | {ceil(GOAL / SETTLED)}",
        f"{6 * QUEUES / (RUN / QUEUE):.0f} a second | {QUEUES} pipelines",
        f"runs of {RUN:,} messages ({RUN / QUEUE:.0f} s)",
        f"*The queue*, at {QUEUE / BENCH:.1f} times the bench",
        f"*The plan*, at {1 / PLAN / BENCH:.0f} times",
        f"*Settling*, at {SETTLED / BENCH:.0f} times",
        f"{2e6 / BENCH:.0f} at most: {1e6 / BENCH:.0f} s of two cores",
    ],
)
def test_arithmetic_is_right(says):
    assert says in words("docs/scale.md")
