"""Runs cases through the real operators, with the embedded queue and staging.

The messages are sent while the process task receives: one receive returns the messages of one step,
so that chunks and times are those of the case.  The final state of a message is read from the
queue: a deleted message was acknowledged, a dead letter failed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from airflow_broadway import Broadway, Message
from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.model.acks import is_settled
from airflow_broadway.core.stages import rate_limiter
from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.operators.run import BroadwayRunOperator
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.runs import ports
from airflow_broadway.sensors.ack import BroadwayAckSensor
from airflow_broadway.testing import ManualClock
from tests.conformance.feed import ACTIONS, FEEDS, CaseProducer, Feed, to_case_message
from tests.conformance.limits import changed_when_settled, flushes_last, operations
from tests.conformance.observed import Case, Observed
from tests.conformance.pipelines import (
    CallbackObserver,
    class_attributes,
    make_class,
    rate_limiting,
)
from tests.conformance.tasks import Tasks


class CaseClasses:
    """The namespace of the cases' classes, from which they can be imported."""


# -- the final states of the messages --------------------------------------------------------------


class FinalStates(CallbackObserver):
    """Records each message's last data and configuration, which no broker keeps.

    :param prefix: The prefix of the batchers' names.
    """

    def __init__(self, batchers: Sequence[str], prefix: str = "") -> None:
        self._batchers = [f"{prefix}{name}" for name in batchers]
        self._prefix = prefix
        #: The batcher of all messages; empty: the batcher that the case sets.
        self.only = ""
        self.data: dict[str, Any] = {}
        self.configured: dict[str, dict[str, str]] = {}
        #: The messages that a callback failed.
        self.failed: set[str] = set()
        self._settle: set[str] = set()

    def entered(self, messages: list[Message]) -> None:
        for message in messages:
            self._record(message)

    def returned(self, callback: str, given: int, value: Any) -> None:
        if not isinstance(value, list) or not all(type(item) is Message for item in value):
            return
        if callback == "prepare_messages" and len(value) != given:
            return
        for message in value:
            routed = callback != "handle_message" or message.batcher in self._batchers
            if routed or not message.ok or not self._batchers:
                self._record(message)
            if callback == "handle_failed" or not message.ok:
                self.failed.add(message.message_id)

    def routed(self, message: Any) -> Any:
        if not self._prefix or not isinstance(message, Message):
            return message
        return message.put_batcher(self._prefix + (self.only or message.batcher))

    def _record(self, message: Message) -> None:
        if message.message_id in self._settle:
            return
        if is_settled(message):  # by ack_immediately: final
            self._settle.add(message.message_id)
        self.data[message.message_id] = message.data
        delivery = message.acknowledger.data
        if isinstance(delivery, Delivery):
            actions = {"on_success": delivery.on_success, "on_failure": delivery.on_failure}
            self.configured[message.message_id] = {
                k: v for k, v in actions.items() if v is not None
            }


class StagedCase:
    """Runs a case as tasks of a run.

    :param folder: The folder of the queue and the staging root.
    :param engine: The engine of the batchers.
    :param prefix: The prefix of the names of tasks and batchers.
    """

    def __init__(
        self,
        case: Case,
        folder: Path,
        tasks: Tasks,
        *,
        engine: str = "python",
        name: str = "Case",
        prefix: str = "",
    ) -> None:
        self.case = case
        self.tasks = tasks
        self.prefix = prefix
        self.observed = Observed(
            acks=None,
            acks_total={},
            sequence=None,
            ack_calls_that_raised=None,
            unordered=frozenset({"acks_total", "batchers", "configured", "errors"}),
            silent=frozenset({"batcher.start", "batcher.stop"}),
            flushes_last=flushes_last(case),
        )
        if len(case["given"].get("batchers", [])) > 0:
            self.observed.unordered |= {"handle_failed", "handle_failed_status"}
        if case["given"].get("processor", {}).get("concurrency") != 1:
            self.observed.unordered |= {"handle_message", "prepare_messages"}
        if any(spec.get("concurrency", 1) > 1 for spec in case["given"].get("batchers", [])):
            self.observed.unordered |= {"batches"}
        batchers = [spec["name"] for spec in case["given"].get("batchers", [])]
        self.custody = FinalStates(batchers, prefix)
        self._staging = f"file://{folder}/staging"
        #: Whether success and failure of a message have the same effect.
        self._alike = False
        # The current time, so that leases have their full length.
        self._clock = ManualClock(datetime.now(UTC))
        self.queue = SqliteQueue(folder / "queue.db", f"{prefix}queue", clock=self._clock)
        self.queue.create()  # cases of the Spark application share a file
        self._feed = FEEDS[self.queue.name] = Feed(case, self.queue, self._clock, self.observed)
        self.pipeline = self._class(engine, name)
        batch_ids = [f"{prefix}batch.{number}" for number in range(len(self.pipeline.batchers))]
        #: The tasks that the ack sensor watches.
        self.watched_tasks = [f"{prefix}process", *batch_ids]
        tasks.task_ids += [*self.watched_tasks, f"{prefix}ack"]

    def _class(self, engine: str, name: str) -> type[Broadway]:
        inputs = self.case["given"]
        producer = inputs.get("producer") or {}
        attributes = class_attributes(self.case, engine=engine, prefix=self.prefix)
        attributes["name"] = name
        attributes["producer"] = CaseProducer(
            queue=self.queue.name,
            path=self.queue.path,
            on_failure="dead_letter",
            transformer=to_case_message,
            concurrency=producer.get("concurrency", 1),
            rate_limiting=rate_limiting(producer["rate_limiting"])
            if producer.get("rate_limiting")
            else None,
        )
        return make_importable(
            make_class(self.case, self.observed, attributes, self.custody), self.queue.name
        )

    # -- the tasks -----------------------------------------------------------------------------

    def process(self) -> list[Any]:
        """Runs the process tasks; returns their references."""
        with (
            mock.patch.object(ports, "SystemClock", return_value=self._clock),
            mock.patch("airflow_broadway.adapters.host.SystemClock", return_value=self._clock),
        ):
            references = [
                self.tasks.execute(
                    BroadwayProcessorOperator(
                        task_id=f"{self.prefix}process",
                        pipeline=self.pipeline,
                        producer_index=index,
                        idle_seconds=0.0,
                        staging=self._staging,
                    ),
                    index,
                )
                for index in range(self.pipeline.producer.concurrency)
            ]
        self._feed.after()
        return references

    def batch(self, processed: list[Any]) -> list[Any]:
        """Runs the batcher tasks; returns the references of those with messages."""
        results = [
            self.tasks.execute(
                BroadwayBatcherOperator(
                    task_id=f"{self.prefix}batch.{number}",
                    pipeline=self.pipeline,
                    batcher=batcher,
                    processed=processed,
                    staging=self._staging,
                )
            )
            for number, batcher in enumerate(self.pipeline.batchers)
        ]
        return [item for item in results if item is not None]

    def look(self) -> Any:
        """Pokes the ack sensor once; returns the run's summary after all tasks have ended."""
        return self.tasks.execute(
            BroadwayAckSensor(
                fail_when="never",
                task_id=f"{self.prefix}ack",
                pipeline=self.pipeline,
                watch=self.watched_tasks,
                staging=self._staging,
            )
        )

    def acknowledge(self) -> Observed:
        """Pokes the sensor for the last time and reads the queue."""
        return self._settle(self.look())

    def _settle(self, totals: Mapping[str, int]) -> Observed:
        """Checks the totals and reads the queue."""
        late = len((self.case["given"].get("producer") or {}).get("after_drain", []))
        assert totals["received"] == totals["accounted"] == len(self._feed.sent) - late
        assert not totals["lapsed"] + totals["settle_failed"] + totals["still_leased"]
        self._read_queue()
        self._drop_unobservable()
        self.queue.close()
        return self.observed

    def _drop_unobservable(self) -> None:
        """Drops fields that a staged run cannot observe in this case."""
        inputs = self.case["given"]
        names = [op["op"] for op in operations(inputs)]
        breaks = bool(
            {"drop", "exit", "put_batcher", "raise", "raise_if_any", "return"} & set(names)
        )
        if "append_copy_of_first" in names:
            # A message that is returned several times is settled once.
            self.observed.acks_total = self.observed.reasons = None
        if changed_when_settled(inputs) or (self._alike and breaks):
            # The queue does not keep the status at settlement.
            self.observed.acks_total = None
        if breaks or "ack_immediately" in names or names.count("configure_ack") > 1:
            # Only the last returned configuration is known.
            self.observed.configured = None

    # -- the queue -----------------------------------------------------------------------------

    def _read_queue(self) -> None:
        """Determines how each message was settled by the queue's contents."""
        letters = {
            letter.message_id: letter.reason for letter in self.queue.dead_letters(limit=None)
        }
        now = self._clock.now() + timedelta(seconds=1.0)
        assert self.queue.depth().leased == 0
        released, ready_later = self._ready(now), self._ready(now + timedelta(days=1))
        configured = []
        self.observed.reasons = []
        for message_id, spec in self._feed.sent.items():
            if message_id in released:
                continue
            action = Action.ACK
            if message_id in letters:
                action = Action.DEAD_LETTER
            elif message_id in ready_later:
                action = Action.LEAVE
            own = self.custody.configured.get(message_id, {})
            if own:
                configured.append({"ack_ref": spec.get("ack_ref", "r"), "options": own})
            data = self.custody.data.get(message_id, spec["data"])
            kind = self._kind(message_id, action, own)
            totals = self.observed.acks_total
            if totals is not None:
                ref = totals.setdefault(
                    str(spec.get("ack_ref", "r")), {"successful": [], "failed": []}
                )
                ref[kind].append(data)
            if message_id in letters:
                self.observed.reasons.append((data, letters[message_id].replace(self.prefix, "")))
        if self.observed.configured is not None:
            self.observed.configured += configured

    def _ready(self, at: datetime) -> set[str]:
        """Returns the messages that are ready at a time."""
        with SqliteQueue(self.queue.path, self.queue.name, clock=ManualClock(at)) as queue:
            messages = queue.receive(f"looking at {at}", 1000)
            return {message.message_id for message in messages}

    def _kind(self, message_id: str, action: Action, own: Mapping[str, str]) -> str:
        """Returns whether a message was settled as successful or as failed."""
        success = ACTIONS[own.get("on_success", "ack")]
        failure = ACTIONS[own.get("on_failure", "dead_letter")]
        if action is success and action is not failure:
            return "successful"
        if action is failure and action is not success:
            return "failed"
        self._alike = True
        assert action is success, f"{message_id}: {action}, expected {success} or {failure}"
        return "failed" if message_id in self.custody.failed else "successful"


def make_importable(pipeline_class: type[Broadway], name: str) -> type[Broadway]:
    """Registers a class in :class:`CaseClasses`, so that it can be imported; returns it."""
    attribute = re.sub(r"\W", "_", name)
    pipeline_class.__module__, pipeline_class.__qualname__ = __name__, f"CaseClasses.{attribute}"
    setattr(CaseClasses, attribute, pipeline_class)
    return pipeline_class


class OneTask(StagedCase):
    """Runs a case in one task without staging."""

    def __init__(self, case: Case, folder: Path, tasks: Tasks) -> None:
        super().__init__(case, folder, tasks)
        self.observed.silent = frozenset()

    def run(self) -> Observed:
        """Runs the tasks and reads the queue."""
        with (
            mock.patch.object(ports, "SystemClock", return_value=self._clock),
            mock.patch("airflow_broadway.adapters.host.SystemClock", return_value=self._clock),
            mock.patch.object(rate_limiter, "SystemClock", return_value=self._clock),
        ):
            reports = [
                self.tasks.execute(
                    BroadwayRunOperator(
                        task_id="run",
                        pipeline=self.pipeline,
                        producer_index=index,
                        idle_seconds=0.0,
                        staging=self._staging,
                        fail_when="never",
                    ),
                    index,
                )
                for index in range(self.pipeline.producer.concurrency)
            ]
        self._feed.after()
        names = ("received", "accounted", "lapsed", "settle_failed", "still_leased")
        return self._settle({name: sum(report[name] for report in reports) for name in names})
