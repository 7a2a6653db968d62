"""``airflow-broadway check``: what it prints, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.core.model.options import option, options
from airflow_broadway.core.model.rules import TEXT
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from tests.cli_runs import Ran, ran
from tests.unit.passing import Passing


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


def checked(monkeypatch: Any, capsys: Any, *results: Any, arguments: Sequence[str] = ()) -> Ran:
    by_name = {f"queue-{number}": result for number, result in enumerate(results)}
    monkeypatch.setattr(CheckedProducer, "results", by_name)
    return ran(capsys, "check", "--pipeline", f"{__name__}:Checked", *arguments)


def test_errors_are_printed_before_warnings(monkeypatch, capsys):
    result = checked(monkeypatch, capsys, [NOTE, WARNING], [WARNING, ERROR])

    assert result.code == 1
    expected = [f"{finding.level}: {finding.text}" for finding in (ERROR, WARNING, NOTE)]
    assert result.out.splitlines() == expected


def test_warnings_do_not_stop_a_run(monkeypatch, capsys):
    result = checked(monkeypatch, capsys, [WARNING], [])

    assert result.code == 0
    assert result.out.splitlines() == [f"warning: {WARNING.text}", "A run of Checked can begin."]


def test_json_has_level_and_text(monkeypatch, capsys):
    result = checked(monkeypatch, capsys, [ERROR], arguments=["--json"])

    assert result.code == 1
    assert json.loads(result.out) == [{"level": "error", "text": ERROR.text}]


def test_refused_queue_is_an_error_and_others_are_checked(monkeypatch, capsys):
    result = checked(monkeypatch, capsys, ProducerError("access denied to queue-0"), [WARNING])

    assert result.code == 1
    assert result.out == f"error: access denied to queue-0\nwarning: {WARNING.text}\n"


def test_unreachable_broker_ends_with_code_2(monkeypatch, capsys):
    result = checked(monkeypatch, capsys, ProducerUnavailable("broker:5672 cannot be reached"))

    assert (result.code, result.out) == (2, "")
    assert "broker:5672 cannot be reached" in result.err


def test_embedded_queue_is_checked(tmp_path, capsys):
    SqliteQueue(tmp_path / "q.db", "orders").create()

    def check(queue, file="q.db"):
        producer = {"queue": queue, "path": str(tmp_path / file)}
        reference = {"class": f"{__name__}:Embedded", "options": {"producer": producer}}
        return ran(capsys, "check", "--pipeline", json.dumps(reference))

    fine, misspelt, missing = check("orders"), check("ordres"), check("orders", "none.db")

    assert (fine.code, fine.out) == (0, "A run of Embedded can begin.\n")
    assert misspelt.code == 1
    assert "has no queue 'ordres'; it has ['orders']" in misspelt.out
    assert missing.code == 1
    assert f"error: there is no queue file {tmp_path / 'none.db'}, " in missing.out


def test_producer_without_checks_gets_a_note(capsys):
    result = ran(capsys, "check", "--pipeline", f"{__name__}:Unchecked")

    assert result.code == 0
    assert "note: Producer has nothing that can be checked" in result.out
