"""Files that are not what this release writes are refused with one clear error."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

import pytest

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import StagingDamaged, StagingError
from airflow_broadway.core.formats.layout import load
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.formats.sums import sealed
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.version import __version__


@pytest.mark.parametrize("kind", [Manifest, Outcome, Work])
@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"version": 1}', '{"version": 1, "x": 2}'])
def test_unparsable_file_is_damaged(kind, text):
    with pytest.raises(StagingDamaged, match=r"^a/b\.json is damaged \("):
        kind.loads(text, "a/b.json")


@pytest.mark.parametrize("version", ["99", "null", '"1"'])
def test_newer_format_version_is_refused_with_the_cure(version):
    with pytest.raises(StagingError, match=r"^a/b\.json has format version .*a newer one$"):
        Outcome.loads(f'{{"version": {version}}}', "a/b.json")


def test_newer_file_names_its_release():
    newer = '{"version": 99, "release": "0.7.0", "new": 1}'
    use = r"use airflow-broadway 0\.7\.0, which wrote it"
    for kind in (Manifest, Outcome, BatchPlan):
        with pytest.raises(StagingError, match=use) as raised:
            load(kind, newer, "a/b.json")
        assert not isinstance(raised.value, StagingDamaged)


def test_unknown_field_is_ignored():
    outcome = Outcome(batch_id="b", batcher="default", plan="p", successful=1, failed=0)
    assert Outcome.loads(sealed({**asdict(outcome), "new": [1]}), "a/b.json") == outcome
    assert outcome.release == __version__

    lease = Lease(kind="k", generation="g", seconds=1.0, deadline=datetime.now(UTC))
    assert Lease.from_json({**lease.to_json(), "new": 1}) == lease
    report = SettleReport(acked=1)
    assert SettleReport.from_json({**report.to_json(), "new": 1}) == report
