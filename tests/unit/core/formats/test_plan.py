"""The plan of a batcher: what is refused when it is read."""

from __future__ import annotations

import json

import pytest

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.formats.sums import sealed
from tests.unit.spark.plans import Planned, Staged, rows


@pytest.mark.parametrize(
    ("name", "value"),
    [("path", "../../../other"), ("path", "batches/other"), ("data", ["../../../other.parquet"])],
)
def test_plan_with_files_elsewhere_is_refused(tmp_path, name, value):
    staged = Staged(tmp_path)
    plan = staged.plan("default", [Planned("b0", rows(1))])
    file = tmp_path / plan.path / "plan.jsonl"
    head, *batches = file.read_text().splitlines()
    changed = sealed({**json.loads(head), name: value})  # who may write here may seal, too
    file.write_text("\n".join([changed, *batches]))
    with pytest.raises(StagingError, match="names files outside its folder"):
        BatchPlan.read(staged.files, plan.path)
