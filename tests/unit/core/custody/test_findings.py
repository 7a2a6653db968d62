"""Findings are logged by their level, and errors refuse a run."""

import logging

import pytest

from airflow_broadway.core.custody.findings import Finding, enforce
from airflow_broadway.core.errors import ProducerError

log = logging.getLogger("tests.findings")


def test_warnings_and_notes_are_logged(caplog):
    caplog.set_level(logging.INFO, log.name)

    enforce([Finding("warning", "the limit is 3"), Finding("note", "100 % unseen")], log)

    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert logged == [("WARNING", "the limit is 3"), ("INFO", "100 % unseen")]


def test_errors_raise_after_warnings_are_logged(caplog):
    errors = [Finding("error", "no queue"), Finding("error", "no dlq")]

    with pytest.raises(ProducerError) as refused:
        enforce([*errors, Finding("warning", "late")], log)

    assert str(refused.value) == "no queue (and 1 more: `airflow-broadway check`)"
    assert caplog.messages == ["late"]


def test_single_error_is_the_refusal():
    with pytest.raises(ProducerError, match=r"^no queue$"):
        enforce([Finding("error", "no queue")], log)
