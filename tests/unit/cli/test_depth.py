"""``airflow-broadway depth``: the depth of queues, or the reason why it is unknown."""

from __future__ import annotations

import sys
import threading

import pytest

from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from tests.cli_runs import ORDERS_MODULE, ran

ORDERS = ("--pipeline", "waiting_shop:Orders")
MODULES = f"""
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.model.options import options
{ORDERS_MODULE}

class Elsewhere(Orders):
    name = "elsewhere"
    producer = SqliteProducer(queue="orders", path={{path!r}} + ".not-here")


@options
class Broken(Producer):
    def depth(self, env):
        raise RuntimeError("amqp://user:secret@host")


class Breaking(Orders):
    producer = Broken()
"""


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """The queue of importable pipelines, with two messages."""
    path = str(tmp_path / "queue.db")
    (tmp_path / "waiting_shop.py").write_text(MODULES.format(path=path))
    (tmp_path / "leaving_shop.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("waiting_shop", "leaving_shop"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{tmp_path}/staging")
    sqlite_queue = SqliteQueue(path, "orders")
    sqlite_queue.send([b"1", b"2"])
    return sqlite_queue


def test_depth_is_printed_and_nothing_is_received(queue, capsys):
    for _ in range(2):
        result = ran(capsys, "depth", *ORDERS, "--json")
        assert (result.code, result.err) == (0, "")
        [depth] = result.json
        assert depth.pop("oldest_age") >= 0
        place = {"reference": "waiting_shop:Orders", "pipeline": "Orders", "broker": "sqlite"}
        counts = {"ready": 2, "delayed": 0, "leased": 0, "dead": 0}
        assert depth == {**place, **counts, "unknown": ""}
    assert "Orders" in ran(capsys, "depth", *ORDERS).out


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
def test_unknown_depth_is_null_and_hides_no_other(queue, capsys, reference, why):
    both = ("--pipeline", reference, *ORDERS)
    result = ran(capsys, "depth", *both, "--json")
    assert result.code == 1
    unknown, known = result.json
    assert why in unknown["unknown"]
    assert {unknown[name] for name in ("ready", "leased", "dead", "oldest_age")} == {None}
    assert known["ready"] == 2
    assert "secret" not in result.out + result.err
    assert "is not known: " in ran(capsys, "depth", "--pipeline", reference).out


def test_silent_broker_is_cut_off_at_the_timeout(queue, capsys, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(SqliteProducer, "depth", lambda *_: over.wait(30))
    try:
        result = ran(capsys, "depth", *ORDERS, "--timeout", "0.05", "--json")
    finally:
        over.set()
    assert (result.code, result.json[0]["ready"]) == (1, None)
    assert result.json[0]["unknown"] == "the broker did not answer within 0.05 s"


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "inf", "nan"])
def test_timeout_is_positive_seconds(capsys, seconds):
    result = ran(capsys, "depth", *ORDERS, "--timeout", seconds)
    assert result.code == 2
    assert "expected seconds above 0" in result.err
