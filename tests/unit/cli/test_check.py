"""``airflow-broadway check``: what it prints, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.core.model.options import option, options
from airflow_broadway.core.model.rules import TEXT
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from tests.cli_runs import Ran, ran
from tests.unit.passing import Passing

Capsys = pytest.CaptureFixture[str]


@options
class CheckedProducer(Producer):
    kind: ClassVar[str] = "checked"
    results: ClassVar[dict[str, list[Finding] | Exception]] = {}

    name: str = option(default="queue", rule=TEXT, doc="The queue.")

    def shards(self) -> Sequence[Producer]:
        return [CheckedProducer(name=name) for name in self.results]

    def check(self, env: ProducerEnv) -> list[Finding]:
        assert env.pipeline == "Checked"
        result = self.results[self.name]
        if isinstance(result, Exception):
            raise result
        return result


class Checked(Passing):
    producer: Any = CheckedProducer()


class Embedded(Passing):
    producer = SqliteProducer(queue="orders", path="/nowhere/q.db")


class Unchecked(Passing):
    producer = Producer()


ERROR = Finding("error", "the queue 'orders' does not exist: create it")
WARNING = Finding("warning", "the limit of 3 deliveries is below 5 attempts: raise it")
NOTE = Finding("note", "policies are not visible without the tag management")


def checked(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys, *results: Any, arguments: Sequence[str] = ()
) -> Ran:
    by_name = {f"queue-{number}": result for number, result in enumerate(results)}
    monkeypatch.setattr(CheckedProducer, "results", by_name)
    return ran(capsys, "check", f"{__name__}:Checked", *arguments)


def test_findings_of_all_queues_are_printed_errors_first(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    done = checked(monkeypatch, capsys, [NOTE, WARNING], [WARNING, ERROR])

    assert done.code == 1
    assert done.out.splitlines() == [
        f"{each.level}: {each.text}" for each in (ERROR, WARNING, NOTE)
    ]


def test_a_run_can_begin_with_warnings(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    done = checked(monkeypatch, capsys, [WARNING], [])

    assert done.code == 0
    assert done.out.splitlines() == [f"warning: {WARNING.text}", "A run of Checked can begin."]


def test_json_has_level_and_text(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    done = checked(monkeypatch, capsys, [ERROR], arguments=["--json"])

    assert done.code == 1
    assert json.loads(done.out) == [{"level": "error", "text": ERROR.text}]


def test_a_refusal_is_an_error_and_other_queues_are_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    done = checked(monkeypatch, capsys, ProducerError("access denied to queue-0"), [WARNING])

    assert done.code == 1
    assert done.out.splitlines() == ["error: access denied to queue-0", f"warning: {WARNING.text}"]


def test_a_broker_out_of_reach_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    done = checked(monkeypatch, capsys, ProducerUnavailable("broker:5672 cannot be reached"))

    assert (done.code, done.out) == (2, "")
    assert "broker:5672 cannot be reached" in done.err


def test_an_embedded_queue_is_checked(tmp_path: Path, capsys: Capsys) -> None:
    SqliteQueue(tmp_path / "q.db", "orders").create()

    def check(queue: str, file: str = "q.db") -> Ran:
        producer = {"queue": queue, "path": str(tmp_path / file)}
        reference = {"class": f"{__name__}:Embedded", "options": {"producer": producer}}
        return ran(capsys, "check", json.dumps(reference))

    fine, misspelt, missing = check("orders"), check("ordres"), check("orders", "none.db")

    assert (fine.code, fine.out) == (0, "A run of Embedded can begin.\n")
    assert misspelt.code == 1
    assert "has no queue 'ordres'; it has ['orders']" in misspelt.out
    assert missing.code == 1
    assert f"error: there is no queue file {tmp_path / 'none.db'}, " in missing.out


def test_a_producer_without_checks_says_so(capsys: Capsys) -> None:
    done = ran(capsys, "check", f"{__name__}:Unchecked")

    assert done.code == 0
    assert "note: Producer has nothing that can be checked" in done.out
