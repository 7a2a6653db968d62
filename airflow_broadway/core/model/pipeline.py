"""The behaviour: a pipeline is a class, its options are attributes, its callbacks are methods.

The class is declared in a module of its own, built anew in every process that runs a part of it,
and carried between them as a *reference*: the class's import path and the options that the
constructor was given.  Nothing else of it is ever serialized.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.errors import OptionsError, PipelineError
from airflow_broadway.core.model.message import BatchInfo, Message
from airflow_broadway.core.model.options import Batcher, Processors, override
from airflow_broadway.core.model.rules import FUNCTION, JSON, SECONDS
from airflow_broadway.core.model.run_info import RunInfo

if TYPE_CHECKING:
    from airflow_broadway.core.local.run import RunReport

__all__ = ["Broadway", "class_path", "import_class", "is_dag_file", "make_ref"]

#: What ``context`` is unless declared; Broadway's own word.
CONTEXT_NOT_SET = "context_not_set"

#: Airflow loads Dag files under names of this form; they exist in no other program.
_DAG_MODULE = re.compile(r"unusual_prefix_[0-9a-f]+_(?P<stem>.+)")
#: How such a class is referred to, since the digits change with the file's folder.
_DAG_FILE = "dag-file/"


class _of_class_or_instance:  # noqa: N801 - a decorator
    """A method that a class has too: called on the class, it gets an instance made without
    overrides.  ``Flights.dag("flights")`` is ``Flights().dag("flights")``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type[Any]) -> Callable[..., Any]:
        return functools.partial(self._function, owner() if instance is None else instance)


class Broadway:
    """A pipeline; subclass it, declare its options, write its callbacks.

    :param overrides: Options that replace the declared ones, each a JSON value; nested options take
        nested mappings: ``Flights(producer={"queue": "test"}, batchers={"delayed": {"batch_size":
        10}})``.  Airflow templates in them are rendered by the operators.
    :raises OptionsError: Naming the path of the option, the value, the rule or the valid names.
    """

    #: The pipeline's name, in staging paths and metrics; the class's name unless declared.
    name: ClassVar[str] = ""
    producer: Any = None
    processors: Any = Processors()
    batchers: Mapping[str, Batcher] = {}
    #: The default ``partition_by`` of processors and batchers.
    partition_by: Any = None
    #: What every callback gets as ``context``: any JSON value; :meth:`setup` may return another.
    context: Any = CONTEXT_NOT_SET
    #: Seconds that a run which is told to stop has to finish what was handed out; the rest goes
    #: back.  A run that ends by itself has no such bound.
    shutdown: float = 30.0
    #: What may be known about the run, in every callback.
    run: RunInfo = RunInfo()

    _options: ClassVar[tuple[str, ...]] = (
        "batchers",
        "context",
        "name",
        "partition_by",
        "processors",
        "producer",
        "shutdown",
    )

    def __init__(self, **overrides: Any) -> None:
        self._overrides = overrides
        self._configure(overrides, rendered=False)

    # -- callbacks -----------------------------------------------------------------------------

    def setup(self, run: RunInfo) -> Any:
        """Called once per process, before any other callback; returns the ``context``."""
        return self.context

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
        return getattr(cls, callback) is not getattr(Broadway, callback)

    @classmethod
    def check_callbacks(cls, batchers: Mapping[str, Batcher]) -> None:
        """Check that the callbacks are there that its messages will need.

        :raises OptionsError: Naming the one that is missing.
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

    # -- Airflow ------------------------------------------------------------------------------

    @_of_class_or_instance
    def task_group(self, group_id: str = "broadway", **kwargs: Any) -> Any:
        """The pipeline's tasks: see :func:`airflow_broadway.task_group.make_task_group`."""
        from airflow_broadway.task_group import make_task_group

        return make_task_group(self, group_id, **kwargs)

    @_of_class_or_instance
    def dag(self, dag_id: str, **kwargs: Any) -> Any:
        """A whole Dag of the pipeline: see :func:`airflow_broadway.task_group.make_dag`."""
        from airflow_broadway.task_group import make_dag

        return make_dag(self, dag_id, **kwargs)

    @staticmethod
    def params() -> dict[str, Any]:
        """The run's budgets as Airflow params, for the form of "Trigger" in the UI."""
        from airflow_broadway.task_group import make_params

        return make_params()

    # -- running and looking -------------------------------------------------------------------

    def run_local(self, messages: Iterable[Any] | None = None, **options: Any) -> RunReport:
        """Run it in this process, to its end, without Airflow and Spark.

        :param messages: Messages, or their data, instead of the producer's.
        :param options: Those of :func:`airflow_broadway.core.local.run.run_local`: budgets,
            ``connections``, ``clock`` and others.
        """
        from airflow_broadway.core.local.run import run_local

        return run_local(self, messages, **options)

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
        if cls.__init__ is not Broadway.__init__:
            # Workers build a pipeline from its class and options, and never call the constructor.
            raise OptionsError(
                f"{cls.__name__}.__init__",
                "left as it is: other processes never call it; make what callbacks need in"
                " setup(self, run), which is called once in each and returns the context",
                cls.__init__,
            )
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

    # -- reference -----------------------------------------------------------------------------

    def ref(self) -> dict[str, Any]:
        """The pipeline as JSON: ``{"class": "pkg.module:Class", "options": {…}}``.

        :raises OptionsError: If the class cannot be found again by its name, or an override is not
            JSON.
        """
        if not JSON.holds(self._overrides):
            raise OptionsError(
                "options", "JSON values (declare functions in the class instead)", self._overrides
            )
        return {"class": class_path(type(self)), "options": self._overrides}

    @classmethod
    def load(cls, ref: Mapping[str, Any], run: RunInfo | None = None) -> Broadway:
        """Build the pipeline that a rendered reference names.

        :raises PipelineError: If its class cannot be imported here; names the module and the cause.
        :raises OptionsError: If an option, once rendered, breaks its rule.
        """
        found = import_class(str(ref["class"]))
        pipeline = found.__new__(found)
        pipeline._overrides = dict(ref.get("options", {}))
        if run is not None:
            pipeline.run = run
        pipeline._configure(pipeline._overrides, rendered=True)
        return pipeline


def make_ref(pipeline: object) -> dict[str, Any]:
    """The reference of whatever an operator accepts: a class, an instance, ``"pkg.module:Class"``
    or a reference.

    :raises OptionsError: If it is none of these.
    """
    if isinstance(pipeline, Broadway):
        return pipeline.ref()
    if isinstance(pipeline, type) and issubclass(pipeline, Broadway):
        return pipeline().ref()
    if isinstance(pipeline, str) and re.fullmatch(r"[\w./-]+:[\w.]+", pipeline):
        return {"class": pipeline, "options": {}}
    if isinstance(pipeline, Mapping) and isinstance(pipeline.get("class"), str):
        return {"class": pipeline["class"], "options": dict(pipeline.get("options", {}))}
    raise OptionsError(
        "pipeline", 'a Broadway subclass, an instance of one, or "pkg.module:Class"', pipeline
    )


def class_path(cls: type[Broadway]) -> str:
    """``"pkg.module:Class"``; for a class of a Dag file ``"dag-file/<stem>:Class"``.

    :raises OptionsError: If the class is local to a function, or of ``__main__``.
    """
    if "<locals>" in cls.__qualname__ or cls.__module__ == "__main__":
        raise OptionsError(
            "pipeline",
            "a class at the top level of an importable module (other processes import it by name)",
            f"{cls.__module__}:{cls.__qualname__}",
        )
    found = _DAG_MODULE.fullmatch(cls.__module__)
    module = f"{_DAG_FILE}{found['stem']}" if found else cls.__module__
    return f"{module}:{cls.__qualname__}"


def is_dag_file(path: str) -> bool:
    """Whether a class path names a class of a Dag file, which no Spark driver can import."""
    return path.startswith(_DAG_FILE)


def import_class(path: str) -> type[Broadway]:
    """The class of a path made by :func:`class_path`.

    :raises PipelineError: If it cannot be imported, or is no pipeline.
    """
    module_name, _, qualname = path.partition(":")
    found: Any = _dag_module(module_name) if is_dag_file(path) else _import(module_name)
    for part in qualname.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise PipelineError(
                f"module {module_name!r} has no {qualname!r} (looked for the pipeline {path!r})"
            ) from None
    if not (isinstance(found, type) and issubclass(found, Broadway)):
        raise PipelineError(f"{path!r} is no subclass of airflow_broadway.Broadway: {found!r}")
    return found


def _import(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PipelineError(
            f"the pipeline's module {name!r} cannot be imported by {sys.executable}: {error}."
            " Install it there, or put it beside the Dag files in a module of its own"
        ) from error


def _dag_module(name: str) -> object:
    stem = name[len(_DAG_FILE) :]
    for known, module in list(sys.modules.items()):
        match = _DAG_MODULE.fullmatch(known)
        if match and match["stem"] == stem:
            return module
    raise PipelineError(
        f"the Dag file {stem!r} is not loaded in this process; move the pipeline's class to a"
        " module of its own"
    )
