"""The crash points of AMQP methods."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.crashes.amqp_calls import Amqp

spec = pytest.importorskip("pika.spec")


class Recorder:
    def __init__(self) -> None:
        self.points: list[str] = []

    def call(self, kind: str, target: str, do: Callable[[], None], **_: Any) -> None:
        self.points.append(f"{kind} {target}".strip())
        do()


def points(*methods: Any) -> list[str]:
    amqp, recorder, sent = Amqp(), Recorder(), []
    amqp._interceptor = recorder  # type: ignore[assignment]
    send = amqp._sending(lambda connection, channel, method, content: sent.append(method))
    connection = SimpleNamespace(_transport=SimpleNamespace(_tx_buffers=[], _sock=None))
    for method in methods:
        send(connection, 1, method)
    assert sent == list(methods)
    return recorder.points


def test_a_repeated_count_is_one_point() -> None:
    count, opened = spec.Queue.Declare(queue="q", passive=True), spec.Channel.Open()

    assert points(opened, count, opened, count, count) == [
        "channel.open",
        "queue.declare q",
        "channel.open",
    ]


def test_a_count_after_another_method_or_of_another_queue_is_a_point() -> None:
    count = spec.Queue.Declare(queue="q", passive=True)
    other = spec.Queue.Declare(queue="other", passive=True)

    observed = points(count, spec.Queue.Purge(queue="q"), count, other, count)

    assert observed == [
        "queue.declare q",
        "queue.purge q",
        "queue.declare q",
        "queue.declare other",
        "queue.declare q",
    ]
