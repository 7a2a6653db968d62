"""The acknowledger of a run: requests verdicts from the producer and passes them to a sink."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.custody.verdicts import ACK, Action, Verdict
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.acks import AckRef, current_stage
from airflow_broadway.core.model.message import Message

#: A message and the verdict on it.
Judged = tuple[Message, Verdict]


class AckSink(Protocol):
    """Receives a run's verdicts; called from any settling thread, one call at a time."""

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        """Records the verdicts of one stage result."""

    def settle_now(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        """Carries out these verdicts before returning; raises the broker's errors."""


class RunAcknowledger:
    """The acknowledger of a run: requests each verdict from the producer, passes it to the sink.

    :param producer: Decides by the message's ack configuration, its attempt and the retry policy.
    :param sink: Keeps verdicts until they are carried out.
    :param defers: Whether no message is dead-lettered immediately.
    """

    def __init__(self, producer: Producer, sink: AckSink, *, defers: bool = False) -> None:
        self._producer = producer
        self._sink = sink
        self._defers = defers
        self._lock = threading.Lock()
        # The verdict on nearly every message, so that the producer need not be called for each.
        self._plain = ACK if producer.actions[producer.on_success] is Action.ACK else None

    def attach(self, messages: Iterable[Message], ref: str) -> list[Message]:
        """Returns the messages with this acknowledger, each with the data of its delivery."""
        return [
            message.with_acknowledger(AckRef(self, ref, message.acknowledger.data))
            for message in messages
        ]

    def configure(self, ack_ref: Any, ack_data: Any, options: Mapping[str, Any]) -> Delivery:
        """Sets ``on_success`` and ``on_failure`` for one message.

        :raises OptionsError: If an option is unknown, or its value is no action of the producer.
        """
        checked: dict[str, str] = {}
        for name, value in options.items():
            path = f"configure_ack.{name}"
            if name not in ("on_success", "on_failure"):
                raise OptionsError.unknown(path, value, ("on_failure", "on_success"))
            checked[name] = self._producer.check_action(name, value, path)
        data = ack_data if isinstance(ack_data, Delivery) else Delivery()
        return dataclasses.replace(data, **checked)  # type: ignore[arg-type]

    def ack(self, ack_ref: Any, successful: list[Message], failed: list[Message]) -> None:
        """Records the verdicts on one stage's messages."""
        good, bad = self._judge(successful, failed)
        with self._lock:
            self._sink.record(current_stage(), good, bad)

    def ack_now(
        self, ack_ref: Any, successful: list[Message], failed: list[Message]
    ) -> frozenset[str]:
        """Carries the verdicts out before returning.

        :returns: The ids of dead letters, which are left to the end of the stage if ``defers``.
        """
        good, bad = self._judge(successful, failed)
        left = frozenset[str]()
        if self._defers:
            dead = self._producer.is_dead_letter
            left = frozenset(m.message_id for m, verdict in (*good, *bad) if dead(verdict))
            good, bad = ([j for j in part if j[0].message_id not in left] for part in (good, bad))
        if good or bad:
            with self._lock:
                self._sink.settle_now(current_stage(), good, bad)
        return left

    def _judge(
        self, successful: list[Message], failed: list[Message]
    ) -> tuple[list[Judged], list[Judged]]:
        stage, verdict = current_stage(), self._producer.verdict
        good: list[Judged] = []
        for message in successful:
            data = message.acknowledger.data
            if self._plain is not None and (type(data) is not Delivery or data.on_success is None):
                good.append((message, self._plain))
            else:
                good.append((message, verdict(message, failed=False, stage=stage)))
        return good, [(message, verdict(message, failed=True, stage=stage)) for message in failed]
