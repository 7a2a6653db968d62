"""Replay: batches of a settled run again, with the run and its broker as they were."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowSkipException

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import ACK
from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.retention import sweep_retention
from airflow_broadway.staging.run_folder import StagedRun, iter_unsettled
from airflow_broadway.staging.store import Store
from tests.cli_runs import DAG_ID, RUN_ID, Ran, Shop, make_shop, ran

Capsys = pytest.CaptureFixture[str]
RUN = ("replay", "--dag-id", DAG_ID, "--run-id", RUN_ID)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    made = make_shop(tmp_path, monkeypatch)
    made.send([{"n": n, "shop": "ab"[n % 2]} for n in range(7)])
    return made


def replayed(shop: Shop, capsys: Capsys, *arguments: str) -> Ran:
    return ran(capsys, *RUN, "--pipeline", shop.ref, *arguments)


def contents(run: StagedRun) -> dict[str, bytes]:
    """Every file of a run."""
    root = Path(run.files.full(""))
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_replay_runs_the_same_batches_and_changes_nothing_else(
    shop: Shop, capsys: Capsys
) -> None:
    # Given a settled run in which one order failed
    shop.bad(3)
    run = shop.settled_run()
    calls = shop.calls()
    files, depth = contents(run), shop.queue.depth()._replace(oldest_age=None)
    assert depth.dead == 1

    # When the code is mended and the run replayed
    shop.bad()
    done = replayed(shop, capsys)

    # Then the same messages came in the same batches, in the same order, and nothing failed
    assert done.code == 0
    assert sorted(shop.calls()) == sorted(calls)
    assert "Replayed 4 batches" in done.out
    assert "7 messages succeeded, 0 failed" in done.out
    assert "Nothing was settled at the broker" in done.out

    # And the run is as it was, byte by byte, and so is the queue: the dead letter stays dead
    assert contents(run) == files
    assert shop.queue.depth()._replace(oldest_age=None) == depth


def test_a_message_that_fails_in_a_replay_is_reported_and_not_requeued(
    shop: Shop, capsys: Capsys
) -> None:
    # Given a settled run without a failure
    shop.settled_run()
    before = shop.queue.depth()

    # When two orders fail in its replay
    shop.bad(2, 4)
    done = replayed(shop, capsys, "--json")

    # Then they are named with their reason, and neither comes back nor dies
    assert done.code == 1
    assert (done.json["successful"], done.json["failed"]) == (5, 2)
    failures = [failure for batch in done.json["batches"] for failure in batch["failures"]]
    assert [failure["reason"] for failure in failures] == ["bad order", "bad order"]
    [before_, now] = {(b["before"]["failed"], b["now"]["failed"]) for b in done.json["batches"]}
    assert {before_, now} == {(0, 0), (0, 1)} or {before_, now} == {(0, 0), (0, 2)}
    assert shop.queue.depth() == before
    assert "  bad order" not in done.out
    assert "bad order" in replayed(shop, capsys).out


def test_a_replay_is_counted_by_nobody_and_goes_as_runs_go(shop: Shop, capsys: Capsys) -> None:
    # Given a replayed run
    run = shop.settled_run()
    name = replayed(shop, capsys, "--json").json["replay"]
    assert name.startswith("replay__2")
    assert name.endswith(f"__{RUN_ID}")

    # Then no sweep finds it, and an account of it has nothing
    assert list(iter_unsettled(run.store, "Orders", DAG_ID)) == []
    settler = RunWatcher(shop.run(name), shop.load())
    settler.settle(final=True)
    assert settler.report(failed_tasks=[])["totals"]["received"] == 0

    # And it is listed as what it is
    [listed] = [r for r in ran(capsys, "runs", "--json").json if r["replay_of"]]
    assert (listed["run_id"], listed["replay_of"], listed["state"]) == (name, RUN_ID, "replay")
    shown = ran(capsys, "show", "--dag-id", DAG_ID, "--run-id", name)
    assert f"A replay of {RUN_ID}." in shown.out

    # And retention removes it as it does the run itself
    assert set(sweep_retention(run.store, "Orders", DAG_ID, keep=-1.0)) == {RUN_ID, name}


def test_only_the_batches_that_are_named_are_replayed(shop: Shop, capsys: Capsys) -> None:
    shop.settled_run()
    calls = shop.calls()
    _, one, _ = calls[1]

    done = replayed(shop, capsys, "--batch-id", one)

    assert done.code == 0
    assert shop.calls() == [calls[1]]


def test_what_was_never_handled_is_replayed_only_by_name(shop: Shop, capsys: Capsys) -> None:
    # Given a run that was settled before its batches were handled: its messages went back
    run, _ = shop.process()
    shop.settle(run)
    assert shop.queue.depth().ready == 7

    # Then a replay of the run would only handle twice what the next run handles
    assert "none of 4 batches of run" in replayed(shop, capsys).error
    shown = ran(capsys, "show", "--dag-id", DAG_ID, "--run-id", RUN_ID, "--json").json
    name = shown["batches"][0]["batch_id"]
    done = replayed(shop, capsys, "--batch-id", name, "--json")
    assert (done.code, done.json["batches"][0]["before"]) == (0, None)


def test_a_callback_that_acks_at_once_acks_nothing_in_a_replay(shop: Shop, capsys: Capsys) -> None:
    # Given a pipeline whose handle_batch acks its messages itself
    module = shop.folder / "dags" / f"{shop.module}.py"
    text = module.read_text()
    acks = "\n    def judged(self, messages, bad):\n"
    acks += "        return [message.ack_immediately() for message in messages]\n"
    module.write_text(text + acks)
    shop.settled_run()
    before = shop.queue.leases(ended=True)

    # When it is replayed
    done = replayed(shop, capsys, "--json")

    # Then the queue knows of nothing new
    assert (done.code, done.json["successful"]) == (0, 7)
    assert shop.queue.leases(ended=True) == before


def test_a_replay_in_an_object_store_copies_what_it_cannot_link(
    shop: Shop, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a settled run in a store without folders and links
    shop.root = f"memory://broadway-{shop.module}"
    for module in ("airflow_broadway.adapters.staging", "tests.cli_runs"):
        monkeypatch.setattr(f"{module}.open_store", lambda uri: Store.open(shop.root))
    run = shop.settled_run()
    calls = shop.calls()

    # When it is replayed
    done = replayed(shop, capsys, "--json")

    # Then it is as on a disk
    assert (done.code, done.json["successful"]) == (0, 7)
    assert sorted(shop.calls()) == sorted(calls)
    assert run.store.fs.exists(run.files.full("report.json"))
    listed = ran(capsys, "runs", "--json").json
    assert [each["replay_of"] for each in listed] == [None, RUN_ID]


# -- what is wrong is said in one line ---------------------------------------------------------


def test_a_python_batchers_run_needs_its_pipeline(shop: Shop, capsys: Capsys) -> None:
    shop.settled_run()

    error = ran(capsys, *RUN).error

    assert f"run {RUN_ID!r} had no Spark application, so its pipeline is not on record" in error
    assert "give --pipeline pkg.module:Class (the one named 'Orders')" in error


def test_a_run_that_is_not_there_is_named(shop: Shop, capsys: Capsys) -> None:
    shop.settled_run()

    error = ran(capsys, "replay", "--dag-id", DAG_ID, "--run-id", "manual__other").error

    assert "there is no staged run 'manual__other' of the Dag 'orders'" in error


def test_a_run_without_batches_has_nothing_to_replay(shop: Shop, capsys: Capsys) -> None:
    shop.queue.receive("cleared", 1000)
    shop.queue.settle("cleared", Settlement(rest=ACK))
    shop.process()

    assert "has no staged batches" in replayed(shop, capsys).error


def test_staged_data_that_is_gone_is_named(shop: Shop, capsys: Capsys) -> None:
    run = shop.settled_run()
    [data] = Path(run.files.full("batches")).rglob("*.parquet")
    data.unlink()
    folders = sorted(Path(run.store.root, "Orders", DAG_ID).iterdir())

    error = replayed(shop, capsys).error

    assert f"the staged data of run {RUN_ID!r} is gone" in error
    assert data.name in error
    assert sorted(Path(run.store.root, "Orders", DAG_ID).iterdir()) == folders


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--batcher", "some"), "has no batches of the batcher 'some'; it has some of ['default']"),
        (("--batch-id", "abc"), "has no batch abc"),
        (("--conf", "spark.x"), "--conf takes NAME=VALUE, got: 'spark.x'"),
        (("--pipeline", "nowhere:Orders"), "the pipeline's module 'nowhere' cannot be imported"),
        (("--pipeline", "Orders"), "invalid value for option 'pipeline'"),
        (("--pipeline", "{"), "--pipeline is no JSON"),
    ],
)
def test_a_wrong_argument_of_a_replay_is_named(
    shop: Shop, capsys: Capsys, arguments: tuple[str, ...], error: str
) -> None:
    shop.settled_run()

    assert error in replayed(shop, capsys, *arguments).error


def test_batches_of_one_engine_are_not_replayed_on_another(shop: Shop, capsys: Capsys) -> None:
    shop.settled_run()
    options = {"batchers": {"default": {"engine": "spark"}}}
    ref = json.dumps({"class": shop.ref, "options": options})

    assert "staged for engine='python'" in replayed(shop, capsys, "--pipeline", ref).error


def test_a_batcher_that_is_cleared_after_settlement_is_skipped_and_names_the_replay(
    shop: Shop,
) -> None:
    run = shop.settled_run()
    shop.calls()
    [generation] = [record.generation for record in run.generations()]
    operator = BroadwayBatcherOperator(
        task_id="batch",
        pipeline=shop.ref,
        batcher="default",
        processed={"generation": generation, "batchers": {"default": 7}},
        staging=shop.staging,
    )
    pushed: list[Any] = []
    ti = SimpleNamespace(
        dag_id=DAG_ID,
        run_id=RUN_ID,
        task_id="batch",
        map_index=-1,
        try_number=2,
        id="x",
        xcom_push=lambda key, value: pushed.append(value["plan"]),
    )
    dates = dict.fromkeys(("logical_date", "data_interval_start", "data_interval_end"))
    context: Any = {"ti": ti, "dag_run": SimpleNamespace(**dates), "params": {}}
    command = f"airflow-broadway replay --dag-id {DAG_ID} --run-id {re.escape(RUN_ID)}"
    with pytest.raises(AirflowSkipException, match=f"are settled, or were given back.*{command}"):
        operator.execute(context)
    assert shop.calls() == []
    assert pushed == [None]


# -- Spark -----------------------------------------------------------------------------------------


@pytest.mark.spark
def test_a_spark_run_is_replayed_by_the_command_that_its_task_logs(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a settled run of a Spark batcher
    shop = make_shop(tmp_path, monkeypatch, engine="spark", size=3)
    ids = shop.send([{"n": n, "shop": "a"} for n in range(5)])
    run = shop.settled_run()
    files = contents(run)
    connection = {"conn_type": "spark", "host": "local[2]", "extra": {"deploy-mode": "client"}}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connection))
    shop.bad(4)

    # When it is replayed with the ids alone
    done = ran(capsys, *RUN, "--yes", "--json")

    # Then Spark handled the same batches, and the order that now fails is named
    assert done.code == 1, done.err
    value = done.json
    assert (value["successful"], value["failed"], value["without_outcome"]) == (4, 1, 0)
    [failure] = [failure for batch in value["batches"] for failure in batch["failures"]]
    assert failure == {"message_id": ids[4], "reason": "bad order"}
    told = [(run_id, len(numbers)) for run_id, _, numbers in shop.calls()]
    assert sorted(told) == [(RUN_ID, 2), (RUN_ID, 3)]
    assert contents(run) == files


def test_a_spark_connection_that_is_not_there_is_named(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = make_shop(tmp_path, monkeypatch, engine="spark")
    shop.send([{"n": 1, "shop": "a"}])
    shop.settled_run()

    done = ran(capsys, *RUN, "--yes", "--conn-id", "spark_nowhere")

    assert done.code == 2
    assert "the Spark connection 'spark_nowhere' is not defined" in done.err.splitlines()[-1]
    assert [each["run_id"] for each in ran(capsys, "runs", "--json").json] == [RUN_ID]


# -- whose code runs -------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Somebody who types an answer."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose staged files name a module that says when it is imported."""
    shop = make_shop(tmp_path, monkeypatch, engine="spark")
    shop.send([{"n": 1, "shop": "a"}])
    run = shop.settled_run()
    (tmp_path / "planted.py").write_text("open('planted.txt', 'w').close()\nAny = dict")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = "work/handle_batches-000001.json"
    work = json.loads(run.files.read(path))
    work["pipeline"] = {"class": "planted:Any", "options": {"context": {"to": "/else\x1b[2J"}}}
    run.files.replace(path, json.dumps(work))
    yield tmp_path / "planted.txt"
    sys.modules.pop("planted", None)


@pytest.mark.parametrize(
    ("stdin", "error"),
    [
        (io.StringIO("y\n"), "give --yes if that is the pipeline, or name it yourself"),
        (Terminal("n\n"), "nothing was imported"),
        (Terminal(""), "nothing was imported"),
    ],
)
def test_what_staged_files_name_is_said_and_not_imported_before_somebody_says_yes(
    planted: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, stdin: io.StringIO, error: str
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    done = ran(capsys, *RUN)
    assert done.code == 2
    assert "name the pipeline planted:Any with the options" in done.err
    assert '{"context": {"to": "/else' in done.err
    assert "\x1b" not in done.err
    assert error in done.err
    assert not planted.exists()
    assert "planted" not in sys.modules


@pytest.mark.parametrize(("stdin", "arguments"), [(Terminal("y\n"), ()), (Terminal(), ("--yes",))])
def test_a_class_that_is_no_pipeline_is_refused_before_it_is_called(
    planted: Path,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
    stdin: io.StringIO,
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    done = ran(capsys, *RUN, *arguments)
    assert done.code == 2
    assert "'planted:Any' is no subclass of airflow_broadway.Broadway" in done.err
    assert planted.exists()
