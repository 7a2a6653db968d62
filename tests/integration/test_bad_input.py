"""Invalid input and broken infrastructure: one clear error each, no loss, no partial work."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from typing import Any

import pytest
from airflow.sdk import DAG

from scripts.airflow_env import ROOT
from tests.integration.pipelines.puppets import Puppets
from tests.integration.pipelines.running import Ran, World

pytestmark = pytest.mark.airflow

Capture = pytest.CaptureFixture[str]


def dag_of(pipeline: Any, **options: Any) -> DAG:
    dag: DAG = pipeline.dag("bad", **{"default_args": {"retries": 0}, **options})
    return dag


def figures(world: World, **options: Any) -> Any:
    """Returns a Spark pipeline that is importable as a module of its own."""
    from airflow_broadway.core.reference import import_class

    world.patch.syspath_prepend(ROOT / "tests" / "integration" / "pipelines" / "spark")
    pipeline = import_class("figures_pipeline:Figures")
    return pipeline(context={"output": str(world.folder / "output")}, **options)


def check_untouched(world: World, ran: Ran, count: int) -> None:
    """Checks that the run failed, and every message is ready and undelivered."""
    assert ran.state == "failed"
    assert world.depth == (count, 0, 0, 0)
    assert world.queue.leases() == []
    assert [message.attempt for message in world.queue.receive("look", count)] == [1] * count


# ----------------------------------------------------------------------------------------- options


def test_an_invalid_param_fails_before_the_first_receive(world, capsys):
    world.numbers(range(3))
    dag = dag_of(Puppets, params={"max_messages": "many"})

    ran = world.run(dag)

    check_untouched(world, ran, 3)
    assert "expected a positive integer or None, got: 'many'" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------- messages


def test_an_oversized_message_is_handled_alone(world):
    # Given one message above the limit of a receive, among small ones
    large = b'{"n": 1, "text": "' + b"x" * (65 * 1024 * 1024) + b'"}'
    world.send({"n": 0}, large, {"n": 2})

    ran = world.run(dag_of(Puppets(batchers={"default": {"batch_bytes": 1000}})))

    assert ran.state == "success"
    assert [call[3] for call in Puppets.calls] == [[0], [1], [2]]
    assert ran.totals == {"received": 3, "acked": 3, "accounted": 3}


# ------------------------------------------------------------------------------------- connections


@pytest.mark.parametrize(
    ("connection", "result"),
    [
        (None, "the Airflow connection 'puppets' is not defined; add it under Admin"),
        ({"conn_type": "mysql", "host": "db"}, "'puppets' is of type 'mysql'; an embedded queue"),
        ({"conn_type": "broadway_sqlite", "host": "queue.db"}, "its host must be an absolute path"),
        ({"conn_type": "broadway_sqlite", "host": "/nowhere/queue.db"}, "/nowhere"),
    ],
    ids=["missing", "of another type", "a relative path", "a missing folder"],
)
def test_an_invalid_connection_fails_before_the_first_receive(world, capsys, connection, result):
    world.numbers(range(3))
    if connection is None:
        world.patch.delenv("AIRFLOW_CONN_PUPPETS")
    else:
        world.connect("puppets", connection)

    ran = world.run(dag_of(Puppets))

    assert result in capsys.readouterr().out
    assert ran.states["process[0]"] == "failed"
    check_untouched(world, ran, 3)


# ------------------------------------------------------------------------------------------- Spark


@pytest.mark.spark
@pytest.mark.timeout(240)
def test_one_bad_row_of_spark_spares_the_others(world):
    """Two producers, two Spark batchers, failures in both stages: one application for all."""
    import pyarrow.dataset as ds

    world.connect("spark_default", {"conn_type": "spark", "host": "local[2]"})
    world.send({"n": "bad"}, *({"n": n, "price": n + 0.25} for n in range(1, 30)))
    world.numbers(range(30, 40), to="other")

    pipeline = figures(world, producer={"concurrency": 2})
    ran = world.run(dag_of(pipeline, process={"max_messages": 20}))

    assert ran.state == "success"
    assert ran.totals == {
        "received": 40, "failed": 6, "acked": 34, "dead_lettered": 6, "accounted": 40
    }  # fmt: skip
    reasons: dict[Any, str] = dict(world.reasons())
    assert "'bad'" in reasons.pop("bad")
    assert reasons == dict.fromkeys((7, 14, 21, 28, 35), "divisible by seven")
    folder = world.folder / "output" / "default"
    rows = ds.dataset(folder, partitioning="hive").to_table().sort_by("n").to_pylist()
    assert [(row["n"], row["price"]) for row in rows] == [(n, n + 0.25) for n in range(1, 30)]
    handled = ran.xcom("handle_batches")
    assert (handled["batches"], handled["messages"], handled["failed_messages"]) == (4, 39, 5)


# ----------------------------------------------------------------------------------------- staging


@pytest.mark.parametrize(
    ("root", "result"),
    [
        ("file:///proc/nowhere", ("/proc/nowhere", "[broadway] staging")),
        ("file://{folder}/file/below", ("{folder}/file/below", "[broadway] staging")),
        ("/data/broadway", ("the staging root '/data/broadway' is not a URI",)),
    ],
    ids=["read-only", "no folder", "no URI"],
)
def test_an_unwritable_staging_root_fails_before_the_first_receive(world, capsys, root, result):
    world.numbers(range(3))
    (world.folder / "file").write_text("in the way")
    world.patch.setenv("AIRFLOW__BROADWAY__STAGING", root.format(folder=world.folder))

    ran = world.run(dag_of(Puppets))

    out = capsys.readouterr().out
    assert [text for text in result if text.format(folder=world.folder) not in out] == []
    check_untouched(world, ran, 3)


@pytest.fixture
def small_disk(world):
    disk = world.folder / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let root mount")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_staging_disk_releases_all_messages(world, capsys, small_disk):
    # Given 1 MB of messages that do not compress, and less room
    chance = random.Random(1)
    world.numbers(range(1000), text=chance.randbytes(10).hex())
    world.send(*({"n": n, "text": chance.randbytes(500).hex()} for n in range(1000, 3000)))
    world.patch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{small_disk}")

    ran = world.run(dag_of(Puppets))

    assert "no space is left on its disk" in capsys.readouterr().out
    assert ran.state == "failed"
    assert world.depth == (3000, 0, 0, 0)
    assert world.queue.leases() == []
    assert Puppets.calls == []
