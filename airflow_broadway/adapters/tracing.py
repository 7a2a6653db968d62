"""Traces tasks by the tracer that Airflow configures (``[traces] otel_on``).

Airflow's own span of a task gets the task's counts.  A task that receives has a child span, which
is linked to the spans of its messages' publishers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from airflow.providers.common.compat.sdk import AirflowSkipException

from airflow_broadway.core import telemetry
from airflow_broadway.core.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from airflow_broadway.core.pipeline import Pipeline

#: Maximum number of links of a span; also the default limit of OpenTelemetry's SDK.
MAX_LINKS: Final = 128
#: Maximum number of messages whose headers are read for them.
MAX_READ: Final = 1024
#: The header, or attribute, with the context of the span that published a message (W3C).
_HEADER: Final = "traceparent"


def set_counts(counts: Mapping[str, Any]) -> None:
    """Adds a task's counts to the current span, as attributes ``broadway.<name>``."""
    from opentelemetry import trace

    numbers = {f"broadway.{name}": n for name, n in counts.items() if type(n) is int}
    trace.get_current_span().set_attributes(numbers)


@contextmanager
def receiving_span(pipeline: Pipeline) -> Iterator[None]:
    """Traces a task that receives, if Airflow's tracing is on.

    Without text of errors, which may be text of messages.
    """
    from opentelemetry import trace

    with trace.get_tracer("airflow_broadway", __version__).start_as_current_span(
        f"process {pipeline.name}",
        kind=trace.SpanKind.CONSUMER,
        attributes={
            "messaging.system": pipeline.producer.kind,
            "messaging.operation.type": "process",
            "broadway.pipeline": pipeline.name,
        },
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        links = _attach_links(span) if span.is_recording() else ""
        try:
            yield
        except AirflowSkipException:
            raise
        except BaseException as error:  # also on KeyboardInterrupt and SystemExit; re-raised
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            telemetry.detach(links)


def _attach_links(span: Span) -> str:
    """Links a span to the publishers of messages, as these reach the processors.

    :returns: The id of the telemetry handler, which detaches itself when it has enough.
    """
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    extract = TraceContextTextMapPropagator().extract
    read, seen = itertools.count(1), set[str]()

    def link(event: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
        for message in metadata["messages"]:
            if next(read) > MAX_READ or len(seen) >= MAX_LINKS:
                telemetry.detach(handler_id)
                return
            header = metadata["producer"].header_of(message, _HEADER)
            text = header.decode("latin-1") if isinstance(header, bytes) else header
            if isinstance(text, str) and text not in seen:
                context = trace.get_current_span(extract({_HEADER: text})).get_span_context()
                if context.is_valid:
                    seen.add(text)
                    span.add_link(context)

    handler_id = telemetry.attach(link, events=["processor.start"])
    return handler_id
