"""A producer may change or refuse its pipeline; its options are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from airflow_broadway import Processors
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.options import option, options
from airflow_broadway.core.model.rules import POSITIVE
from airflow_broadway.testing import DummyProducer
from tests.unit.passing import Passing


@options
class Bounded(DummyProducer):
    """Takes no more processors than its broker takes connections."""

    most: int = option(default=4, rule=POSITIVE, doc="Connections.")

    def prepare_for_start(self, pipeline: Any) -> Mapping[str, Any]:
        if pipeline.context == "refuse":
            raise OptionsError("context", "another one", pipeline.context)
        return {"processors": {"concurrency": min(self.most, pipeline.processors.concurrency)}}


class Orders(Passing):
    producer = Bounded()
    processors = Processors(concurrency=9)


def test_producer_may_replace_pipeline_options():
    assert Orders().processors.concurrency == 4
    assert Orders(processors={"concurrency": 2}).processors.concurrency == 2
    # The returned options are checked as well
    with pytest.raises(OptionsError, match=r"processors.*concurrency.*-1"):
        Orders(processors={"concurrency": -1})


def test_producer_may_refuse_the_pipeline():
    with pytest.raises(OptionsError, match="'context': expected another one, got: 'refuse'"):
        Orders(context="refuse")


def test_producer_options_are_checked_and_overridable():
    assert Orders(producer={"most": 3}).processors.concurrency == 3
    with pytest.raises(OptionsError, match=r"'producer\.most': expected .*, got: 0"):
        Orders(producer={"most": 0})
    with pytest.raises(OptionsError, match=r"unknown option 'producer\.mots'.*'most'"):
        Orders(producer={"mots": 1})
