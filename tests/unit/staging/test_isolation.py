"""Batches that crashed processes are split only while the run holds their messages."""

from __future__ import annotations

import pytest

from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.staging.isolation import split
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.testing import ManualClock
from tests.unit.staging.kit import batches_of, open_run, pipeline_of, publish, stream


def test_batch_of_a_lapsed_lease_is_not_split(tmp_path):
    clock = ManualClock()
    run, pipeline = open_run(tmp_path, clock=clock), pipeline_of(b=Batcher(batch_size=6))
    generation = publish(run, pipeline, [stream(6)])
    plan = plan_batches(run, pipeline, "b", [generation], try_label="1")
    [batch] = batches_of(run, plan)

    clock.advance(900.0)
    with pytest.raises(LeaseLapsed):
        split(run, plan, batch, 2, by="test")
    assert [outcome for _, outcome in Recorded(run).outcomes(plan)] == [None]
