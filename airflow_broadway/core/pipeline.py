"""The pipeline class: its attributes are options, its methods are callbacks.

Users subclass :class:`airflow_broadway.Broadway`, which adds the Airflow integration.  The rest of
the package depends on this class only: it needs the standard library and also runs in a Spark
driver.  :mod:`.reference` describes how a pipeline is passed between processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.errors import OptionsError, PipelineError
from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import build, override
from airflow_broadway.core.model.pipeline_options import Archive, Batcher, Processors
from airflow_broadway.core.model.rules import FUNCTION, SECONDS, Rule, matching, takes
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.core.model.sink import Sink

if TYPE_CHECKING:
    from typing import Self

T = TypeVar("T")

#: The callbacks and their arguments.
_CALLBACKS: Mapping[str, tuple[str, ...]] = {
    "setup": ("run",),
    "prepare_backfill": ("interval", "context"),
    "prepare_messages": ("messages", "context"),
    "handle_message": ("processor", "message", "context"),
    "handle_batch": ("batcher", "messages", "batch_info", "context"),
    "handle_failed": ("messages", "context"),
}

_NAME = matching(
    r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", "a name of at most 100 letters, digits, '_', '-' and '.'"
)

#: The default of ``context``, named as in Broadway.
CONTEXT_NOT_SET = "context_not_set"


class Pipeline:
    """Options, their validation, and default callbacks.

    :param overrides: Options that replace the declared ones; see
        :class:`airflow_broadway.Broadway`.
    :raises OptionsError: Naming the path of the option, the value, the rule or the valid names.
    """

    #: The pipeline's name, in staging paths and metrics; the class's name unless declared.
    name: ClassVar[str] = ""
    producer: Any = None
    processors: Any = Processors()
    batchers: Mapping[str, Batcher] = {}
    #: Archives received messages for backfills; ``None`` archives nothing.
    archive: Archive | None = None
    #: A sink with a row for each dead-lettered message; ``None`` for none.
    dead_letter_table: Sink | None = None
    #: The default ``partition_by`` of processors and batchers.
    partition_by: Any = None
    #: The ``context`` of every callback: any JSON value; :meth:`setup` may return another.
    context: Any = CONTEXT_NOT_SET
    #: Seconds that a run has, after a stop request, to finish the messages in process; the rest is
    #: released.  A run that ends by itself has no such limit.
    shutdown: float = 30.0
    #: Information on the run, for every callback.
    run: RunInfo = RunInfo()

    _options: ClassVar[tuple[str, ...]] = (
        "archive",
        "batchers",
        "context",
        "dead_letter_table",
        "name",
        "partition_by",
        "processors",
        "producer",
        "shutdown",
    )

    #: The options passed to the constructor.
    overrides: Mapping[str, Any]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        if cls.__init__ is not Pipeline.__init__:
            # Workers build a pipeline from its class and options, without its constructor.
            raise OptionsError(
                f"{cls.__name__}.__init__",
                "no constructor, which other processes would never call: make what callbacks need"
                " in setup(self, run), which is called once in each and returns the context",
                _signature_text(cls, "__init__"),
            )
        return super().__new__(cls)

    def __init__(self, **overrides: Any) -> None:
        self.overrides = overrides
        self._configure(overrides, rendered=False)

    @classmethod
    def from_rendered(cls, overrides: Mapping[str, Any], run: RunInfo | None = None) -> Pipeline:
        """Builds a pipeline from rendered options, without calling the constructor.

        :raises OptionsError: If an option, once rendered, breaks its rule.
        """
        pipeline = cls.__new__(cls)
        pipeline.overrides = dict(overrides)
        if run is not None:
            pipeline.run = run
        pipeline._configure(pipeline.overrides, rendered=True)
        return pipeline

    # -- callbacks -----------------------------------------------------------------------------

    def setup(self, run: RunInfo) -> Any:
        """Called once per process, before any other callback; returns the ``context``."""
        return self.context

    def prepare_backfill(self, interval: Interval, context: Any) -> None:
        """Called in a run of a past interval, before its first batch; may be called again.

        Live runs have written rows of these messages, in batches with other ids.  Prepare the sink
        for a rewrite here: remove its rows of the interval.
        """

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        """Called with each chunk before its messages are handled; returns all of them."""
        return messages

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        """Called with each message; returns it, changed, routed or failed."""
        raise PipelineError(f"{type(self).__name__} defines no handle_message")

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        """Called with each batch: a list of messages (``engine="python"``) or a Spark DataFrame.

        Python: returns the messages.  Spark: returns ``None`` when all succeeded, what
        :func:`airflow_broadway.spark.failed` made, or a DataFrame of outcomes.  For a batcher with
        a sink: returns the rows to commit, or :class:`airflow_broadway.Rows`.
        """
        raise PipelineError(
            f"{type(self).__name__} defines no handle_batch", code="handle_batch_undefined"
        )

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        """Called once per chunk or batch with its failed messages, before they are settled; may
        change their data and their ack configuration.
        """
        return messages

    @classmethod
    def defines(cls, callback: str) -> bool:
        """Returns whether the pipeline overrides a callback."""
        return getattr(cls, callback) is not getattr(Pipeline, callback)

    @classmethod
    def check_callbacks(cls, batchers: Mapping[str, Batcher]) -> None:
        """Checks that the required callbacks exist and take the expected arguments.

        :raises OptionsError: Naming the callback that is missing, or takes other arguments.
        """
        handled = any(batcher.sink is None for batcher in batchers.values())
        for name in ["handle_message", *(["handle_batch"] if handled else [])]:
            if not cls.defines(name):
                batched = f", for its batchers {list(batchers)}" if name == "handle_batch" else ""
                raise OptionsError(
                    f"{cls.__name__}.{name}",
                    f"a method of the class{batched}; without it every message would fail",
                    None,
                )
        bare = object.__new__(cls)
        for name, arguments in _CALLBACKS.items():
            if not takes(getattr(bare, name), len(arguments)):
                raise OptionsError(
                    f"{cls.__name__}.{name}",
                    f"a method {name}(self, {', '.join(arguments)})",
                    _signature_text(cls, name),
                )

    # -- introspection -------------------------------------------------------------------------

    def topology(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the producers, processors and batchers, each with name, key and concurrency."""
        name, processors = f"{self.name}.Broadway", self.processors
        return {
            "producers": [{"name": f"{name}.Producer", "concurrency": self.producer.concurrency}],
            "processors": [
                {
                    "name": f"{name}.Processor_{processors.name}",
                    "processor_key": processors.name,
                    "concurrency": processors.concurrency,
                }
            ],
            "batchers": [
                {
                    "batcher_name": f"{name}.Batcher_{key}",
                    "name": f"{name}.BatchProcessor_{key}",
                    "batcher_key": key,
                    "concurrency": batcher.concurrency,
                }
                for key, batcher in self.batchers.items()
            ],
        }

    def producer_names(self) -> list[str]:
        """Returns the producers' names, one for each mapped process task."""
        return [f"{self.name}.Broadway.Producer_{i}" for i in range(self.producer.concurrency)]

    # -- options -------------------------------------------------------------------------------

    def _configure(self, own: Mapping[str, Any], *, rendered: bool, prepare: bool = True) -> None:
        cls = type(self)
        for name, value in own.items():
            if name not in self._options:
                raise OptionsError.unknown(name, value, self._options)
        self.name = own.get("name", cls.name or cls.__name__)  # type: ignore[misc]
        _check("name", _NAME, self.name)
        self.context = own.get("context", cls.context)
        self.shutdown = self._seconds(own.get("shutdown", cls.shutdown), rendered)
        self.partition_by = cls.__dict__.get("partition_by", cls.partition_by)
        if isinstance(self.partition_by, staticmethod):
            self.partition_by = self.partition_by.__func__
        if "partition_by" in own:
            self.partition_by = own["partition_by"]
        if self.partition_by is not None:
            _check("partition_by", FUNCTION, self.partition_by)
        self.producer = self._producer(own.get("producer"), rendered)
        self.processors = self._processors(own.get("processors"), rendered)
        self.batchers = self._batchers(own.get("batchers"), rendered)
        self.archive = self._archive(own, rendered)
        self.dead_letter_table = self._table(own, rendered)
        if not prepare:
            return
        changed: Any = self.producer.prepare_for_start(self)
        if not isinstance(changed, Mapping):
            raise PipelineError(
                f"expected {type(self.producer).__name__}.prepare_for_start to return a mapping of"
                f" options, got: {changed!r:.200}"
            )
        if changed:
            self._configure({**own, **changed}, rendered=rendered, prepare=False)

    @staticmethod
    def _seconds(value: Any, rendered: bool) -> float:
        if isinstance(value, str) and "{{" in value and not rendered:
            return 0.0  # validated once it is rendered
        seconds = value
        if rendered and isinstance(value, str):
            with suppress(ValueError):
                seconds = float(value)
        if not SECONDS.holds(seconds):
            raise OptionsError("shutdown", SECONDS.text, value)
        return float(seconds)

    def _producer(self, own: Any, rendered: bool) -> Producer:
        declared = type(self).producer
        if declared is None and own is None:
            raise OptionsError.missing(
                f"{type(self).__name__}.producer",
                'producer = SqliteProducer(queue="orders", conn_id="orders_queue") in the class',
            )
        rule = "a producer, such as SqliteProducer(queue=…)"
        return _merge(Producer, "producer", rule, declared, own, rendered)

    def _processors(self, own: Any, rendered: bool) -> Processors:
        declared = type(self).processors
        if isinstance(declared, Mapping):
            if len(declared) != 1:
                raise OptionsError("processors", "exactly one set of processors", sorted(declared))
            ((name, declared),) = declared.items()
            declared = override(declared, {"name": name}, "processors")
        merged = _merge(Processors, "processors", "Processors(…)", declared, own or {}, rendered)
        return self._with_partition_by(merged, "processors")

    def _archive(self, overrides: Mapping[str, Any], rendered: bool) -> Archive | None:
        declared = type(self).archive
        own = overrides.get("archive", declared)
        if own is None:
            return None
        if declared is None and not isinstance(own, Archive):
            archive: Archive = build(Archive, own, "archive", rendered=rendered)
            return archive
        return _merge(Archive, "archive", "Archive(…) or None", declared, own, rendered)

    def _table(self, overrides: Mapping[str, Any], rendered: bool) -> Sink | None:
        declared = type(self).dead_letter_table
        own = overrides.get("dead_letter_table", declared)
        rule = "a sink, such as DeltaTable(…), or None"
        if own is None:
            return None
        abstract: Any = Sink
        table: Sink = _merge(abstract, "dead_letter_table", rule, declared, own, rendered)
        if table.time_column is not None:
            rule = "no value, since no run replaces the rows of dead letters"
            raise OptionsError("dead_letter_table.time_column", rule, table.time_column)
        return table

    def _batchers(self, overrides: Any, rendered: bool) -> dict[str, Batcher]:
        declared = type(self).batchers
        if not isinstance(declared, Mapping):
            raise OptionsError("batchers", "a mapping of names to Batcher(…)", declared)
        if overrides is not None and not isinstance(overrides, Mapping):
            raise OptionsError("batchers", "a mapping of names to options", overrides)
        for name, value in (overrides or {}).items():
            if name not in declared and not isinstance(value, Batcher):
                raise OptionsError.unknown(f"batchers.{name}", value, declared)
        batchers: dict[str, Batcher] = {}
        for name, own in {**declared, **(overrides or {})}.items():
            path = f"batchers.{name}"
            _check(path, _NAME, name)
            base = declared.get(name, own)
            batcher = _merge(Batcher, path, "a Batcher(…)", base, own, rendered)
            batcher.check_schema(path)
            batchers[name] = self._with_partition_by(batcher, path)
        return batchers

    def _with_partition_by(self, options: T, path: str) -> T:
        """Returns the options with the pipeline's ``partition_by``, unless they have their own."""
        if self.partition_by is None or getattr(options, "partition_by", None) is not None:
            return options
        changed: T = override(options, {"partition_by": self.partition_by}, path)
        return changed


def check_engines(pipeline: Pipeline) -> None:
    """Checks that every batcher runs in Python.

    :raises PipelineError: Naming the others, and the way out.
    """
    spark = [name for name, options in pipeline.batchers.items() if options.engine != "python"]
    if spark:
        raise PipelineError(
            f"batchers {spark} of {pipeline.name!r} run on Spark, which a run in one process does"
            ' not have: set engine="python", or run the pipeline\'s task group'
            " (BroadwayProcessorOperator, BroadwayBatcherOperator, BroadwaySparkSubmitOperator,"
            " BroadwayAckSensor)"
        )


def _check(path: str, rule: Rule, value: object) -> None:
    if not rule.holds(value):
        raise OptionsError(path, rule.text, value)


def _merge(kind: type[T], path: str, rule: str, declared: Any, own: Any, rendered: bool) -> T:
    """Returns an option's value: the constructor's, or the declared one with its changes.

    :param own: An object of ``kind``, or a mapping of options; ``None``: no changes.
    """
    if isinstance(own, kind):
        return own
    if not isinstance(declared, kind):
        raise OptionsError(path, rule, declared)
    if own is None:
        return declared
    merged: T = override(declared, own, path, rendered=rendered)
    return merged


def _signature_text(cls: type[Pipeline], name: str) -> str:
    """Returns a method's name and argument names, as declared."""
    arguments = inspect.signature(getattr(cls, name)).parameters.values()
    bare = [argument.replace(annotation=inspect.Parameter.empty) for argument in arguments]
    return f"{name}({', '.join(map(str, bare))})"
