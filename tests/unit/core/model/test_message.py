from __future__ import annotations

from airflow_broadway.core.model.message import Status


def test_a_reason_that_no_file_takes_is_told_by_its_escape() -> None:
    assert Status("failed", "Bob \ud83d").text == "Bob \\ud83d"
    assert Status("error", ValueError("\udcff")).text == "ValueError: \\udcff"
