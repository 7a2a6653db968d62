from __future__ import annotations

from airflow_broadway.core.model.message import Status


def test_unencodable_reason_is_escaped():
    assert Status("failed", "Bob \ud83d").text == "Bob \\ud83d"
    assert Status("error", ValueError("\udcff")).text == "ValueError: \\udcff"
