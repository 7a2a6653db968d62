"""Broadway's ``test_message`` and ``test_batch``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from airflow_broadway.core.local.batching import Batch
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import BatchMode, Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.testing.driver import PipelineDriver
from airflow_broadway.testing.dummy import AckCall

#: Makes the acknowledger of a test's message: ``acknowledger(data, (recording, ref))``.
MakeAck = Callable[[Any, tuple[Any, Any]], AckRef]


@dataclass(frozen=True, slots=True)
class Tested:
    """The outcome of the messages of one test.

    :param ref: Their common ack ref, unless ``acknowledger`` returned another.
    :param calls: The ack calls for it, in order: one per stage result.
    :param batches: The batches that carried them.
    """

    __test__: ClassVar[bool] = False  # pytest collects classes named Test…

    ref: object
    calls: list[AckCall]
    batches: list[Batch]

    @property
    def successful(self) -> list[Message]:
        """The messages settled as successful, in order."""
        return [message for call in self.calls for message in call.successful]

    @property
    def failed(self) -> list[Message]:
        """The messages settled as failed, in order."""
        return [message for call in self.calls for message in call.failed]


def test_message(
    pipeline: Pipeline | type[Pipeline] | PipelineDriver,
    data: Any,
    *,
    metadata: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    acknowledger: MakeAck | None = None,
) -> Tested:
    """Sends one message through a pipeline, with batch mode ``flush``.

    :param pipeline: A pipeline or its class, which is then drained; or a driver, which stays open.
    :param metadata: Pairs or a mapping.
    :param acknowledger: ``acknowledger(data, (recording, ref))`` returns the message's ack ref.
    """
    return _test(pipeline, [data], metadata, acknowledger, BatchMode.FLUSH)


def test_batch(
    pipeline: Pipeline | type[Pipeline] | PipelineDriver,
    batch: Iterable[Any],
    *,
    metadata: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    acknowledger: MakeAck | None = None,
    batch_mode: BatchMode | str = BatchMode.BULK,
) -> Tested:
    """Sends several messages through a pipeline together.

    :param batch_mode: ``"flush"`` delivers them immediately, ``"bulk"`` when a batch is full or its
        timeout has elapsed (a driver's clock is advanced manually; a pipeline is drained).
    :raises ValueError: If ``batch_mode`` is neither.
    """
    return _test(pipeline, list(batch), metadata, acknowledger, BatchMode(batch_mode))


# The names are Broadway's; pytest must not collect them.
test_message.__test__ = False  # type: ignore[attr-defined]
test_batch.__test__ = False  # type: ignore[attr-defined]


def _test(
    pipeline: Pipeline | type[Pipeline] | PipelineDriver,
    batch: list[Any],
    metadata: Mapping[str, Any] | Iterable[tuple[str, Any]],
    acknowledger: MakeAck | None,
    batch_mode: BatchMode,
) -> Tested:
    driver = pipeline if isinstance(pipeline, PipelineDriver) else PipelineDriver(pipeline)
    ref = object()
    make = acknowledger or (lambda data, recording: AckRef(*recording))
    before = len(driver.batches)
    driver.push(
        [
            driver.message(
                data,
                metadata=dict(metadata),
                acknowledger=make(data, (driver.acknowledger, ref)),
                batch_mode=batch_mode,
            )
            for data in batch
        ]
    )
    if driver is not pipeline:
        driver.drain()
    return Tested(ref, driver.acknowledger.of(ref), driver.batches[before:])
