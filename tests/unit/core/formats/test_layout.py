"""Files that are not what this release writes are refused with one clear error."""

from __future__ import annotations

import pytest

from airflow_broadway.core.errors import StagingDamaged, StagingError
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.work import Work


@pytest.mark.parametrize("kind", [Manifest, Outcome, Work])
@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"version": 1}', '{"version": 1, "x": 2}'])
def test_what_is_no_such_file_is_damaged(kind: type[Manifest | Outcome | Work], text: str) -> None:
    with pytest.raises(StagingDamaged, match=r"^a/b\.json is damaged \("):
        kind.loads(text, "a/b.json")


@pytest.mark.parametrize("version", ["2", "null", '"1"'])
def test_a_file_of_a_newer_release_is_refused_with_the_cure(version: str) -> None:
    with pytest.raises(StagingError, match=r"^a/b\.json has format version .*a newer one$"):
        Outcome.loads(f'{{"version": {version}}}', "a/b.json")
