"""The queues of a pipeline as whoever only looks at them needs them: no code of users, no secret.

A trigger is stored as JSON, and runs in a process that has none of the users' modules.  So it gets
the producer's class and options, less those that are functions: looking at a queue calls none.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator, Sequence
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
#: Options of every producer that no depth depends on, and whose values may be of any form.
_SETTLING = frozenset({"on_success", "on_failure", "rate_limiting", "retry", "transformer"})


class WatchedQueues:
    """The queues that a pipeline's producers drain.

    :param pipeline: The pipeline's name.
    :param producers: One for each queue.
    """

    def __init__(self, pipeline: str, producers: Sequence[Producer]) -> None:
        self.pipeline = pipeline
        self.producers = producers

    @classmethod
    def of(cls, pipeline: Pipeline) -> WatchedQueues:
        """Those of a pipeline."""
        return cls(pipeline.name, pipeline.producer.shards())

    @property
    def tells_age(self) -> bool:
        """Whether the age of the oldest message may be known."""
        return all(producer.tells_age for producer in self.producers)

    @property
    def lag(self) -> float:
        """Seconds by which what is known of them may be behind."""
        return max(producer.depth_lag for producer in self.producers)

    def dumps(self) -> str:
        """Return them as JSON that :meth:`loads` reads; checked by doing so.

        :raises OptionsError: If an option holds a secret or a template, or is no JSON.
        """
        queues = [
            {"producer": _class_path(type(each)), "options": dict(_plain(each, "producer"))}
            for each in self.producers
        ]
        value = {"pipeline": self.pipeline, "lag": self.lag, "queues": queues}
        text = json.dumps(value, sort_keys=True)
        self.loads(text)
        return text

    @classmethod
    def loads(cls, text: str, *, own: bool = False) -> WatchedQueues:
        """Read what :meth:`dumps` wrote.

        :param own: Whether producers of this package only are imported, and no option may have
            their clients load or run anything: no code of users.
        :raises PipelineError: If a producer's class cannot be imported here, or may not.
        :raises OptionsError: If an option breaks its rule.
        """
        value = json.loads(text)
        producers = [
            build(_import(each["producer"], own=own), each["options"], "producer", rendered=True)
            for each in value["queues"]
        ]
        if own:
            for each in producers:
                _refuse_unsafe(each)
        return cls(value["pipeline"], producers)

    def depth(self, env: ProducerEnv) -> QueueDepth | None:
        """How full they are together; ``None`` if a broker does not say.

        :raises BroadwayError: If a broker cannot be asked.
        """
        found = [producer.depth(env) for producer in self.producers]
        known = [each for each in found if each is not None]
        if len(known) < len(found) or not known:
            return None
        waiting = [each.oldest_age for each in known if each.ready]
        ages = [age for age in waiting if age is not None]
        return QueueDepth(
            ready=sum(each.ready for each in known),
            delayed=sum(each.delayed for each in known),
            leased=sum(each.leased for each in known),
            dead=sum(each.dead for each in known),
            # Of one unknown age nobody knows whether it is the oldest.
            oldest_age=max(ages) if ages and len(ages) == len(waiting) else None,
        )


def _plain(options: Options, path: str) -> Iterator[tuple[str, Any]]:
    """The options that differ from their defaults, as :func:`build` reads them."""
    derived = getattr(options, "_auto", ())
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        value, where = getattr(options, field.name), f"{path}.{field.name}"
        if field.name in _SETTLING or field.name in derived or callable(value):
            continue
        if isinstance(value, Options):
            yield field.name, dict(_plain(value, where))
        elif value != field.default:
            _check(value, where)
            yield field.name, value


def _check(value: object, where: str) -> None:
    if is_template(value):
        raise OptionsError(where, "no template: whoever watches a queue has no run", value)
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


def _refuse_unsafe(producer: Producer) -> None:
    names = producer.unsafe_options()
    if names:
        raise PipelineError(
            f"the producer's options {', '.join(names)} can have its client read a file, load a"
            " library or run a command, which is not done here: put them into the connection, or"
            " use `airflow-broadway` where a worker runs"
        )


def _import(path: str, *, own: bool) -> type[Producer]:
    module, _, name = path.partition(":")
    if own and not module.startswith(_OWN):
        raise PipelineError(
            f"the producer {path!r} is not one of this package, and no other code runs here: list"
            " its dead letters with `airflow-broadway dead-letters` where a worker runs"
        )
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise PipelineError(
            f"the producer {path!r} cannot be imported here: {error}; install its module where the"
            " triggerer runs"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Producer)):
        raise PipelineError(f"{path!r} is no producer")
    return found
