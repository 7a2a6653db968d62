"""``airflow-broadway depth``: what waits for pipelines, with the reason where nobody knows."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from tests.cli_runs import ran

Capsys = pytest.CaptureFixture[str]
MODULE = """
from airflow_broadway import Broadway
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.model.options import options
from airflow_broadway.producers.sqlite import SqliteProducer


class Orders(Broadway):
    producer = SqliteProducer(queue="orders", path={path!r})

    def handle_message(self, processor, message, context):
        return message


class Elsewhere(Orders):
    name = "elsewhere"
    producer = SqliteProducer(queue="orders", path={path!r} + ".not-here")


class Templated(Orders):
    producer = SqliteProducer(queue="{{{{ params.queue }}}}", path={path!r})


@options
class Broken(Producer):
    def depth(self, env):
        raise RuntimeError("amqp://user:secret@host")


class Breaking(Orders):
    producer = Broken()
"""


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SqliteQueue:
    """The queue of pipelines that can be imported, with two messages."""
    path = str(tmp_path / "queue.db")
    (tmp_path / "waiting_shop.py").write_text(MODULE.format(path=path))
    (tmp_path / "leaving_shop.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("waiting_shop", "leaving_shop"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{tmp_path}/staging")
    made = SqliteQueue(path, "orders")
    made.send([b"1", b"2"])
    return made


def test_what_waits_is_told_and_nothing_is_taken(queue: SqliteQueue, capsys: Capsys) -> None:
    for _ in range(2):
        done = ran(capsys, "depth", "--pipeline", "waiting_shop:Orders", "--json")
        assert (done.code, done.err) == (0, "")
        [found] = done.json
        assert found.pop("oldest_age") >= 0
        assert found == {
            "reference": "waiting_shop:Orders",
            "pipeline": "Orders",
            "broker": "sqlite",
            "ready": 2,
            "delayed": 0,
            "leased": 0,
            "dead": 0,
            "unknown": "",
        }
    assert "Orders" in ran(capsys, "depth", "--pipeline", "waiting_shop:Orders").out


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("waiting_shop:Elsewhere", "the broker does not report the depth"),
        ("waiting_shop:Templated", "has the template queue="),
        ("waiting_shop:Breaking", "RuntimeError was raised"),
        ("leaving_shop:Orders", "SystemExit was raised"),
        ("no_such_shop:Orders", "no_such_shop"),
    ],
)
def test_what_is_not_known_of_one_is_never_0_and_hides_no_other(
    queue: SqliteQueue, capsys: Capsys, reference: str, why: str
) -> None:
    done = ran(
        capsys, "depth", "--pipeline", reference, "--pipeline", "waiting_shop:Orders", "--json"
    )
    assert done.code == 1
    unknown, known = done.json
    assert why in unknown["unknown"]
    assert {unknown[name] for name in ("ready", "leased", "dead", "oldest_age")} == {None}
    assert known["ready"] == 2
    assert "secret" not in done.out + done.err
    assert "is not known: " in ran(capsys, "depth", "--pipeline", reference).out


def test_a_broker_that_keeps_silent_is_waited_for_no_longer_than_told(
    queue: SqliteQueue, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(SqliteProducer, "depth", lambda *_: over.wait(30))
    try:
        done = ran(
            capsys, "depth", "--pipeline", "waiting_shop:Orders", "--timeout", "0.05", "--json"
        )
    finally:
        over.set()
    assert (done.code, done.json[0]["ready"]) == (1, None)
    assert done.json[0]["unknown"] == "the broker did not answer within 0.05 s"


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "inf", "nan"])
def test_a_time_out_is_seconds_above_0(capsys: Capsys, seconds: str) -> None:
    done = ran(capsys, "depth", "--pipeline", "waiting_shop:Orders", "--timeout", seconds)
    assert done.code == 2
    assert "expected seconds above 0" in done.err
