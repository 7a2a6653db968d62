"""Lineage in OpenLineage's classes; only its provider's calls load this module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attr
from airflow.providers.openlineage.extractors.base import OperatorLineage
from openlineage.client.facet_v2 import RunFacet, input_statistics_input_dataset
from openlineage.client.run import InputDataset, OutputDataset


@attr.define
class BroadwayRunFacet(RunFacet):
    """The counts of a task of a pipeline: the run facet ``broadway``.

    :param counts: Messages, by the names of the task's XCom; for ``ack`` by class, and ``batchers``
        with messages and batches of each batcher.
    """

    pipeline: str
    counts: Mapping[str, Any]


def to_openlineage(
    pipeline: str,
    inputs: Collection[tuple[str, str]],
    outputs: Collection[tuple[str, str]],
    counts: Mapping[str, Any],
) -> OperatorLineage[Any, Any]:
    """Converts a task's datasets and counts; a single input has the number of messages received."""
    facets = {}
    if "received" in counts and len(inputs) == 1:
        facets["inputStatistics"] = input_statistics_input_dataset.InputStatisticsInputDatasetFacet(
            rowCount=counts["received"]
        )
    return OperatorLineage(
        inputs=[
            InputDataset(namespace=namespace, name=name, inputFacets=facets)
            for namespace, name in inputs
        ],
        outputs=[OutputDataset(namespace=namespace, name=name) for namespace, name in outputs],
        run_facets={"broadway": BroadwayRunFacet(pipeline=pipeline, counts=counts)},
    )
