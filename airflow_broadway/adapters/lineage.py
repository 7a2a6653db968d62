"""Reports queues, tables and counts of tasks to OpenLineage.

Nothing is resolved unless Airflow's OpenLineage provider is installed and has a transport.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.adapters.assets import dataset_of
from airflow_broadway.adapters.connections import AirflowConnections
from airflow_broadway.adapters.host import is_supervised
from airflow_broadway.adapters.tracing import set_counts
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.model.connections import Connections
from airflow_broadway.core.model.run_source import RunSource
from airflow_broadway.core.reference import import_class

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors.base import OperatorLineage

    from airflow_broadway.core.pipeline import Pipeline

log = logging.getLogger(__name__)

#: The provider's plugin loads it where OpenLineage is configured.
_LISTENER: Final = "airflow.providers.openlineage.plugins.listener"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The datasets of a task, as namespace and name, and its counts."""

    pipeline: str
    inputs: Collection[tuple[str, str]] = ()
    outputs: Collection[tuple[str, str]] = ()
    counts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        connections: Connections,
        batchers: Collection[str],
        *,
        asks_broker: bool = True,
        counts: Mapping[str, Any],
    ) -> Lineage:
        """Resolves the queues of a pipeline, and the sinks of some of its batchers.

        :param asks_broker: Whether the messages came from the queue.
        :raises BroadwayError: If a connection is missing.
        """
        env = ProducerEnv(pipeline=pipeline.name, connections=connections)
        sinks = [pipeline.batchers[name].sink for name in batchers]
        uris = dict.fromkeys(sink.uri for sink in sinks if sink is not None)
        return cls(
            pipeline=pipeline.name,
            inputs=pipeline.producer.datasets(env) if asks_broker else (),
            outputs=[dataset_of(uri, connections) for uri in uris],
            counts={k: v for k, v in counts.items() if isinstance(v, (int, dict))},
        )


class LineageMixin:
    """The methods of an operator that Airflow's OpenLineage provider calls, in a fork of the task.

    A task reports what :func:`report_execution` recorded; before that, what its pipeline declares.
    """

    #: The pipeline's reference.
    pipeline: Any

    def _writing_batchers(self, pipeline: Pipeline) -> Collection[str]:
        """Returns the batchers whose sinks this task writes, or settles."""
        return pipeline.batchers

    def get_openlineage_facets_on_start(self) -> OperatorLineage[Any, Any]:
        """Returns the datasets of the task."""
        from airflow_broadway.adapters.facets import to_openlineage

        lineage = self.__dict__.get("_lineage")
        if lineage is None:
            pipeline = import_class(self.pipeline["class"])(**self.pipeline["options"])
            lineage = Lineage(pipeline=pipeline.name)
            if is_supervised():  # a fork could not look up connections
                batchers = self._writing_batchers(pipeline)
                lineage = Lineage.of(pipeline, AirflowConnections(), batchers, counts={})
        return to_openlineage(lineage.pipeline, lineage.inputs, lineage.outputs, lineage.counts)

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage[Any, Any]:
        """Returns the datasets of the task, and its counts."""
        return self.get_openlineage_facets_on_start()

    get_openlineage_facets_on_failure = get_openlineage_facets_on_complete


def report_execution(
    operator: LineageMixin,
    pipeline: Pipeline,
    connections: Connections,
    counts: Mapping[str, Any],
    source: Callable[[], RunSource],
) -> None:
    """Adds the counts of an operator's execution to its span, and records them with its datasets
    if OpenLineage is on.

    An error is logged only: lineage never fails a task.

    :param source: Returns the source of the messages.
    """
    set_counts(counts)
    if _LISTENER not in sys.modules:
        return
    try:
        operator.__dict__["_lineage"] = Lineage.of(
            pipeline,
            connections,
            operator._writing_batchers(pipeline),
            asks_broker=source().asks_broker,
            counts=counts,
        )
    except Exception as error:
        log.warning("The lineage of this task is not reported: %s", type(error).__name__)
