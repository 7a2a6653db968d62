"""Whole runs by ``dag.test()``: fast, in this process, on real custody and staging."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG

from airflow_broadway import Batcher, Message, Processors
from airflow_broadway.adapters.connections import AirflowConnections
from airflow_broadway.core.formats.record_batch import OpenBatch
from airflow_broadway.core.model.connections import to_variable
from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.operators.run import BroadwayRunOperator
from airflow_broadway.sensors.ack import BroadwayAckSensor
from tests.integration.pipelines.puppets import Plain, Puppets
from tests.integration.pipelines.slow import outlast_the_task

pytestmark = pytest.mark.airflow

NOTHING_BATCHED = {
    "process[0]": "success",
    "batch.default": "skipped",
    "batch.other": "skipped",
    "ack": "success",
}
NO_DELAY = {"retries": 0, "retry_delay": timedelta(0)}


def dag_of(pipeline: Any, **options: Any) -> DAG:
    """Returns its Dag, by default without retries."""
    options.setdefault("default_args", NO_DELAY)
    dag: DAG = pipeline.dag("puppets", **options)
    return dag


# ---------------------------------------------------------------------------------- the happy path


def test_every_message_is_handled_and_acknowledged_once(world):
    world.numbers(range(25))
    world.numbers(range(25, 30), to="other")

    ran = world.run(dag_of(Puppets))

    assert ran.state == "success"
    assert sorted(n for call in Puppets.calls for n in call[3]) == list(range(30))
    assert [len(call[3]) for call in Puppets.calls if call[1] == "default"] == [10, 10, 5]
    assert ran.totals == {"received": 30, "acked": 30, "accounted": 30}
    assert ran.report["balanced"] is True
    assert ran.xcom("ack")["acked"] == 30
    assert world.depth == (0, 0, 0, 0)
    assert world.queue.leases() == []


def test_two_hosts_without_a_shared_folder_fail_naming_both(world, capfd):
    # The process and batch tasks use one staging folder, the sensor another
    world.numbers(range(5))
    dag = dag_of(Puppets)
    ack: Any = dag.get_task("broadway.ack")
    ack.staging = f"file://{world.folder}/elsewhere"

    ran = world.run(dag)

    assert ran.states["batch.default"] == "success"
    assert ran.states["ack"] == "failed"
    reference = ran.xcom("process", 0)
    output = "".join(capfd.readouterr())
    assert f"lie under another staging root (id {reference['root_id']})" in output
    assert f"files written on host {reference['host']!r}" in output

    assert f"{world.folder}/elsewhere" in output
    assert "`[broadway] staging`" in output


def test_another_airflows_run_keeps_its_messages_until_its_lease_lapses(world, caplog):
    # A run without a sensor in one Airflow, over with its messages leased
    world.numbers(range(3))
    with DAG("puppets") as unwatched:
        BroadwayProcessorOperator(task_id="process", pipeline=Puppets)
    world.patch.setenv("AIRFLOW__BROADWAY__DEPLOYMENT", "blue")
    assert world.run(unwatched).state == "success"
    world.numbers(range(3, 5))

    # Another Airflow with the same Dag and staging folder receives the ready messages
    world.patch.setenv("AIRFLOW__BROADWAY__DEPLOYMENT", "green")
    ran = world.run(dag_of(Puppets))
    assert ran.totals == {"received": 2, "acked": 2, "accounted": 2}
    assert world.depth == (0, 0, 3, 0)
    assert "another Airflow ('blue'" in caplog.text

    # In the first Airflow their run is known to be over
    world.patch.setenv("AIRFLOW__BROADWAY__DEPLOYMENT", "blue")
    assert world.run(dag_of(Puppets)).totals["received"] == 3
    assert world.depth == (0, 0, 0, 0)


def test_an_empty_queue_is_a_successful_run_that_batches_nothing(world):
    ran = world.run(dag_of(Puppets))

    assert ran.state == "success"
    assert ran.states == NOTHING_BATCHED
    assert ran.totals == {}


@pytest.mark.parametrize("count", [0, 15])
def test_an_idle_batcher_logs_no_error(world, monkeypatch, capfd, count):
    # Given messages for at most one of two batchers, next to a Spark task without any
    batchers = {**Puppets.batchers, "spark": Batcher(schema="n long")}
    monkeypatch.setattr(Puppets, "batchers", batchers)
    world.numbers(range(count))

    ran = world.run(dag_of(Puppets))

    assert ran.states["handle_batches"] == "skipped"
    assert ran.xcom("batch.other")["plan"] is None
    output = capfd.readouterr()
    lines = (output.out + output.err).splitlines()
    assert lines
    assert [line for line in lines if "error" in line.lower()] == []


@pytest.mark.parametrize("count", [0, 15])
def test_tasks_downstream_of_an_idle_batcher_run(world, count):
    world.numbers(range(count))  # all of them for the batcher "default"
    with DAG("puppets") as dag:
        Puppets().task_group(default_args=NO_DELAY) >> EmptyOperator(task_id="refresh_dashboard")

    ran = world.run(dag)

    assert ran.state == "success"
    assert ran.states["batch.other"] == "skipped"
    assert ran.states["refresh_dashboard"] == "success"


@pytest.mark.parametrize(
    "ack",
    [{"mode": "poke", "poke_interval": 1.0}, {"deferrable": True}],
    ids=["pokes", "deferrable"],
)
def test_the_sensor_settles_in_every_mode_with_one_slot(world, ack):
    world.numbers(range(5))
    ran = world.run(dag_of(Puppets, ack=ack))
    assert ran.state == "success"
    assert ran.totals == {"received": 5, "acked": 5, "accounted": 5}


def test_a_dry_run_receives_nothing_and_leaves_no_trace(world):
    world.numbers(range(15))

    ran = world.run(dag_of(Puppets), {"dry_run": True, "max_messages": 4})

    assert ran.state == "success"
    assert ran.states == NOTHING_BATCHED
    assert (ran.totals, ran.report["look"]["messages"]) == ({}, 15)
    assert ran.report["look"]["bounds"]["max_messages"] == 4
    assert ran.xcom("ack")["received"] == 0
    assert Puppets.calls == []
    assert world.depth == (15, 0, 0, 0)
    # And a run without form values works as usual
    ran = world.run(dag_of(Puppets))  # parsed again, as in every task
    assert ran.totals == {"received": 15, "acked": 15, "accounted": 15}


def test_a_dry_run_in_one_task_receives_nothing(world):
    world.numbers(range(5))
    with DAG("puppets", params=Plain.params()) as dag:
        BroadwayRunOperator(task_id="drain", pipeline=Plain)

    ran = world.run(dag, {"dry_run": True})

    assert ran.state == "success"
    assert ran.xcom("drain")["look"]["messages"] == 5
    assert ran.report["look"]["depth"]["ready"] == 5
    assert world.depth == (5, 0, 0, 0)


def test_two_mapped_producers_share_the_queue(world):
    world.numbers(range(40))

    ran = world.run(dag_of(Puppets(producer={"concurrency": 2}), process={"max_messages": 20}))

    assert ran.state == "success"
    assert ran.xcom("process", 0)["received"] == 20
    assert ran.xcom("process", 1)["received"] == 20
    # Batches have messages of both.
    assert [len(call[3]) for call in Puppets.calls] == [10, 10, 10, 10]
    assert ran.totals == {"received": 40, "acked": 40, "accounted": 40}
    assert len(ran.report["generations"]) == 2
    assert world.depth == (0, 0, 0, 0)


def test_xcoms_are_references_of_a_few_hundred_bytes(world):
    world.numbers(range(500))

    ran = world.run(dag_of(Puppets))

    assert len(str(ran.xcom("process", 0))) < 300
    assert len(str(ran.xcom("batch.default"))) < 600


# ------------------------------------------------------------------------------------------ budgets


def test_params_override_the_budgets(world):
    world.numbers(range(30))

    ran = world.run(dag_of(Puppets, process={"max_messages": 12}), {"max_messages": 5})

    assert ran.totals["acked"] == 5
    assert world.depth == (25, 0, 0, 0)


def test_connections_come_from_a_secrets_backend(world, monkeypatch):
    world.numbers(range(5))
    monkeypatch.delenv("AIRFLOW_CONN_PUPPETS")
    secrets = world.folder / "connections.json"
    secrets.write_text(
        json.dumps({"puppets": {"conn_type": "broadway_sqlite", "host": str(world.file)}})
    )
    back_end = "airflow.secrets.local_filesystem.LocalFilesystemBackend"
    monkeypatch.setenv("AIRFLOW__SECRETS__BACKEND", back_end)
    kwargs = json.dumps({"connections_file_path": str(secrets)})
    monkeypatch.setenv("AIRFLOW__SECRETS__BACKEND_KWARGS", kwargs)
    # A process caches its back ends: other tests must not use this one.
    monkeypatch.setattr("airflow.sdk.configuration._secrets_backend_cache", {})

    ran = world.run(dag_of(Puppets))

    assert ran.state == "success"
    assert ran.totals == {"received": 5, "acked": 5, "accounted": 5}
    # Sinks' connections, which go to Spark's driver, are looked up in the same way
    assert str(world.file) in str(to_variable(AirflowConnections(), ["puppets"]))


def test_overrides_are_rendered_templates(world):
    world.numbers(range(7))
    pipeline = Puppets(
        producer={"queue": "{{ params.which }}", "lease": "{{ 60 * 5 }}"},
        context={"run": "{{ run_id }}"},
        batchers={"default": {"batch_size": "{{ params.size }}"}},
    )
    dag = dag_of(pipeline, params={**Puppets.params(), "which": "puppets", "size": 3})

    ran = world.run(dag)

    assert ran.state == "success"
    assert [len(call[3]) for call in Puppets.calls] == [3, 3, 1]
    [generation] = ran.report["generations"]
    assert generation["acked"] == 7
    contexts = {context["given"]["run"] for _, _, context in Puppets.runs if context}
    assert contexts == {ran.run_id}


def test_an_invalid_rendered_option_fails_before_the_first_receive(world):
    world.numbers(range(3))
    dag = dag_of(Puppets(producer={"lease": "{{ params.lease }}"}), params={"lease": "soon"})

    ran = world.run(dag)

    assert ran.state == "failed"
    assert world.depth == (3, 0, 0, 0)


# ---------------------------------------------------------------------------- failures of callbacks


def test_failures_are_retried_then_dead_lettered_with_reason_stage_and_attempt(world):
    world.send(
        {"n": 1, "process": "fail"},
        {"n": 2, "process": "raise"},
        {"n": 3, "batch": "fail"},
        {"n": 4, "process": "fail", "once": True},
        {"n": 5, "batch": "fail", "once": True},
        {"n": 6},
    )

    # Given one run, after which failed messages wait for another
    first = world.run(dag_of(Puppets))
    assert first.state == "success"
    assert first.totals == {
        "received": 6, "failed": 5, "acked": 1, "requeued": 5, "accounted": 6
    }  # fmt: skip
    assert world.depth == (5, 0, 0, 0)

    # When the next run begins
    second = world.run(dag_of(Puppets))

    # Then messages that failed once have succeeded, and the rest is out of attempts
    assert second.totals == {
        "received": 5, "failed": 3, "acked": 2, "dead_lettered": 3, "accounted": 5
    }  # fmt: skip
    assert world.reasons() == {1: "failed: 1", 2: "ValueError: raised on 2", 3: "failed: 3"}
    letters = world.queue.dead_letters(limit=None)
    assert {letter.attempt for letter in letters} == {2}
    assert sorted(letter.stage for letter in letters) == ["batch", "process", "process"]


def test_configured_acknowledgement_wins_in_processors_and_batches(world):
    world.send(
        {"n": 1, "process": "on_failure=dead_letter"},
        {"n": 2, "batch": "on_failure=dead_letter"},
        {"n": 3, "process": "on_success=noop"},
        {"n": 4, "batch": "on_success=retry"},
        {"n": 5, "process": "on_success=dead_letter"},
        {"n": 6},
    )

    ran = world.run(dag_of(Puppets))

    assert ran.totals == {
        "received": 6, "failed": 2, "acked": 1, "requeued": 1, "dead_lettered": 3, "left": 1,
        "accounted": 6,
    }  # fmt: skip
    assert world.reasons() == {1: "dead_letter: 1", 2: "dead_letter: 2", 5: ""}


# ---------------------------------------------------------------------------------- shapes of a run


def test_a_pipeline_without_batchers_settles_in_its_process_task(world):
    world.send({"n": 1}, {"n": 2, "process": "on_failure=dead_letter"}, {"n": 3, "process": "ack"})

    ran = world.run(dag_of(Plain))

    assert ran.states == {"process[0]": "success", "ack": "success"}
    assert ran.totals == {
        "received": 3, "failed": 1, "acked": 2, "dead_lettered": 1, "accounted": 3
    }  # fmt: skip
    assert world.depth == (0, 0, 0, 1)


class TaskKiller(Puppets):
    """Terminates the task at message 7, in batches of four."""

    by: ClassVar[str] = ""
    processors = Processors(concurrency=1, max_demand=4)
    batchers = {"default": Batcher(engine="python", batch_size=4, batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        result = super().handle_message(processor, message, context)
        if result.data["n"] == 7:
            if self.by == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            elif self.by == "an execution_timeout":
                outlast_the_task()
            else:
                raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("by", ["SIGTERM", "an execution_timeout", "an interrupt"])
def test_a_terminated_single_task_run_leaves_its_report(world, monkeypatch, by):
    monkeypatch.setattr(TaskKiller, "by", by)
    world.numbers(range(12))
    with DAG("one_task", schedule=None) as dag:
        BroadwayRunOperator(
            task_id="all", pipeline=TaskKiller, retries=0, execution_timeout=timedelta(seconds=60.0)
        )

    ran = world.run(dag)

    assert ran.state == ("success" if by == "SIGTERM" else "failed")
    report = ran.report
    # Then finished work is settled, the rest is in the queue, and the report has both
    totals = {name: count for name, count in report["totals"].items() if count}
    done = 8 if by == "SIGTERM" else 4
    assert totals == {
        "received": totals["received"],
        "acked": done,
        "released": totals["received"] - done,
        "accounted": totals["received"],
    }
    assert report["balanced"]
    assert report["failed_tasks"] == ([] if by == "SIGTERM" else ["all"])
    assert [generation["stopped"] for generation in report["generations"]] == [
        "signal" if by == "SIGTERM" else "interrupted"
    ]
    assert world.depth == (12 - done, 0, 0, 0)


def test_operators_can_be_wired_by_hand(world):
    world.numbers(range(15))
    ref = f"{Puppets.__module__}:Puppets"
    with DAG("by_hand", schedule=None, default_args=NO_DELAY) as dag:
        pull = BroadwayProcessorOperator.partial(
            task_id="pull", pipeline=ref, max_messages=9
        ).expand(producer_index=[0, 1])
        late = BroadwayBatcherOperator(
            task_id="late", pipeline=ref, batcher="default", processed=pull.output
        )
        BroadwayAckSensor(task_id="ack", pipeline=ref, watch=["pull", "late"])

    ran = world.run(dag)

    assert late.upstream_task_ids == {"pull"}
    assert ran.state == "success"
    assert ran.totals == {"received": 15, "acked": 15, "accounted": 15}


def test_a_single_process_task_needs_no_mapping(world):
    world.numbers(range(5))
    with DAG("unmapped", schedule=None, default_args=NO_DELAY) as dag:
        pull = BroadwayProcessorOperator(task_id="pull", pipeline=Puppets)
        BroadwayBatcherOperator(
            task_id="late", pipeline=Puppets, batcher="default", processed=pull.output
        )
        BroadwayAckSensor(task_id="ack", pipeline=Puppets, watch=["pull", "late"])

    ran = world.run(dag)

    assert ran.state == "success"
    assert ran.totals == {"received": 5, "acked": 5, "accounted": 5}


# --------------------------------------------------------------------------- retries and dead tries


def test_a_failed_process_task_releases_and_its_retry_receives(world, monkeypatch):
    world.numbers(range(8))
    _fail_once(monkeypatch, "airflow_broadway.staging.run_folder.StagedRun.publish")

    ran = world.run(dag_of(Puppets, default_args={"retries": 1, "retry_delay": timedelta(0)}))

    assert ran.state == "success"
    assert ran.tries["process[0]"] == 2
    # Two executions, of which the first released everything: the sum counts both.
    assert ran.totals == {"received": 16, "acked": 8, "released": 8, "accounted": 16}
    assert world.depth == (0, 0, 0, 0)


def test_a_retried_batcher_runs_only_batches_without_outcome(world, monkeypatch):
    world.numbers(range(25))

    record = OpenBatch.record
    left = [2]

    def failing(self: OpenBatch, **fields: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise OSError("no room")
        return record(self, **fields)

    monkeypatch.setattr(OpenBatch, "record", failing)
    ran = world.run(dag_of(Puppets, default_args={"retries": 1, "retry_delay": timedelta(0)}))

    assert ran.state == "success"
    assert ran.tries["batch.default"] == 2
    ids = [call[2] for call in Puppets.calls]
    assert len(set(ids)) == 3
    # The first batch had its outcome and was not run again.
    assert ids.count(ids[0]) == 1
    assert ran.totals == {"received": 25, "acked": 25, "accounted": 25}


def test_a_permanently_failing_batcher_loses_nothing_and_fails_the_run(world, monkeypatch):
    world.numbers(range(8))
    monkeypatch.setattr(OpenBatch, "record", _raise_no_room)

    ran = world.run(dag_of(Puppets))

    assert ran.state == "failed"
    assert ran.states["ack"] == "failed"
    assert ran.report["failed_tasks"] == ["broadway.batch.default"]
    assert ran.totals == {"received": 8, "released": 8, "accounted": 8}
    assert world.depth == (8, 0, 0, 0)


def test_hold_failed_keeps_the_lease_then_releases(world, monkeypatch):
    world.numbers(range(8))
    monkeypatch.setattr(OpenBatch, "record", _raise_no_room)
    numbers: list[int] = []
    from airflow_broadway.runs.heartbeat import Hold

    is_on = Hold.is_on

    def watched(self: Any, *args: Any) -> bool:
        waiting: bool = is_on(self, *args)
        if waiting:
            numbers.append(world.queue.depth().leased)
        return waiting

    monkeypatch.setattr(Hold, "is_on", watched)
    ran = world.run(dag_of(Puppets, ack={"hold_failed": 2.0}))

    assert numbers, "nothing was held"
    assert set(numbers) == {8}
    assert ran.state == "failed"
    assert world.depth == (8, 0, 0, 0)


def test_a_backfill_is_refused_before_connecting(world, monkeypatch):
    world.numbers(range(3))
    opened: list[str] = []
    from airflow_broadway.adapters.host import Host
    from airflow_broadway.operators import pull
    from airflow_broadway.producers.sqlite import SqliteProducer

    monkeypatch.setattr(SqliteProducer, "open_queue", lambda *_: opened.append("opened"))
    chosen = pull.source_of_run

    def as_backfill(operator: Any, host: Host, pipeline: Any) -> Any:
        dag_run: Any = host.context["dag_run"]
        run = dag_run.model_copy(update={"run_type": "backfill"})
        backfill: Any = {**host.context, "dag_run": run}
        return chosen(operator, Host(backfill), pipeline)

    monkeypatch.setattr(pull, "source_of_run", as_backfill)
    ran = world.run(dag_of(Puppets))

    assert ran.state == "failed"
    assert opened == []
    assert world.depth == (3, 0, 0, 0)


# ------------------------------------------------------------------------- the context of callbacks


def test_callbacks_see_the_run_and_the_result_of_setup(world):
    world.send({"n": 1}, {"n": 2, "process": "fail"})

    ran = world.run(dag_of(Puppets(context={"shop": "fruit"})), {"max_messages": 2})

    names = {name for name, _, _ in Puppets.runs}
    assert names == {"setup", "handle_message", "handle_batch", "handle_failed"}
    assert {(run.dag_id, run.run_id) for _, run, _ in Puppets.runs} == {("puppets", ran.run_id)}
    assert {run.params["max_messages"] for _, run, _ in Puppets.runs} == {2}
    [timestamps] = {(run.data_interval_start, run.logical_date) for _, run, _ in Puppets.runs}
    assert [timestamp and timestamp.utcoffset() for timestamp in timestamps] == [timedelta(0)] * 2
    contexts = [context for name, _, context in Puppets.runs if name != "setup"]
    assert contexts == [{"given": {"shop": "fruit"}, "run_id": ran.run_id}] * len(contexts)


def test_a_class_of_a_dag_file_may_have_python_batchers(world):
    # Given a Dag file that holds its pipeline too
    world.numbers(range(4))
    path = world.folder / "fruit.py"
    path.write_text(_DAG_FILE)
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(dag_folder=str(path))
    assert bag.import_errors == {}

    ran = world.run(bag.dags["fruit"])

    assert ran.state == "success"
    assert ran.totals == {"received": 4, "acked": 4, "accounted": 4}


_DAG_FILE = """\
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG
from airflow_broadway import Batcher, Broadway
from airflow_broadway.producers.sqlite import SqliteProducer


class Fruit(Broadway):
    producer = SqliteProducer(queue="puppets", conn_id="puppets")
    batchers = {"default": Batcher(engine="python")}

    def handle_message(self, processor, message, context):
        return message

    def handle_batch(self, batcher, messages, batch_info, context):
        return messages


dag = Fruit.dag("fruit")
"""


def _raise_no_room(*_: Any) -> None:
    raise OSError("no room")


def _fail_once(patch: pytest.MonkeyPatch, path: str) -> None:
    """Makes a method raise the first time it is called."""
    from pkgutil import resolve_name

    owner_path, _, name = path.rpartition(".")
    owner = resolve_name(owner_path)
    method = getattr(owner, name)
    called: list[bool] = []

    def once(*args: Any, **kwargs: Any) -> Any:
        if not called:
            called.append(True)
            raise OSError("no room")
        return method(*args, **kwargs)

    patch.setattr(owner, name, once)
