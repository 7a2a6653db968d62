"""The Spark operator around spark-submit; a stand-in plays the application."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
)
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization

import airflow_broadway
from airflow_broadway.adapters.host import Host
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import (
    BroadwayError,
    ConnectionMissing,
    OptionsError,
    PipelineError,
)
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.deaths import WORK, Deaths, mark_begun, say_ended, say_started
from airflow_broadway.core.formats.files import LocalFiles
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.operators.spark_submit import BroadwaySparkSubmitOperator
from airflow_broadway.runs.outcomes import run_again_command
from airflow_broadway.runs.plans import OpenPlans
from airflow_broadway.runs.spark_batches import SparkBatches
from airflow_broadway.spark.job import CLIENT_VARIABLE
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.submit import submission
from airflow_broadway.submit.environment import LIGHT_JVM, SparkMissing
from airflow_broadway.submit.hook import last_error
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import GENERATION, Planned, Staged, rows

LOCAL = {"conn_type": "spark", "host": "local[2]", "extra": {"deploy-mode": "client"}}


class World:
    """A run of one plan, and what was submitted."""

    def __init__(self, root: Path) -> None:
        self.staging = f"file://{root}/staging"
        (root / "staging").mkdir()
        ti = SimpleNamespace(
            dag_id="d", run_id="r", task_id="g.handle_batches", map_index=-1, try_number=1
        )
        dag_run = SimpleNamespace(
            logical_date=None, data_interval_start=None, data_interval_end=None
        )
        context: Any = {"ti": ti, "dag_run": dag_run, "params": {"p": 1}}
        self.context = context
        self.run: StagedRun = Host(context).open_run(self.staging, Counting())
        self.staged = Staged(root / "staging" / self.run.path)
        self.staged.root_id = self.run.store.root_id()
        self.commands: list[list[str]] = []
        self.envs: list[Mapping[str, str]] = []
        self.works: list[Work] = []
        self.handled: set[str] | None = None
        #: Ids of batches that kill an application, which then runs them one at a time.
        self.deadly: set[str] = set()
        #: Whether applications report their begin and their end.
        self.says = (False, False)
        self.exit_code = 0
        self.output = io.StringIO()

    def plan(self, count: int = 3, batcher: str = "default") -> BatchPlan:
        batches = [Planned(f"b{n}", rows(2, prefix=f"b{n}-")) for n in range(count)]
        return self.staged.plan(batcher, batches)

    def operator(self, *references: Any, **more: Any) -> BroadwaySparkSubmitOperator:
        """The task of these plans, or of a new one."""
        batches = [
            {"plan": reference.path} if isinstance(reference, BatchPlan) else reference
            for reference in references or (self.plan(),)
        ]
        options: dict[str, Any] = {"pipeline": Counting, "check_pipeline": False, **more}
        return BroadwaySparkSubmitOperator(
            task_id="handle_batches", batches=batches, staging=self.staging, **options
        )

    def execute(self, *references: Any, **more: Any) -> Any:
        return self.operator(*references, **more).execute(self.context)

    # A fake spark-submit: records outcomes of all batches, or of some.
    def popen(self, command: list[str], **kwargs: Any) -> Any:
        self.commands.append(command)
        self.envs.append(kwargs.get("env") or dict(os.environ))
        arguments = dict(zip(command[-8::2], command[-7::2], strict=True))
        files = LocalFiles(arguments["--run"].removeprefix("file://"))
        work = Work.loads(files.read(arguments["--work"]), arguments["--work"])
        self.works.append(work)
        if self.says[0]:
            say_started(files, work.name, work.try_number, WORK)
        if self.deadly:
            self._die(files, work)
        if self.says[1]:
            say_ended(files, work.name, work.try_number, WORK)
        for path in () if self.deadly else work.plans:
            head, batches = BatchPlan.read(files, path)
            for batch in batches:
                if self.handled is None or batch.batch_id in self.handled:
                    self._record(files, head, batch)
        self.output = io.StringIO("line\n")
        code = self.exit_code
        return SimpleNamespace(stdout=self.output, wait=lambda: code, poll=lambda: code)

    @staticmethod
    def _record(files: LocalFiles, head: BatchPlan, batch: PlannedBatch) -> None:
        counts: dict[str, Any] = {"successful": batch.size, "failed": 0, "writer": "w"}
        outcome = Outcome(batch_id=batch.batch_id, batcher=head.batcher, plan=head.path, **counts)
        files.create(paths.outcome(head.path, batch.batch_id), outcome.dumps())

    def _die(self, files: LocalFiles, work: Work) -> None:
        """Run batches one after another, and die at a deadly one; else end in order."""
        for path in work.plans:
            head, batches = BatchPlan.read(files, path)
            for batch in batches:
                path = paths.outcome(head.path, batch.batch_id)
                if files.exists(path) or (work.only and batch.batch_id not in work.only):
                    continue
                if work.marked:
                    mark_begun(files, work.name, work.try_number, WORK, batch.batch_id)
                if batch.batch_id in self.deadly:
                    return
                self._record(files, head, batch)
        say_ended(files, work.name, work.try_number, WORK)


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path)
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(LOCAL))
    monkeypatch.setattr(
        "airflow.providers.apache.spark.hooks.spark_submit.subprocess",
        SimpleNamespace(Popen=world.popen, PIPE=-1, STDOUT=-2),
    )
    monkeypatch.setattr(submission, "check_java", lambda env: None)
    monkeypatch.setattr(SparkBatches, "leases_kept", lambda *_: nullcontext())
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME", "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    return world


def settings(command: Sequence[str]) -> dict[str, str]:
    pairs = itertools.pairwise(command)
    return dict(value.split("=", 1) for name, value in pairs if name == "--conf")


# -- the application it starts ---------------------------------------------------------------------


def test_one_application_runs_and_a_reference_is_returned(world):
    plan = world.plan()
    returned = world.execute(plan, None)
    assert returned.pop("plans") == [plan.path]
    assert returned == {"batches": 3, "failed": 0, "messages": 6, "failed_messages": 0}
    [command] = world.commands
    assert command[0].endswith("/pyspark/bin/spark-submit")
    assert command[command.index("--master") + 1] == "local[2]"
    assert command[command.index("--py-files") + 1].endswith("airflow_broadway_pipeline.zip")
    assert command[-9].endswith("airflow_broadway_job.py")
    [work] = world.works
    assert command[-8:-2] == [
        *("--run", world.run.spark_uri()),
        *("--work", "work/g.handle_batches-000001.json"),
        *("--sha256", work.digest),
    ]
    assert (work.name, work.try_number) == ("g.handle_batches", 1)
    assert work.pipeline == {"class": "tests.unit.spark.pipelines:Counting", "options": {}}
    assert work.run["params"] == {"p": 1}
    assert work.package_version == airflow_broadway.__version__
    assert world.output.closed


def test_all_batchers_share_one_application(world):
    plans = [world.plan(), world.plan(batcher="wide")]
    assert world.execute(*plans)["batches"] == 6
    assert len(world.commands) == 1
    assert world.works[0].plans == [plan.path for plan in plans]


def test_no_pipeline_option_is_on_the_command_line(world):
    world.execute(pipeline=Counting(context="hush hush"))
    assert world.works[0].pipeline["options"] == {"context": "hush hush"}
    assert "hush" not in str(world.commands)
    assert "hush" not in str(world.envs)


@pytest.mark.parametrize("mode", ["client", "cluster"])
def test_s3_keys_are_on_no_command_line_and_in_no_cluster(world, monkeypatch, mode):
    # Given a staging root in S3, by a connection that has keys
    connection = {"conn_type": "spark", "host": "yarn", "extra": {"deploy-mode": mode}}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connection))
    options = {
        "key": "AKIA",
        "secret": "hush",
        "config_kwargs": {"proxies": {"http": "http://me:hush@proxy"}},
        "client_kwargs": {"region_name": "eu"},
        "endpoint_url": "http://minio:9000",
    }
    monkeypatch.setattr(BroadwaySparkSubmitOperator, "_client_options", lambda *_: options)

    # When the application is started
    world.execute(durable=False, staging_client="arrow")

    # Then its arguments have the endpoint, and its environment the keys, if anything
    [command], [env] = world.commands, world.envs
    public = {"endpoint_url": "http://minio:9000", "client_kwargs": {"region_name": "eu"}}
    assert json.loads(command[command.index("--client-options") + 1]) == public
    assert command[command.index("--client") + 1] == "arrow"
    assert "hush" not in str(command)
    handed = json.loads(env.get(CLIENT_VARIABLE, "null"))
    assert handed == (options if mode == "client" else None)


def test_unknown_staging_client_is_refused_while_the_dag_is_parsed(world):
    with pytest.raises(OptionsError, match=r"staging_client.*one of auto, hadoop, arrow"):
        world.operator(staging_client="s3fs")


def test_local_master_gets_overridable_light_settings(world):
    world.execute(conf={"spark.ui.enabled": "true", "a.b": "c"})
    conf = settings(world.commands[0])
    assert conf["spark.driver.extraJavaOptions"] == LIGHT_JVM
    assert conf["spark.scheduler.mode"] == "FAIR"
    assert (conf["spark.ui.enabled"], conf["a.b"]) == ("true", "c")


def test_settings_of_files_are_not_overridden(world, tmp_path):
    file = tmp_path / "own.conf"
    file.write_text("# mine\nspark.scheduler.mode FIFO\nspark.log.level=INFO\n")
    world.execute(properties_file=str(file))
    conf = settings(world.commands[0])
    assert {"spark.scheduler.mode", "spark.log.level"}.isdisjoint(conf)
    assert "spark.ui.enabled" in conf


@pytest.mark.parametrize(
    ("host", "more", "what"),
    [
        ("sc://spark.example:15002", {}, "the connection 'spark_default' gives 'sc://"),
        ("local[2]", {"env_vars": {"SPARK_REMOTE": "sc://x"}}, "SPARK_REMOTE is set"),
        ("local[2]", {"conf": {"spark.remote": "sc://x"}}, "spark.remote is set"),
        ("local[2]", {"conf": {"spark.api.mode": "connect"}}, "spark.api.mode=connect is set"),
    ],
)
def test_spark_connect_elsewhere_is_refused_before_anything_starts(
    world, monkeypatch, host, more, what
):
    connection = json.dumps({"conn_type": "spark", "host": host})
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", connection)
    with pytest.raises(BroadwayError, match=rf"{re.escape(what)}.*set remote='sc://"):
        world.execute(**more)
    assert world.commands == []
    assert world.run.files.list("work") == []


def test_driver_runs_on_the_workers_python_and_spark(world):
    world.execute(env_vars={"MINE": "1"})
    [env] = world.envs
    assert env["PYSPARK_PYTHON"] == env["PYSPARK_DRIVER_PYTHON"] == sys.executable
    assert env["SPARK_HOME"].endswith("/pyspark")
    assert env["MINE"] == "1"


def test_chosen_python_stays(world):
    world.execute(env_vars={"PYSPARK_PYTHON": "/opt/python"})
    [env] = world.envs
    assert env["PYSPARK_PYTHON"] == env["PYSPARK_DRIVER_PYTHON"] == "/opt/python"


def test_chosen_executor_python_stays(world):
    world.execute(conf={"spark.pyspark.python": "/opt/python"})
    assert settings(world.commands[0])["spark.pyspark.python"] == "/opt/python"
    [env] = world.envs
    assert "PYSPARK_PYTHON" not in env
    assert env["PYSPARK_DRIVER_PYTHON"] == sys.executable


def test_own_py_files_are_kept(world, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("")
    world.execute(py_files=f"{own}, s3://code/more.zip")
    command = world.commands[0]
    first, *others = command[command.index("--py-files") + 1].split(",")
    assert first.endswith(".zip")
    assert others == [str(own), "s3://code/more.zip"]


def test_nothing_starts_without_open_batches(world):
    plan = world.plan()
    world.execute(plan)
    assert world.execute(plan)["batches"] == 3
    assert len(world.commands) == 1
    with pytest.raises(AirflowSkipException):
        world.execute(None, [None, []])
    assert len(world.commands) == 1


def test_references_may_be_nested(world):
    plan = {"plan": world.plan().path}
    assert world.execute([[plan], None], plan)["batches"] == 3
    assert world.works[0].plans == [plan["plan"]]


def test_every_application_fences_off_earlier_ones(world):
    plan = world.plan()
    world.handled = set()
    for _ in range(3):  # a retry, or a cleared task whose tries begin at 1 again
        with pytest.raises(AirflowException):
            world.execute(plan)
    assert [work.try_number for work in world.works] == [1, 2, 3]


# -- what came of it -------------------------------------------------------------------------------


def test_missing_outcome_fails_the_task_with_the_remedy(world):
    plan = world.plan()
    world.handled, world.exit_code = {"b0"}, 1
    with pytest.raises(
        AirflowException, match=r"2 of 3 batches have no outcome; .*A retry, or clearing this task"
    ):
        world.execute(plan)
    # The retry runs only the others.
    world.handled, world.exit_code = None, 0
    assert world.execute(plan)["batches"] == 3


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        (1, "exit code 1: the driver ended before every batch had an outcome"),
        (2, "exit code 2: the driver refused to start"),
        (3, "exit code 3: the driver's memory had run out, if its log says OutOfMemoryError"),
        (7, "exit code 7"),
        (137, "exit code 137: killed by SIGKILL"),
        (-15, "exit code -15: killed by SIGTERM"),
        (0, "exit code 0"),
    ],
)
def test_exit_code_of_a_dead_driver_is_explained(world, code, ending):
    world.handled, world.exit_code = set(), code
    with pytest.raises(AirflowException, match=f"Spark ended with {ending}[.]  A retry"):
        world.execute()


def test_last_error_of_a_driver_has_no_secret():
    lines = ["1 ERROR first", "2 ERROR 404 of https://user:hush@host/x?token=hush", "3 INFO last"]

    assert last_error(lines) == "404 of https://***@host/x?token=***"
    assert last_error(["INFO"]) == ""


def test_bad_exit_after_all_outcomes_is_no_failure(world):
    world.exit_code = 1
    assert world.execute()["batches"] == 3


def test_failed_batches_are_counted(world):
    plan = world.plan()
    counts: dict[str, Any] = {"successful": 0, "failed": 2, "error": "no"}
    bad = Outcome(batch_id="b0", batcher="default", plan=plan.path, **counts)
    world.staged.files.create(paths.outcome(plan.path, "b0"), bad.dumps())
    returned = world.execute(plan)
    assert (returned["failed"], returned["failed_messages"]) == (1, 2)


def test_lapsed_lease_fails_immediately_without_a_jvm(world):
    world.staged.lease(seconds=-1)
    with pytest.raises(AirflowFailException, match="no longer holds its messages: clear `process`"):
        world.execute()
    assert world.commands == []


def test_lease_that_lapses_meanwhile_is_not_retried(world, monkeypatch):
    world.handled = {"b0"}
    operator = world.operator()

    @contextmanager
    def lapsing(*_):
        yield
        world.staged.lease(seconds=-1)

    monkeypatch.setattr(SparkBatches, "leases_kept", lapsing)
    with pytest.raises(AirflowFailException, match="2 of 3 batches have no outcome: the lease"):
        operator.execute(world.context)


def settle(world: World) -> None:
    assert world.staged.files.create(paths.intent(GENERATION), "{}")
    journal = {
        "version": 1,
        "generation": GENERATION,
        "report": SettleReport(acked=6).to_json(),
        "settled_now": SettleReport().to_json(),
        "received": 6,
        "by": "ack try 1",
        "at": "2026-01-01T00:00:00+00:00",
    }
    assert world.staged.files.create(paths.settled(GENERATION), json.dumps(journal))


@pytest.mark.parametrize("handled", [True, False])
def test_settled_plan_runs_nothing_and_logs_its_settlement(world, handled, caplog):
    plan = world.plan()
    if handled:
        world.execute(plan)
    settle(world)
    world.staged.lease(seconds=-1)
    world.commands.clear()
    operator = world.operator(plan)
    with caplog.at_level(logging.INFO):
        assert operator.execute(world.context)["batches"] == (3 if handled else 0)
    assert world.commands == []
    text = "\n".join(caplog.messages)
    assert "settled at 2026-01-01T00:00:00+00:00 by ack try 1: acked 6" in text
    assert run_again_command("d", "r") in text
    assert ("b0: 2 succeeded, 0 failed" in text) is handled


def test_plan_of_another_root_is_refused_with_both_hosts(world):
    world.staged.root_id = "another"
    with pytest.raises(BroadwayError, match=r"files written on host 'host' lie under another"):
        world.execute()


def test_leases_are_kept_only_during_the_application(world, monkeypatch):
    seen: list[str] = []
    operator = world.operator()

    @contextmanager
    def kept(*_):
        seen.append(f"before {len(world.commands)}")
        yield
        seen.append(f"after {len(world.commands)}")

    monkeypatch.setattr(SparkBatches, "leases_kept", kept)
    operator.execute(world.context)
    operator.execute(world.context)
    assert seen == ["before 0", "after 1"]


# -- a cluster that outlives the task --------------------------------------------------------------


def test_finished_job_with_missing_outcomes_is_resubmitted(world):
    plan = world.plan()
    operator = world.operator(plan)
    world.handled = {"b0"}
    with pytest.raises(AirflowException):
        operator.execute(world.context)
    assert not operator.is_job_succeeded("FINISHED")
    world.handled = None
    world.execute(plan)
    assert operator.is_job_succeeded("FINISHED")
    assert not operator.is_job_succeeded("FAILED")


def test_kill_before_the_start_is_harmless(world):
    world.operator().on_kill()


# -- what is missing -------------------------------------------------------------------------------


def test_missing_connection_is_never_yarn(world, monkeypatch):
    with pytest.raises(ConnectionMissing, match=r"'spark_prod' is not defined; .*AIRFLOW_CONN_SPA"):
        world.execute(conn_id="spark_prod")
    assert world.commands == []


@pytest.mark.parametrize(
    "connection",
    [{"conn_type": "http", "host": "example.org"}, {"conn_type": "spark", "host": "x"}],
)
def test_connection_of_another_kind_is_refused(world, monkeypatch, connection):
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connection))
    with pytest.raises(ConnectionMissing, match=r"expected local.*, yarn"):
        world.execute()


def test_missing_spark_submit_is_one_clear_error(world, monkeypatch):
    monkeypatch.setattr("airflow_broadway.submit.environment._find_bundled_spark", lambda: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        SparkMissing, match=r"neither on PATH nor in SPARK_HOME.*pip install pyspark"
    ):
        world.execute()


def test_unimportable_pipeline_is_one_clear_error_before_a_jvm(world, tmp_path, monkeypatch):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "helper_module_x.py").write_text("")
    (folder / "needs_helper_x.py").write_text(
        "import helper_module_x\n"
        "from tests.unit.spark.pipelines import Counting\n"
        "class Needy(Counting):\n    name = 'Counting'\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    plan = world.plan()
    kwargs: dict[str, Any] = {"pipeline": "needs_helper_x:Needy", "check_pipeline": True}
    with pytest.raises(PipelineError, match=r"No module named 'helper_module_x'.*\n.*py_files"):
        world.execute(plan, **kwargs)
    assert world.commands == []
    # Without check_pipeline nothing is checked.
    world.execute({"plan": world.plan(batcher="wide").path}, **{**kwargs, "check_pipeline": False})
    assert len(world.commands) == 1
    # With the helper and the base class it works.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    kwargs["py_files"] = str(folder / "helper_module_x.py")
    assert world.execute(plan, **kwargs)["batches"] == 3


# -- while the Dag is parsed -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["application", "application_args", "java_class"])
def test_application_arguments_are_reserved(name):
    kwargs: dict[str, Any] = {name: ["x"]}
    with pytest.raises(OptionsError, match=name):
        BroadwaySparkSubmitOperator(task_id="t", pipeline=Counting, batches=[], **kwargs)


def test_serialized_task_holds_only_a_reference():
    with DAG("d", schedule=None) as dag:
        BroadwaySparkSubmitOperator(
            task_id="t",
            pipeline=Counting(batchers={"default": {"batch_size": 7}}),
            batches=[],
            executor_memory="4g",
            pool="spark",
        )
    text = json.dumps(DagSerialization.to_dict(dag), default=str)
    assert "tests.unit.spark.pipelines:Counting" in text
    assert "object at 0x" not in text
    assert "handle_batch(" not in text


def test_similar_task_names_have_separate_work_files(world):
    # Given batchers whose names differ in a sign that no name of a file may hold
    plans = OpenPlans(world.run, [world.plan().path])
    names = set()
    for task_id, index in (("g.a-b", -1), ("g.a_b", -1), ("g.a", 1), ("g.a.1", -1)):
        world.context["ti"].task_id, world.context["ti"].map_index = task_id, index
        name = Host(world.context).task.file_name
        path, _ = plans.write_work(name, {}, Host(world.context).run_info)
        assert path.endswith("-000001.json")
        names.add(path)

    # Then they have separate work files, and none fences another
    assert len(names) == 4


# -- applications that die -------------------------------------------------------------------------


def test_dead_applications_are_followed_up_to_a_budget(world):
    # Given three batches, at the second of which each application dies
    world.deadly, world.says, world.exit_code = {"b1"}, (True, False), 137
    with pytest.raises(AirflowException, match="1 of 3 batches has no outcome"):
        world.execute(max_applications=4)

    # Then the others are handled before it is alone, and no more are started than that
    assert [work.only for work in world.works] == [None, ["b1", "b2"], ["b2"], ["b1"]]
    assert [work.marked for work in world.works] == [False, True, True, True]
    assert [work.alone for work in world.works] == [False, False, False, True]
    assert set(world.staged.outcomes("default")) == {"b0", "b2"}
    # A later try goes on from there, and does not begin again
    with pytest.raises(AirflowException, match="no outcome"):
        world.execute({"plan": "batches/default/inputs/1-try"}, max_applications=4)
    assert len(world.works) == 4


def test_application_killed_with_its_task_is_followed_by_marked_ones(world):
    # Given an application of a task that was killed whole
    plan = world.plan()
    world.deadly, world.says = {"b1"}, (True, False)
    other = OpenPlans(world.run, [plan.path])
    _, work = other.write_work("g.handle_batches", {}, RunInfo(), parent="killed")
    say_started(world.staged.files, work.name, work.try_number, WORK)

    # When the task is tried again
    with pytest.raises(AirflowException, match="1 of 3 batches has no outcome"):
        world.execute(plan, max_applications=4)

    # Then it marks batches from the first on, and that one's death counts neither as a death nor
    # towards the applications that may be started
    assert [work.marked for work in world.works] == [True] * 4
    deaths = Deaths(world.staged.files, work.name, WORK)
    deaths.look()
    assert (deaths.count, deaths.interruptions) == (3, 1)


def test_application_that_never_began_is_not_followed(world):
    world.handled, world.exit_code = set(), 1
    with pytest.raises(AirflowException, match="have no outcome"):
        world.execute()
    assert len(world.works) == 1


def test_orderly_ended_application_is_not_followed(world):
    world.handled, world.exit_code, world.says = {"b0"}, 1, (True, True)
    with pytest.raises(AirflowException, match="2 of 3 batches have no outcome"):
        world.execute()
    assert len(world.works) == 1


def test_budget_of_no_applications_is_refused(world):
    with pytest.raises(OptionsError, match=r"max_applications.*an integer of at least 1"):
        world.operator(max_applications=0)


def test_killed_task_does_not_suspect_its_batches(world, monkeypatch):
    # Given an application that began, and is at work when its task is killed
    world.handled, world.exit_code, world.says = {"b0"}, 137, (True, False)
    operator = world.operator()
    kills: list[bool] = []

    def killed(*_):
        operator.on_kill()
        kills.append(True)
        return 137

    popen = world.popen

    def started(*args, **kwargs):
        process = popen(*args, **kwargs)
        process.wait, process.kill = killed, lambda: None
        return process

    monkeypatch.setattr(
        "airflow.providers.apache.spark.hooks.spark_submit.subprocess",
        SimpleNamespace(Popen=started, PIPE=-1, STDOUT=-2),
    )
    with pytest.raises(AirflowException, match="2 of 3 batches have no outcome"):
        operator.execute(world.context)

    # Then no other follows, and its batches are not suspected
    assert kills
    assert len(world.works) == 1
    deaths = Deaths(world.staged.files, world.works[0].name, WORK)
    deaths.look(over=None)
    assert (deaths.count, deaths.interruptions) == (0, 0)
