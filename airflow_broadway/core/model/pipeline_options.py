"""Options of every pipeline, independent of its producer: rate, retries, processors, batchers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from airflow_broadway.core.errors import OptionsError, SchemaError
from airflow_broadway.core.model.options import Options, is_template, option, options
from airflow_broadway.core.model.rules import (
    AUTO,
    BOOL,
    FRACTION,
    FUNCTION,
    POSITIVE,
    SECONDS,
    SECONDS_OR_ZERO,
    TEXT,
    Rule,
    at_least,
    is_int,
    one_of,
    takes,
)
from airflow_broadway.core.model.sink import Sink, SinkWarning
from airflow_broadway.core.schema.ddl import parse_schema

#: The timestamps of an archive that need no function.
_TIMES = ("received_at", "enqueued_at")


@options
class RateLimiting(Options):
    """The rate limit on messages received by all of a run's producers together."""

    allowed_messages: int = option(rule=POSITIVE, doc="Messages per interval.")
    interval: float = option(rule=SECONDS, doc="After this the count is reset.")


@options
class RetryPolicy(Options):
    """How a message that failed with ``on_failure="retry"`` is retried.

    The delay before attempt *n* + 1 is ``backoff * 2 ** (n - 1)``, at most ``max_backoff``, and
    randomly longer or shorter by up to ``jitter`` of itself.
    """

    max_attempts: int = option(
        default=5, rule=POSITIVE, doc="Recorded failures after which a message is not retried."
    )
    backoff: float = option(
        default=60.0,
        rule=SECONDS_OR_ZERO,
        doc="Delay of the second attempt; doubled for each further one.",
    )
    max_backoff: float = option(
        default=3600.0, rule=SECONDS_OR_ZERO, doc="The longest delay, before ``jitter``."
    )
    jitter: float = option(
        default=0.1, rule=FRACTION, doc="The share of a delay by which it is randomly varied."
    )
    dead_letter: bool = option(
        default=True,
        rule=BOOL,
        doc="Whether a message out of attempts is dead-lettered (True) or left to the broker.",
    )


@options
class Archive(Options):
    """Archives every message as received, so that a past interval can be run again."""

    time: Any = option(
        default="received_at",
        rule=Rule(
            "'received_at', 'enqueued_at', or a function of one argument",
            lambda value: value in _TIMES if isinstance(value, str) else FUNCTION.holds(value),
        ),
        doc="The timestamp by which intervals are read: of receipt, of enqueueing, or an"
        " aware ``datetime`` from the received message.  Where it is missing,"
        " ``received_at`` is used, and the run reports it.",
    )
    keep: float | None = option(
        default=None,
        rule=SECONDS.or_none(),
        doc="Retention by that timestamp, in whole hours; ``None``: unlimited.",
    )
    on_gap: str = option(
        default="report",
        rule=one_of("report", "refuse"),
        doc="A backfill of an interval that is incomplete or empty: ``report`` notes it,"
        " ``refuse`` fails before it handles anything.",
    )


@options
class Processors(Options):
    """The processors: how ``handle_message`` is run."""

    name: str = option(
        default="default", rule=TEXT, doc="The key that callbacks get as ``processor``."
    )
    concurrency: int = option(
        default=AUTO,
        rule=POSITIVE,
        doc="Chunks handled at a time in one process task; twice the processors of the machine.",
    )
    executor: str = option(
        default="threads",
        rule=one_of("threads", "processes"),
        doc="``processes``: child processes, for CPU-bound callbacks; their messages and"
        " results must be picklable.",
    )
    max_demand: int = option(
        default=AUTO,
        rule=POSITIVE,
        doc="A chunk has ``max_demand - min_demand`` messages.  10 as in Broadway.",
    )
    min_demand: int = option(
        default=AUTO,
        rule=at_least(0),
        doc="Less than ``max_demand``; half of it by default.",
    )
    partition_by: Callable[[Any], int] | None = option(
        default=None,
        rule=FUNCTION.or_none(),
        doc="Message → integer of at least 0; messages of one value modulo ``concurrency`` are"
        " handled in order of arrival, one at a time.",
    )

    def _resolve(self) -> None:
        self._default("concurrency", 2 * (os.cpu_count() or 1))
        self._default("max_demand", 10)
        if is_template(self.max_demand) or is_template(self.min_demand):
            return
        self._default("min_demand", self.max_demand // 2)
        if self.min_demand >= self.max_demand:
            raise OptionsError(
                "Processors.min_demand",
                f"less than max_demand ({self.max_demand})",
                self.min_demand,
            )

    @property
    def chunk_size(self) -> int:
        """The number of messages in one chunk."""
        return self.max_demand - self.min_demand


#: Defaults of batchers by engine: Broadway's for Python; for Spark, sizes that justify a Spark job.
_BATCHER_DEFAULTS: dict[str, dict[str, Any]] = {
    "python": {"batch_size": 100, "batch_bytes": None, "batch_timeout": 1.0},
    "spark": {"batch_size": 100_000, "batch_bytes": 128 * 1024 * 1024, "batch_timeout": None},
}


_DETERMINES_TASKS = "it determines the tasks of the Dag"


def _is_batch_size(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and callable(value[1]) and takes(value[1], 2)
    return is_int(value) and value > 0  # type: ignore[operator]


def _is_names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(TEXT.holds, value))


@options
class Batcher(Options):
    """One batcher: how messages are grouped, and what runs ``handle_batch`` on them."""

    engine: str = option(
        default="spark",
        rule=one_of("spark", "python"),
        doc="``handle_batch`` gets a DataFrame (``spark``) or a list (``python``).",
        no_template=_DETERMINES_TASKS,
    )
    batch_size: Any = option(
        default=AUTO,
        rule=Rule(
            "a positive integer, or a pair of a start value and a function of two arguments",
            _is_batch_size,
            int,
        ),
        doc="Messages in a full batch, or ``(initial, splitter)``: ``splitter(message, acc)``"
        ' returns ``("cont", acc)``, or ``("emit", acc)`` to close the batch with this message.'
        "  100 with Python, 100,000 with Spark.",
    )
    batch_bytes: int | None = option(
        default=AUTO,
        rule=POSITIVE.or_none(),
        doc="Payload bytes, as received, before which a batch is closed; a larger message is"
        " a batch of its own.  None with Python, 128 MiB with Spark.",
    )
    batch_timeout: float | None = option(
        default=AUTO,
        rule=SECONDS.or_none(),
        doc="From a batch's first message until it is closed unfilled; ``None``: at the end"
        " of the run.  1 with Python in one process, else None.",
    )
    concurrency: int = option(default=1, rule=POSITIVE, doc="Batches handled at a time.")
    max_demand: int = option(
        default=AUTO,
        rule=POSITIVE,
        doc="Sets the chunks of a flush; ``batch_size`` by default.",
    )
    partition_by: Callable[[Any], int] | None = option(
        default=None,
        rule=FUNCTION.or_none(),
        doc="Message → integer of at least 0; batches of one value modulo ``concurrency`` are"
        " handled in order, one at a time.",
    )
    merge_keys: bool = option(
        default=False,
        rule=BOOL,
        doc="Whether one call may carry whole batches of many keys, up to ``batch_size`` together.",
    )
    schema: str | None = option(
        default=None,
        rule=TEXT.or_none(),
        doc='The columns of ``data`` as Spark DDL: ``"origin string, delay double"``.  A'
        " Python batcher gets a ``dict`` of them.",
    )
    own_application: bool = option(
        default=False,
        rule=BOOL,
        doc="Runs this batcher in a Spark application of its own.",
        no_template=_DETERMINES_TASKS,
    )
    sink: Sink | None = option(
        default=None,
        rule=Rule("a sink, such as ParquetFolder(…)", lambda v: isinstance(v, Sink)).or_none(),
        doc="The table or folder to which the rows that ``handle_batch`` returns are"
        " committed exactly once: see ``docs/sinks.md``.",
    )
    outlets: Any = option(
        default=None,
        rule=Rule("a list of names or URIs of assets", _is_names).or_none(),
        doc="Assets that get an event with counts and batch ids when the task succeeds; by"
        " default the sink's URI.",
        no_template="it determines the assets of the Dag",
    )

    def _resolve(self) -> None:
        for name, value in _BATCHER_DEFAULTS.get(self.engine, {}).items():
            self._default(name, value)
        if isinstance(self.batch_size, tuple):
            if self.max_demand is AUTO:
                raise OptionsError(
                    "Batcher.max_demand", "an integer when batch_size is a pair", None
                )
            if self.merge_keys:
                raise OptionsError(
                    "Batcher.merge_keys", "False when batch_size is a pair", self.merge_keys
                )
        self._default("max_demand", self.batch_size)
        if sink := self.sink:
            if self.engine == "spark" and type(sink).open_spark is Sink.open_spark:
                raise OptionsError(
                    "Batcher.sink", f"a sink for Spark batchers ({sink.spark_note})", sink
                )
            if caveat := sink.caveat(self.engine):
                warnings.warn(f"{sink.uri}: {caveat}", SinkWarning, stacklevel=2)
        if self.own_application and self.engine != "spark":
            raise OptionsError(
                "Batcher.own_application",
                f"False with engine={self.engine!r}: only Spark batchers run in an application",
                self.own_application,
            )

    @property
    def commits_uri(self) -> str | None:
        """The address of what records its sink's commits; ``None`` without a sink."""
        return None if self.sink is None else self.sink.commits_uri

    @property
    def assets(self) -> tuple[str, ...]:
        """Names of the assets that its batches update: its outlets, or its sink's URI.

        A sink with a template is none, since assets are determined while the Dag is parsed.
        """
        if self.outlets is not None:
            return tuple(self.outlets)
        return () if self.sink is None or is_template(self.sink.uri) else (self.sink.uri,)

    @property
    def staged_timeout(self) -> float | None:
        """The ``batch_timeout`` for messages that are all staged before the first is batched.

        Measured by ``received_at``.  ``None`` by default: there is nothing more to wait for, so
        that batches are filled from all staged messages.
        """
        return None if "batch_timeout" in getattr(self, "_auto", ()) else self.batch_timeout

    def check_schema(self, path: str) -> None:
        """Validates the schema; not done by the constructor, which has no path for errors.

        :param path: The batcher's path.
        :raises OptionsError: With the position of the error in the DDL.
        """
        if self.schema is None or is_template(self.schema):
            return
        try:
            parse_schema(self.schema)
        except SchemaError as error:
            raise OptionsError(f"{path}.schema", f"Spark DDL ({error})", self.schema) from None
