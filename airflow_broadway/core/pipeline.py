"""What a pipeline is: a class whose attributes are its options, and its methods its callbacks.

Users subclass :class:`airflow_broadway.Broadway`, which is this class with its ways into Airflow.
All else in the package goes by this one: it needs the standard library only, and runs in a Spark
driver too.  How a pipeline gets from one process to another: :mod:`.reference`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.errors import OptionsError, PipelineError
from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import build, override
from airflow_broadway.core.model.pipeline_options import Archive, Batcher, Processors
from airflow_broadway.core.model.rules import FUNCTION, SECONDS, takes
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.model.run_source import Interval

if TYPE_CHECKING:
    from typing import Self

#: The callbacks and what each is called with.
_CALLBACKS: Mapping[str, tuple[str, ...]] = {
    "setup": ("run",),
    "prepare_backfill": ("interval", "context"),
    "prepare_messages": ("messages", "context"),
    "handle_message": ("processor", "message", "context"),
    "handle_batch": ("batcher", "messages", "batch_info", "context"),
    "handle_failed": ("messages", "context"),
}

#: What ``context`` is unless declared; Broadway's own word.
CONTEXT_NOT_SET = "context_not_set"


class Pipeline:
    """Options, their check, and the callbacks as they are unless a subclass has its own.

    :param overrides: Options that replace the declared ones; see
        :class:`airflow_broadway.Broadway`.
    :raises OptionsError: Naming the path of the option, the value, the rule or the valid names.
    """

    #: The pipeline's name, in staging paths and metrics; the class's name unless declared.
    name: ClassVar[str] = ""
    producer: Any = None
    processors: Any = Processors()
    batchers: Mapping[str, Batcher] = {}
    #: Keeps what is received, for backfills; ``None``: nothing is kept.
    archive: Archive | None = None
    #: The default ``partition_by`` of processors and batchers.
    partition_by: Any = None
    #: What every callback gets as ``context``: any JSON value; :meth:`setup` may return another.
    context: Any = CONTEXT_NOT_SET
    #: Seconds that a run has, once it is asked to stop, to finish what was handed out; the rest
    #: goes back.  A run that ends by itself has no such bound.
    shutdown: float = 30.0
    #: What may be known about the run, in every callback.
    run: RunInfo = RunInfo()

    _options: ClassVar[tuple[str, ...]] = (
        "archive",
        "batchers",
        "context",
        "name",
        "partition_by",
        "processors",
        "producer",
        "shutdown",
    )

    #: The options that the constructor was given.
    overrides: Mapping[str, Any]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        if cls.__init__ is not Pipeline.__init__:
            # Workers build a pipeline from its class and options, and never call the constructor.
            raise OptionsError(
                f"{cls.__name__}.__init__",
                "no constructor, which other processes would never call: make what callbacks need"
                " in setup(self, run), which is called once in each and returns the context",
                _written(cls, "__init__"),
            )
        return super().__new__(cls)

    def __init__(self, **overrides: Any) -> None:
        self.overrides = overrides
        self._configure(overrides, rendered=False)

    @classmethod
    def from_rendered(cls, overrides: Mapping[str, Any], run: RunInfo | None = None) -> Pipeline:
        """Build it from options whose templates are rendered, without calling the constructor.

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

        Live runs have written rows of these messages, in batches of other ids.  Here a sink is made
        ready for them to be written anew: what it holds of the interval is removed.
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
        :func:`airflow_broadway.spark.failed` made, or a DataFrame of outcomes.
        """
        raise PipelineError(f"{type(self).__name__} defines no handle_batch")

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        """Called once per chunk or batch with those of its messages that failed, before they are
        settled; may change their data and how they are settled.
        """
        return messages

    @classmethod
    def defines(cls, callback: str) -> bool:
        """Whether the pipeline has its own version of a callback."""
        return getattr(cls, callback) is not getattr(Pipeline, callback)

    @classmethod
    def check_callbacks(cls, batchers: Mapping[str, Batcher]) -> None:
        """Check that the callbacks its messages need are there, and that each can be called.

        :raises OptionsError: Naming the one that is missing, or takes other arguments.
        """
        wanted = ["handle_message", *(["handle_batch"] if batchers else [])]
        for name in wanted:
            if not cls.defines(name):
                why = f", for its batchers {list(batchers)}" if name == "handle_batch" else ""
                raise OptionsError(
                    f"{cls.__name__}.{name}",
                    f"a method of the class{why}; without it every message would fail",
                    None,
                )
        bare = object.__new__(cls)
        for name, arguments in _CALLBACKS.items():
            if not takes(getattr(bare, name), len(arguments)):
                raise OptionsError(
                    f"{cls.__name__}.{name}",
                    f"a method {name}(self, {', '.join(arguments)})",
                    _written(cls, name),
                )

    # -- looking -------------------------------------------------------------------------------

    def topology(self) -> dict[str, list[dict[str, Any]]]:
        """The producers, processors and batchers, each with its name, key and concurrency."""
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
        """The producers' names, one for each mapped process task."""
        return [f"{self.name}.Broadway.Producer_{i}" for i in range(self.producer.concurrency)]

    # -- options -------------------------------------------------------------------------------

    def _configure(self, given: Mapping[str, Any], *, rendered: bool, prepare: bool = True) -> None:
        cls = type(self)
        for name, value in given.items():
            if name not in self._options:
                raise OptionsError.unknown(name, value, self._options)
        name = given.get("name", cls.name or cls.__name__)
        self.name = self._text("name", name)  # type: ignore[misc]
        self.context = given.get("context", cls.context)
        self.shutdown = self._seconds(given.get("shutdown", cls.shutdown), rendered)
        self.partition_by = cls.__dict__.get("partition_by", cls.partition_by)
        if isinstance(self.partition_by, staticmethod):
            self.partition_by = self.partition_by.__func__
        if "partition_by" in given:
            self.partition_by = given["partition_by"]
        if self.partition_by is not None and not FUNCTION.holds(self.partition_by):
            raise OptionsError("partition_by", FUNCTION.text, self.partition_by)
        self.producer = self._producer(given.get("producer"), rendered)
        self.processors = self._processors(given.get("processors"), rendered)
        self.batchers = self._batchers(given.get("batchers"), rendered)
        self.archive = self._archive(given, rendered)
        if prepare:
            self._prepare_for_start(given, rendered)

    def _prepare_for_start(self, given: Mapping[str, Any], rendered: bool) -> None:
        changed: Any = self.producer.prepare_for_start(self)
        if not isinstance(changed, Mapping):
            raise PipelineError(
                f"expected {type(self.producer).__name__}.prepare_for_start to return a mapping of"
                f" options, got: {changed!r:.200}"
            )
        if changed:
            self._configure({**given, **changed}, rendered=rendered, prepare=False)

    @staticmethod
    def _text(path: str, value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(
            r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", value
        ):
            raise OptionsError(
                path, "a name of at most 100 letters, digits, '_', '-' and '.'", value
            )
        return value

    @staticmethod
    def _seconds(value: Any, rendered: bool) -> float:
        if isinstance(value, str) and "{{" in value and not rendered:
            return 0.0  # nothing is run before it is rendered
        seconds = value
        if rendered and isinstance(value, str):
            with suppress(ValueError):
                seconds = float(value)
        if not SECONDS.holds(seconds):
            raise OptionsError("shutdown", SECONDS.text, value)
        return float(seconds)

    def _producer(self, given: Any, rendered: bool) -> Producer:
        declared = type(self).producer
        if declared is None and given is None:
            raise OptionsError.missing(
                f"{type(self).__name__}.producer",
                'producer = SqliteProducer(queue="orders", conn_id="orders_queue") in the class',
            )
        if isinstance(given, Producer):
            return given
        if not isinstance(declared, Producer):
            raise OptionsError("producer", "a producer, such as SqliteProducer(queue=…)", declared)
        made: Producer = (
            declared if given is None else override(declared, given, "producer", rendered=rendered)
        )
        return made

    def _processors(self, given: Any, rendered: bool) -> Processors:
        declared = type(self).processors
        if isinstance(declared, Mapping):
            if len(declared) != 1:
                raise OptionsError("processors", "exactly one set of processors", sorted(declared))
            ((name, declared),) = declared.items()
            declared = override(declared, {"name": name}, "processors")
        if not isinstance(declared, Processors):
            raise OptionsError("processors", "Processors(…)", declared)
        made = (
            given
            if isinstance(given, Processors)
            else override(declared, given or {}, "processors", rendered=rendered)
        )
        if made.partition_by is None and self.partition_by is not None:
            made = override(made, {"partition_by": self.partition_by}, "processors")
        return made

    def _archive(self, given: Mapping[str, Any], rendered: bool) -> Archive | None:
        declared = type(self).archive
        if declared is not None and not isinstance(declared, Archive):
            raise OptionsError("archive", "Archive(…) or None", declared)
        own = given.get("archive", declared)
        if own is None or isinstance(own, Archive):
            return own
        made: Archive = (
            build(Archive, own, "archive", rendered=rendered)
            if declared is None
            else override(declared, own, "archive", rendered=rendered)
        )
        return made

    def _batchers(self, given: Any, rendered: bool) -> dict[str, Batcher]:
        declared = type(self).batchers
        if not isinstance(declared, Mapping):
            raise OptionsError("batchers", "a mapping of names to Batcher(…)", declared)
        if given is not None and not isinstance(given, Mapping):
            raise OptionsError("batchers", "a mapping of names to options", given)
        for name, value in (given or {}).items():
            if name not in declared and not isinstance(value, Batcher):
                raise OptionsError.unknown(f"batchers.{name}", value, declared)
        made: dict[str, Batcher] = {}
        for name, own in {**declared, **(given or {})}.items():
            path = f"batchers.{name}"
            self._text(path, name)
            base = declared.get(name, own)
            if not isinstance(base, Batcher):
                raise OptionsError(path, "a Batcher(…)", base)
            batcher = (
                own if isinstance(own, Batcher) else override(base, own, path, rendered=rendered)
            )
            batcher.check_schema(path)
            if batcher.partition_by is None and self.partition_by is not None:
                batcher = override(batcher, {"partition_by": self.partition_by}, path)
            made[name] = batcher
        return made


def _written(cls: type[Pipeline], name: str) -> str:
    """Return a method's name and the names of its arguments, as its author wrote them."""
    arguments = inspect.signature(getattr(cls, name)).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in arguments]
    return f"{name}({', '.join(map(str, bare))})"
