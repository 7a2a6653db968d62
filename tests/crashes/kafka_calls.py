"""The boundary of confluent-kafka: what a process asks of the cluster, and sends to it.

What is fetched comes by itself, in portions that depend on how fast it comes, so that to read is no
point, but for the first look.  To die when messages have come is to die before the next call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from airflow_broadway.testing.crashes.interceptor import Interceptor

#: Seconds for the cluster to answer.
_PATIENCE = 30.0
#: What changes nothing: method → its name as a point.
_LOOKS = {
    "list_topics": "metadata",
    "committed": "fetch offsets",
    "get_watermark_offsets": "list offsets",
    "offsets_for_times": "offsets for times",
}


class _Struck(Exception):
    """A dead letter is not sent, or its delivery report is lost."""


class Kafka:
    """Every consumer and producer of this process.

    A message that is produced is sent and confirmed within the call.  A consumer waits until it has
    as many messages as it may return, or has seen the end: so each run takes the same portions.
    """

    def install(self, interceptor: Interceptor) -> None:
        import confluent_kafka as kafka

        error = _errors(kafka, "_TRANSPORT")
        hangs = _errors(kafka, "_TIMED_OUT")

        def request(name: str, target: str, do: Callable[[], Any], *, changes: bool = False) -> Any:
            return interceptor.call(
                name, target, do, changes=changes, error=error, hangs=hangs, late=changes
            )

        class Consumer(kafka.Consumer):
            looked = False

            def commit(self, *given: Any, **named: Any) -> Any:
                do = super().commit
                return request("commit offsets", "", lambda: do(*given, **named), changes=True)

            def consume(self, num_messages: int = 1, timeout: float = -1) -> Any:
                do = super().consume
                if self.looked:
                    return _portion(do, num_messages, timeout)
                self.looked = True
                return request("fetch", "", lambda: _portion(do, num_messages, timeout))

        def looking(method: str, name: str) -> Any:
            def look(self: Any, *given: Any, **named: Any) -> Any:
                do = getattr(super(Consumer, self), method)
                if named.get("cached"):  # answered without a request
                    return do(*given, **named)
                return request(name, "", lambda: do(*given, **named))

            return look

        for method, name in _LOOKS.items():
            setattr(Consumer, method, looking(method, name))

        class Producer(kafka.Producer):
            def produce(self, topic: str, *given: Any, **named: Any) -> None:
                do: Any = super().produce
                on_delivery = named.pop("on_delivery")
                refused: list[Any] = []

                def send() -> None:
                    do(topic, *given, on_delivery=lambda error, _: refused.append(error), **named)
                    if self.flush(_PATIENCE):
                        refused.append(kafka.KafkaError(kafka.KafkaError._MSG_TIMED_OUT))

                try:
                    interceptor.call("produce", "", send, error=_Struck, hangs=_Struck, late=True)
                except _Struck:  # the sender sees it in its next call
                    refused[:] = [kafka.KafkaError(kafka.KafkaError._MSG_TIMED_OUT)]
                on_delivery(refused[0], None)

        replaced: Any = kafka
        replaced.Consumer, replaced.Producer = Consumer, Producer


def _errors(kafka: Any, name: str) -> Callable[[], Exception]:
    code = getattr(kafka.KafkaError, name)
    return lambda: kafka.KafkaException(kafka.KafkaError(code))


def _portion(consume: Any, most: int, timeout: float) -> list[Any]:
    """Up to so many messages and events: all, unless an event is among them."""
    messages: list[Any] = consume(1, max(timeout, 0.2))
    limit = time.monotonic() + _PATIENCE
    while messages and len(messages) < most and messages[-1].error() is None:
        messages += consume(1, 0.2)
        if time.monotonic() > limit:
            break
    return messages
