"""Bad input and a broken world: one clear error each, nothing lost, nothing half-done."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_broadway import Processors
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.producers.sqlite import SqliteProducer
from scripts.airflow_env import ROOT
from tests.integration.pipelines.puppets import Puppets
from tests.integration.pipelines.running import Ran, World

pytestmark = pytest.mark.airflow

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    Puppets.calls.clear()
    Puppets.runs.clear()
    made = World(tmp_path, monkeypatch)
    yield made
    made.queue.close()


def dag_of(pipeline: Any, **given: Any) -> DAG:
    made: DAG = pipeline.dag("bad", **{"default_args": {"retries": 0}, **given})
    return made


def figures(world: World, name: str = "figures_pipeline:Figures", **options: Any) -> Any:
    """A Spark pipeline, importable as a module of its own."""
    from airflow_broadway.core.reference import import_class

    world.patch.syspath_prepend(ROOT / "tests" / "integration" / "pipelines" / "spark")
    return import_class(name)(context={"output": str(world.folder / "output")}, **options)


def check_untouched(world: World, ran: Ran, count: int) -> None:
    """The run is red, and every message is where it was."""
    assert ran.state == "failed"
    assert world.depth == (count, 0, 0, 0)
    assert world.queue.leases() == []
    assert [message.attempt for message in world.queue.receive("look", count)] == [1] * count


# ----------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("build", "path", "told"),
    [
        (
            lambda: Puppets(producer={"leese": 3}),
            "producer.leese",
            r"unknown option 'producer.leese' \(value 3\), valid options are: \[.*'lease'.*\];"
            r" did you mean 'lease'\?",
        ),
        (
            lambda: Puppets(batchers={"default": {"batch_size": "many"}}),
            "batchers.default.batch_size",
            r"invalid value for option 'batchers.default.batch_size': expected a positive integer.*"
            r"got: 'many'",
        ),
        (
            lambda: Puppets(batchers={"defualt": {"batch_size": 3}}),
            "batchers.defualt",
            r"valid options are: \['default', 'other'\]; did you mean 'default'\?",
        ),
        (
            lambda: SqliteProducer(queue="q", conn_id="c", on_failure="forget"),
            "SqliteProducer.on_failure",
            r"expected one of \['ack', 'dead_letter', 'noop', 'retry'\], got: 'forget'",
        ),
        (
            lambda: Processors(concurrency=0),
            "Processors.concurrency",
            r"expected a positive integer, got: 0",
        ),
        (
            lambda: Puppets(batchers={"default": {"schema": "n lonk"}}),
            "batchers.default.schema",
            r"lonk",
        ),
        (
            lambda: Puppets.dag("bad", process={"max_messages": 0}),
            "process.max_messages",
            r"expected a positive integer or None, got: 0",
        ),
    ],
)
def test_an_option_that_is_wrong_is_an_error_with_path_value_and_cure(
    build: Any, path: str | None, told: str
) -> None:
    from airflow_broadway.core.errors import BroadwayError

    with pytest.raises(BroadwayError, match=told) as raised:
        build()

    if path is not None:
        assert isinstance(raised.value, OptionsError)
        assert raised.value.path == path


def test_a_param_that_is_wrong_stops_the_run_before_it_receives(
    world: World, capsys: Capture
) -> None:
    world.numbers(range(3))
    dag = dag_of(Puppets, params={"max_messages": "many"})

    ran = world.run(dag)

    check_untouched(world, ran, 3)
    assert "expected a positive integer or None, got: 'many'" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------- messages


def test_callbacks_that_misbehave_fail_their_own_messages(world: World) -> None:
    world.send(
        {"n": 1, "process": "wrong"},
        {"n": 2, "process": "raise"},
        {"n": 3, "to": "nowhere"},
        b'{"n": 4, "text": "\xff\xfe"}',
        b"no JSON",
        {"n": 6},
    )
    policy = {"retry": {"max_attempts": 1}}

    ran = world.run(dag_of(Puppets(producer=policy)))

    # The neighbour goes on, and each dead letter says what was wrong with it.
    assert ran.state == "success"
    assert ran.totals == {
        "received": 6, "failed": 5, "acked": 1, "dead_lettered": 5, "accounted": 6
    }  # fmt: skip
    reasons = [letter.reason for letter in world.queue.dead_letters()]
    assert "expected a Message from handle_message, got: 'no message, but 1'" in reasons[0]
    assert reasons[1] == "ValueError: raised on 2"
    assert "unknown batcher 'nowhere'. The known batchers are ['default', 'other']" in reasons[2]
    assert reasons[3].startswith("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff")
    assert reasons[4].startswith("JSONDecodeError")
    # Bytes come back as they were sent.
    assert world.queue.dead_letters()[3].body == b'{"n": 4, "text": "\xff\xfe"}'


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("raise", "ValueError: raised on a batch of 4"),
        (
            "wrong",
            "PipelineError: handle_batch must return a list of messages, got: {'no': 'list'}",
        ),
    ],
)
def test_a_batch_callback_that_misbehaves_fails_its_own_batch(
    world: World, word: str, reason: str
) -> None:
    world.numbers(range(4), batch=word, to="other")
    world.numbers(range(4, 10))

    ran = world.run(dag_of(Puppets(producer={"retry": {"max_attempts": 1}})))

    assert ran.state == "success"
    assert ran.totals == {
        "received": 10, "failed": 4, "acked": 6, "dead_lettered": 4, "accounted": 10
    }  # fmt: skip
    assert world.reasons() == dict.fromkeys(range(4), reason)


def test_a_batch_callback_that_returns_a_stranger_settles_only_its_own(world: World) -> None:
    world.numbers(range(4), batch="stranger")

    ran = world.run(dag_of(Puppets))

    # The one that it did not return is released.
    assert ran.totals == {"received": 4, "acked": 3, "released": 1, "accounted": 4}
    assert world.depth == (1, 0, 0, 0)


def test_data_that_fits_no_schema_fails_with_column_and_value(world: World) -> None:
    # Given messages of which some fit the columns; no Spark starts, for its connection is missing
    world.send(
        {"n": "seven"},
        {"n": 2**70},
        {"n": None},
        {"n": 1, "price": "12.5"},
        {"n": 2.5},
        {"n": 5},
    )

    ran = world.run(dag_of(figures(world), spark={"conn_id": "nowhere"}))

    # Then the others went on to their batch
    assert ran.states["batch.default"] == "success"
    assert ran.xcom("batch.default")["messages"] == 1
    reasons = [letter.reason for letter in world.queue.dead_letters()]
    assert len(reasons) == 5
    told = [
        ("n:", "'seven'"),
        ("n:", str(2**70)),
        ("n:", "null"),
        ("price:", "'12.5'"),
        ("n:", "2.5"),
    ]
    for reason, parts in zip(reasons, told, strict=True):
        assert all(part in reason for part in parts), reason
    assert world.depth == (1, 0, 0, 5)


def test_a_message_larger_than_a_batch_and_a_receive_goes_through_alone(world: World) -> None:
    # Given one message beyond what a receive takes at a time, among small ones
    large = b'{"n": 1, "text": "' + b"x" * (65 * 1024 * 1024) + b'"}'
    world.send({"n": 0}, large, {"n": 2})

    ran = world.run(dag_of(Puppets(batchers={"default": {"batch_bytes": 1000}})))

    assert ran.state == "success"
    assert [call[3] for call in Puppets.calls] == [[0], [1], [2]]
    assert ran.totals == {"received": 3, "acked": 3, "accounted": 3}


# ------------------------------------------------------------------------------------- connections


@pytest.mark.parametrize(
    ("connection", "told"),
    [
        (None, "the Airflow connection 'puppets' is not defined; add it under Admin"),
        ({"conn_type": "mysql", "host": "db"}, "'puppets' is of type 'mysql'; an embedded queue"),
        ({"conn_type": "broadway_sqlite", "host": "queue.db"}, "its host must be an absolute path"),
        (
            {"conn_type": "broadway_sqlite", "host": "/nowhere/queue.db"},
            "/nowhere",
        ),
    ],
    ids=["missing", "of another type", "a relative path", "a folder that is not there"],
)
def test_a_connection_that_is_wrong_stops_the_run_before_it_receives(
    world: World, capsys: Capture, connection: dict[str, Any] | None, told: str
) -> None:
    world.numbers(range(3))
    if connection is None:
        world.patch.delenv("AIRFLOW_CONN_PUPPETS")
    else:
        world.connect("puppets", connection)

    ran = world.run(dag_of(Puppets))

    assert told in capsys.readouterr().out
    assert ran.states["process[0]"] == "failed"
    check_untouched(world, ran, 3)


def test_a_spark_connection_that_is_missing_starts_nothing_elsewhere(
    world: World, capsys: Capture
) -> None:
    world.numbers(range(3))

    ran = world.run(dag_of(figures(world), spark={"conn_id": "nowhere"}))

    assert "the Spark connection 'nowhere' is not defined" in capsys.readouterr().out
    assert ran.states["handle_batches"] == "failed"
    check_untouched(world, ran, 3)


# ------------------------------------------------------------------------------------------- Spark


def test_without_java_the_task_says_so_and_gives_back(world: World, capsys: Capture) -> None:
    world.numbers(range(3))
    world.connect("spark_default", {"conn_type": "spark", "host": "local[2]"})
    world.patch.setenv("JAVA_HOME", str(world.folder / "no-java"))

    ran = world.run(dag_of(figures(world)))

    told = capsys.readouterr().out
    assert f"JAVA_HOME is '{world.folder / 'no-java'}', but there is no program" in told
    check_untouched(world, ran, 3)


def test_a_pipeline_that_spark_cannot_import_is_told_before_spark_starts(
    world: World, capsys: Capture
) -> None:
    world.numbers(range(3))
    world.connect("spark_default", {"conn_type": "spark", "host": "local[2]"})

    ran = world.run(dag_of(figures(world, "unshippable_pipeline:Unshippable")))

    told = capsys.readouterr().out
    assert "Spark could not import the pipeline unshippable_pipeline:Unshippable" in told
    assert "a_module_that_only_the_worker_has" in told
    assert "Spark-Submit cmd" not in told
    check_untouched(world, ran, 3)


@pytest.mark.spark
@pytest.mark.timeout(240)
def test_one_bad_row_of_spark_spares_the_others(world: World) -> None:
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


@pytest.mark.parametrize("root", ["/proc/nowhere", "{file}/below"], ids=["read-only", "no folder"])
def test_a_staging_root_that_cannot_be_written_stops_the_run_before_it_receives(
    world: World, capsys: Capture, root: str
) -> None:
    world.numbers(range(3))
    (world.folder / "file").write_text("in the way")
    place = root.format(file=world.folder / "file")
    world.patch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{place}")

    ran = world.run(dag_of(Puppets))

    told = capsys.readouterr().out
    assert place in told
    assert "[broadway] staging" in told
    check_untouched(world, ran, 3)


def test_a_staging_root_that_is_no_uri_is_told(world: World, capsys: Capture) -> None:
    world.numbers(range(3))
    world.patch.setenv("AIRFLOW__BROADWAY__STAGING", "/data/broadway")

    ran = world.run(dag_of(Puppets))

    assert "the staging root '/data/broadway' is no URI" in capsys.readouterr().out
    check_untouched(world, ran, 3)


@pytest.fixture
def small_disk(world: World) -> Iterator[Path]:
    disk = world.folder / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let root mount")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_staging_disk_that_fills_up_gives_everything_back(
    world: World, capsys: Capture, small_disk: Path
) -> None:
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
