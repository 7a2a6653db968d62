"""The boundary of confluent-kafka: the requests of consumers and producers.

Only a consumer's first fetch is a point: later fetches depend on timing.  A death after a fetch is
the same as a death before the next request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from airflow_broadway.testing.crashes.interceptor import Interceptor

#: Seconds for the cluster to respond.
_TIMEOUT = 30.0
#: Methods without effects, and their names as points.
_READ_ONLY = {
    "list_topics": "metadata",
    "committed": "fetch offsets",
    "get_watermark_offsets": "list offsets",
    "offsets_for_times": "offsets for times",
}


class _InjectedError(Exception):
    """A message was not sent, or its delivery report was lost."""


class Kafka:
    """Intercepts every consumer and producer of this process.

    A produced message is sent and confirmed within the call.  A consumer waits until it has as many
    messages as it may return, or has reached the end, so that every run fetches the same portions.
    """

    def install(self, interceptor: Interceptor) -> None:
        import confluent_kafka as kafka

        error = _errors(kafka, "_TRANSPORT")
        timeout = _errors(kafka, "_TIMED_OUT")

        def request(name: str, target: str, do: Callable[[], Any], *, changes: bool = False) -> Any:
            return interceptor.call(
                name, target, do, changes=changes, error=error, timeout=timeout, late=changes
            )

        class Consumer(kafka.Consumer):
            fetched = False

            def commit(self, *args: Any, **kwargs: Any) -> Any:
                do = super().commit
                return request("commit offsets", "", lambda: do(*args, **kwargs), changes=True)

            def consume(self, num_messages: int = 1, timeout: float = -1) -> Any:
                do = super().consume
                if self.fetched:
                    return _consume_fully(do, num_messages, timeout)
                self.fetched = True
                return request("fetch", "", lambda: _consume_fully(do, num_messages, timeout))

        def intercept(method: str, name: str) -> Any:
            def request_method(self: Any, *args: Any, **kwargs: Any) -> Any:
                do = getattr(super(Consumer, self), method)
                if kwargs.get("cached"):  # answered without a request
                    return do(*args, **kwargs)
                return request(name, "", lambda: do(*args, **kwargs))

            return request_method

        for method, name in _READ_ONLY.items():
            setattr(Consumer, method, intercept(method, name))

        class Producer(kafka.Producer):
            def produce(self, topic: str, *args: Any, **kwargs: Any) -> None:
                do: Any = super().produce
                on_delivery = kwargs.pop("on_delivery")
                errors: list[Any] = []

                def send() -> None:
                    do(topic, *args, on_delivery=lambda error, _: errors.append(error), **kwargs)
                    if self.flush(_TIMEOUT):
                        errors.append(kafka.KafkaError(kafka.KafkaError._MSG_TIMED_OUT))

                try:
                    interceptor.call(
                        "produce", "", send, error=_InjectedError, timeout=_InjectedError, late=True
                    )
                except _InjectedError:  # reported by the delivery callback
                    errors[:] = [kafka.KafkaError(kafka.KafkaError._MSG_TIMED_OUT)]
                on_delivery(errors[0], None)

        replaced: Any = kafka
        replaced.Consumer, replaced.Producer = Consumer, Producer


def _errors(kafka: Any, name: str) -> Callable[[], Exception]:
    code = getattr(kafka.KafkaError, name)
    return lambda: kafka.KafkaException(kafka.KafkaError(code))


def _consume_fully(consume: Any, max_count: int, timeout: float) -> list[Any]:
    """Consumes up to ``most`` messages; stops at an event or at the end."""
    messages: list[Any] = consume(1, max(timeout, 0.2))
    limit = time.monotonic() + _TIMEOUT
    while messages and len(messages) < max_count and messages[-1].error() is None:
        messages += consume(1, 0.2)
        if time.monotonic() > limit:
            break
    return messages
