"""The queues of a pipeline for read-only use, without user code and secrets.

A trigger is stored as JSON and runs in a process without the users' modules.  So it gets the
producer's class and options, except functions, which reading a depth never calls.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pkgutil import resolve_name
from typing import Any

from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import OptionsError, PipelineError
from airflow_broadway.core.masking import HIDDEN, shown
from airflow_broadway.core.model.options import Options, build, is_template
from airflow_broadway.core.model.rules import JSON
from airflow_broadway.core.pipeline import Pipeline

#: The modules of this package's producers.
_OWN = "airflow_broadway.producers."
#: Options of every producer that do not affect the depth and may have values of any type.
_SETTLING = frozenset({"on_success", "on_failure", "rate_limiting", "retry", "transformer"})


@dataclasses.dataclass
class WatchedQueues:
    """The queues that a pipeline's producers consume.

    :param pipeline: The pipeline's name.
    :param producers: One for each queue.
    """

    pipeline: str
    producers: Sequence[Producer]

    @classmethod
    def of(cls, pipeline: Pipeline) -> WatchedQueues:
        """Returns the queues of a pipeline."""
        return cls(pipeline.name, pipeline.producer.shards())

    @property
    def reports_oldest_age(self) -> bool:
        """Whether the brokers may report the age of the oldest message."""
        return all(producer.reports_oldest_age for producer in self.producers)

    @property
    def lag(self) -> float:
        """Staleness of the depth in seconds."""
        return max(producer.depth_staleness for producer in self.producers)

    def dumps(self) -> str:
        """Returns JSON for :meth:`loads`, validated by loading it.

        :raises OptionsError: If an option holds a secret or a template, or is not JSON.
        """
        queues = [
            {"producer": _class_path(type(queue)), "options": dict(_options(queue, "producer"))}
            for queue in self.producers
        ]
        value = {"pipeline": self.pipeline, "lag": self.lag, "queues": queues}
        text = json.dumps(value, sort_keys=True)
        self.loads(text)
        return text

    @classmethod
    def loads(cls, text: str, *, own: bool = False) -> WatchedQueues:
        """Parses the output of :meth:`dumps`.

        :param own: Whether to import only producers of this package, and to reject options that
            make their clients load or run code.
        :raises PipelineError: If a producer's class cannot or must not be imported here.
        :raises OptionsError: If an option breaks its rule.
        """
        value = json.loads(text)
        producers = [
            build(_import(queue["producer"], own=own), queue["options"], "producer", rendered=True)
            for queue in value["queues"]
        ]
        unsafe = [name for producer in producers for name in producer.unsafe_options()]
        if own and unsafe:
            raise PipelineError(
                f"the producer's options {', '.join(dict.fromkeys(unsafe))} can have its client"
                " read a file, load a library or run a command, which is not done here: put them"
                " into the connection, or use `airflow-broadway` where a worker runs"
            )
        return cls(value["pipeline"], producers)

    def depth(self, env: ProducerEnv) -> QueueDepth | None:
        """Returns the total depth; ``None`` if a broker does not report it.

        :raises BroadwayError: If a broker cannot be reached.
        """
        reported = [producer.depth(env) for producer in self.producers]
        depths = [depth for depth in reported if depth is not None]
        if len(depths) < len(reported) or not depths:
            return None
        waiting = [depth.oldest_age for depth in depths if depth.ready]
        ages = [age for age in waiting if age is not None]
        counts = {
            name: sum(getattr(depth, name) for depth in depths)
            for name in ("ready", "delayed", "leased", "dead")
        }
        # A message of unknown age may be the oldest.
        known = ages and len(ages) == len(waiting)
        return QueueDepth(**counts, oldest_age=max(ages) if known else None)


def _options(options: Options, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the options that differ from their defaults, in the format of :func:`build`."""
    derived = getattr(options, "_auto", ())
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        value, where = getattr(options, field.name), f"{path}.{field.name}"
        if field.name in _SETTLING or field.name in derived or callable(value):
            continue
        if isinstance(value, Options):
            yield field.name, dict(_options(value, where))
        elif value != field.default:
            _check(value, where)
            yield field.name, value


def _check(value: object, where: str) -> None:
    if is_template(value):
        raise OptionsError(where, "no template: a watched queue has no run to render it", value)
    if HIDDEN in shown(value):
        raise OptionsError(where, "no secret, for a trigger is stored: give it by conn_id", value)
    if not JSON.holds(value):
        raise OptionsError(where, f"{JSON.text} (a trigger is stored)", value)


def _class_path(cls: type[Producer]) -> str:
    if "<locals>" in cls.__qualname__ or cls.__module__.startswith(("__main__", "unusual_prefix_")):
        raise OptionsError(
            "producer",
            "a class of an importable module (the triggerer imports it by name)",
            f"{cls.__module__}:{cls.__qualname__}",
        )
    return f"{cls.__module__}:{cls.__qualname__}"


def _import(path: str, *, own: bool) -> type[Producer]:
    if own and not path.startswith(_OWN):
        raise PipelineError(
            f"the producer {path!r} is not one of this package, and no other code runs here: list"
            " its dead letters with `airflow-broadway dead-letters` where a worker runs"
        )
    try:
        cls = resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise PipelineError(
            f"the producer {path!r} cannot be imported here: {error}; install its module where the"
            " triggerer runs"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Producer)):
        raise PipelineError(f"{path!r} is no producer")
    return cls
