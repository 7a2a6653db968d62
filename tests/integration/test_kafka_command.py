"""``airflow-broadway check`` of a consumer group of Kafka."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.producers.kafka import KafkaProducer
from tests.cli_runs import Ran, ran
from tests.kafka_fixtures import on_apache_kafka
from tests.kafka_group import KafkaGroup
from tests.kafka_server import KafkaServer, MockKafka
from tests.unit.passing import Passing

pytestmark = pytest.mark.broker

Capsys = pytest.CaptureFixture[str]


class Grouped(Passing):
    producer = KafkaProducer(group_id="{{ params.group }}", topics=["orders"])


class GroupCheck:
    """A consumer group, and the command ``check`` on it.

    :param root: The staging root.
    """

    def __init__(self, kafka: KafkaServer, root: Path, capsys: Capsys, **options: Any) -> None:
        root.mkdir(exist_ok=True)
        self.root, self.capsys = root, capsys
        self.group = KafkaGroup(kafka, root / "Grouped", **options)

    def check(self, staging: Path | None = None) -> Ran:
        group = self.group
        producer = {
            "group_id": group.group,
            "topics": [group.topic],
            "hosts": group.kafka.bootstrap,
            "conn_id": None,
            "offset_reset_policy": "earliest",
        }
        reference = {"class": f"{__name__}:Grouped", "options": {"producer": producer}}
        arguments = (
            "--pipeline",
            json.dumps(reference),
            "--staging",
            f"file://{staging or self.root}",
        )
        return ran(self.capsys, "check", *arguments)


@pytest.fixture
def group_check(kafka, tmp_path, capsys):
    return GroupCheck(kafka, tmp_path / "staging", capsys)


def test_an_unused_group_can_begin(group_check):
    group_check.group.fill(3)

    assert group_check.check().code == 0


def test_a_check_changes_nothing(group_check):
    group = group_check.group
    group.fill(5)
    group.drain()
    group.kafka.commit(group.group, group.topic, 0, 2)  # an operator's reset

    def files() -> list[str]:  # without the note of this host
        paths = [str(path) for path in group_check.root.rglob("*") if path.is_file()]
        return sorted(p for p in paths if "/hosts" not in p and ".broadway-root" not in p)

    before = files()
    committed = group.kafka.committed(group.group, group.topic)

    done = group_check.check()

    assert (done.code, "was reset from 5 to 2 by another program" in done.out) == (0, True)
    assert files() == before
    assert committed[0][0] == 2
    assert group.kafka.committed(group.group, group.topic) == committed  # its mark, too
    assert group.claim().start == 5


def test_a_check_reports_errors_that_would_fail_a_run(group_check, tmp_path):
    group = group_check.group
    group.fill(5)
    group.drain()
    (tmp_path / "other").mkdir()
    fine = group_check.check()
    group.fill(2)
    with group.source("at work") as source:
        assert group.take(source)
        foreign = group_check.check(staging=tmp_path / "other")
        source.stop()
        group.settle(source.lease, [])
    group.kafka.delete_topic(group.letters) if not isinstance(group.kafka, MockKafka) else None
    no_topic = group_check.check()

    assert (fine.code, fine.err) == (0, "")
    assert "can begin." in fine.out
    assert foreign.code == 0
    assert "by a run with another staging folder" in foreign.out
    if not isinstance(group.kafka, MockKafka):
        assert f"error: the dead-letter topic '{group.letters}' does not exist" in no_topic.out


@on_apache_kafka
def test_a_check_reports_members(group_check):
    group = group_check.group
    group.fill(1)
    with group.kafka.member(group.group, group.topic):
        done = group_check.check()

    assert done.code == 1
    assert "has 1 member (" in done.out


@on_apache_kafka
def test_a_check_reports_warnings_of_a_run(group_check):
    group = group_check.group
    group.fill(5)
    group.drain()
    group.fill(5, start=5)
    group.kafka.delete_before(group.topic, 0, 8)

    done = group_check.check()

    assert done.code == 0
    assert f"warning: 3 messages of {group.topic}-0 (5–7) were removed by retention" in done.out


def test_an_unreachable_cluster_is_one_clear_error(tmp_path, capsys):
    module = __name__
    reference = {
        "class": f"{module}:Grouped",
        "options": {
            "producer": {
                "group_id": "g",
                "hosts": "127.0.0.1:1",
                "conn_id": None,
                "settings": {"socket.timeout.ms": 1_000},
            }
        },
    }
    arguments = "--staging", f"file://{tmp_path}", "--pipeline", json.dumps(reference)
    done = ran(capsys, "check", *arguments)

    assert done.code == 1
    assert "cannot be reached" in done.out
