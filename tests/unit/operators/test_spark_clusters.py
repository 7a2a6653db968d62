"""The Spark operator and clusters: what spark-submit gets, who resumes what, what is refused."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from airflow.providers.apache.spark.hooks import spark_submit as hooks
from airflow.providers.apache.spark.operators import spark_submit as operators
from airflow.providers.common.compat.sdk import AirflowException

from airflow_broadway.core.errors import BroadwayError, OptionsError
from airflow_broadway.core.formats.deaths import WORK, say_started
from airflow_broadway.core.formats.files import LocalFiles
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.operators.spark_submit import BroadwaySparkSubmitOperator
from airflow_broadway.runs.spark_batches import SparkBatches
from airflow_broadway.submit.environment import EXIT_ON_OUT_OF_MEMORY, SparkMissing
from airflow_broadway.submit.package import UPLOAD_PATH
from tests.unit.operators.test_spark_submit import World
from tests.unit.spark.pipelines import Counting
from tests.unit.submit.stand_in import LINES, Call, StandIn

K8S, STANDALONE = "k8s://https://k8s.example:6443", "spark://m1:7077,m2:7077"
POD, APPLICATION = "flights-1a2b-driver", "application_1700000000000_0001"


class Cluster(World):
    """A run of three batches, a stand-in for spark-submit, and a cluster's manager."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.planned = self.plan()
        self.program = StandIn(root / "program")
        self.store: dict[str, Any] = {}
        self.context["ti"].stats_tags = {}
        self.context["task_state_store"] = SimpleNamespace(
            get=self.store.get, set=self.store.__setitem__
        )
        #: The states of the application or pod, one for each look; functions are called.
        self.states: list[Any] = []
        self.killed: list[str] = []

    def connect(self, monkeypatch: Any, master: str, deploy_mode: str, **extra: Any) -> None:
        """Defines the connection."""
        extra = {"deploy-mode": deploy_mode, **extra}
        connection = {"conn_type": "spark", "host": master, "extra": extra}
        monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connection))
        self.program.print(LINES.get((master.partition(":")[0], deploy_mode), ""))

    def handle(self, *batch_ids: str, files: Any = None) -> None:
        """Records outcomes: by the driver that is started next, or now in ``files``."""
        _, batches = BatchPlan.read(self.staged.files, self.planned.path)
        for batch in batches:
            if not batch_ids or batch.batch_id in batch_ids:
                files = files or LocalFiles(self.program.folder)
                self._record(files, self.planned, batch)

    def submit(self, **more: Any) -> Call:
        """Executes the task, whose driver handles all batches; returns the stand-in's call."""
        self.handle()
        assert self.execute(self.planned, name="flights", **more)["batches"] == 3
        [call] = self.program.calls
        return call

    # -- the manager of a cluster

    def state(self) -> Any:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return state() if callable(state) else state

    def look(self, *_: Any) -> Any:
        """Returns the pod, as Kubernetes' client does."""
        status = SimpleNamespace(phase=self.state(), container_statuses=None)
        return SimpleNamespace(status=status)

    def get(self, url: str, **_: Any) -> Any:
        """Answers a request for the application, as YARN does."""
        assert url == f"http://rm:8088/ws/v1/cluster/apps/{APPLICATION}"
        state = self.state()
        final = {"RUNNING": "UNDEFINED"}.get(state, state)
        app = {"state": "RUNNING" if state == "RUNNING" else "FINISHED", "finalStatus": final}
        return SimpleNamespace(status_code=200, json=lambda: {"app": app})

    def put(self, url: str, **_: Any) -> Any:
        self.killed.append(url.rsplit("/", 2)[1])
        return SimpleNamespace(status_code=202)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path)
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{cluster.program.folder}/bin:/usr/bin:/bin")
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME", "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(SparkBatches, "leases_kept", lambda *_: nullcontext())
    client = SimpleNamespace(
        read_namespaced_pod=cluster.look,
        delete_namespaced_pod=lambda name, *_, **__: cluster.killed.append(name),
    )
    kubernetes: Any = SimpleNamespace(get_kube_client=lambda: client, ApiException=OSError)
    for module in (hooks, operators):
        monkeypatch.setattr(module, "kube_client", kubernetes, raising=False)
    options = SimpleNamespace(client=SimpleNamespace(V1DeleteOptions=dict))
    monkeypatch.setitem(sys.modules, "kubernetes", options)
    monkeypatch.setattr(hooks, "time", SimpleNamespace(sleep=lambda seconds: None))
    api = SimpleNamespace(get=cluster.get, put=cluster.put, exceptions=requests.exceptions)
    monkeypatch.setattr(hooks, "requests", api)
    return cluster


# -- to the last argument --------------------------------------------------------------------------

#: Settings that every application gets.
FAIR = ["--conf", "spark.scheduler.mode=FAIR"]
MEMORY = ["--conf", f"spark.driver.defaultJavaOptions={EXIT_ON_OUT_OF_MEMORY}"]
ONE = ["--conf", "spark.yarn.maxAppAttempts=1"]
OWN_CONF, CONF = ["--conf", "a.b=c"], ["--conf"]
OTHER_PYTHON = "spark.yarn.appMasterEnv.PYSPARK_PYTHON=/opt/python"
SPACE = "spark.kubernetes.namespace=spark"
THREE = ["--num-executors", "3", "--executor-cores", "2"]
LOCAL_CODE = "/airflow_broadway_job.py", "/airflow_broadway_pipeline.zip"
UPLOADED = ["airflow_broadway_job.py", "airflow_broadway_pipeline.zip"]
KEYTAB = {"principal": "me@EXAMPLE", "keytab": base64.b64encode(b"keys").decode()}
ME = ["--keytab", "airflow_keytab-me@EXAMPLE", "--principal", "me@EXAMPLE"]

MODES: dict[str, tuple[Any, ...]] = {
    "standalone, client": (
        *(STANDALONE, "client", {}),
        {"executor_memory": "4g", "total_executor_cores": 8, "env_vars": {"MINE": "1"}},
        [*OWN_CONF, *FAIR, *MEMORY],
        ["--total-executor-cores", "8", "--executor-memory", "4g", "--name", "flights"],
        {"MINE": "1", "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
    ),
    "yarn, client": (
        *("yarn", "client", {"queue": "night", **KEYTAB}),
        {"num_executors": 3, "executor_cores": 2, "env_vars": {"PYSPARK_PYTHON": "/opt/python"}},
        [*OWN_CONF, *FAIR, *ONE, *MEMORY, *CONF, OTHER_PYTHON],
        [*THREE, *ME, "--name", "flights", "--queue", "night"],
        {"PYSPARK_PYTHON": "/opt/python", "PYSPARK_DRIVER_PYTHON": "/opt/python"},
    ),
    "yarn, cluster": (
        *("yarn", "cluster", {"queue": "night", **KEYTAB}),
        {"driver_memory": "2g", "yarn_queue": "day"},
        [*OWN_CONF, *FAIR, *ONE, *MEMORY],
        ["--driver-memory", "2g", *ME, "--name", "flights", "--queue", "day"],
        {"PYSPARK_PYTHON": None, "PYSPARK_DRIVER_PYTHON": None},
    ),
    "k8s, client": (
        *(K8S, "client", {"namespace": "spark"}),
        {"env_vars": {"MINE": "1"}},
        [*OWN_CONF, *FAIR, *MEMORY, *CONF, "spark.kubernetes.driverEnv.MINE=1", *CONF, SPACE],
        ["--name", "flights"],
        {"MINE": "1", "PYSPARK_PYTHON": "python3", "PYSPARK_DRIVER_PYTHON": sys.executable},
    ),
    "k8s, cluster, code on the shared disk": (
        *(K8S, "cluster", {"namespace": "spark"}),
        {"conf": {"a.b": "c", "spark.kubernetes.container.image": "own"}},
        [*OWN_CONF, *CONF, "spark.kubernetes.container.image=own", *FAIR, *MEMORY, *CONF, SPACE],
        ["--name", "flights"],
        {"PYSPARK_PYTHON": None},
    ),
    "k8s, cluster, uploaded by Spark": (
        *(K8S, "cluster", {}),
        {"conf": {UPLOAD_PATH: "s3a://lake/uploads"}},
        ["--conf", f"{UPLOAD_PATH}=s3a://lake/uploads", *FAIR, *MEMORY],
        ["--name", "flights"],
        {"PYSPARK_PYTHON": None},
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_spark_submit_gets_each_argument(cluster, monkeypatch, mode):
    # Given a connection, and the operator's own arguments
    master, deploy_mode, extra, more, conf, own, variables = MODES[mode]
    cluster.connect(monkeypatch, master, deploy_mode, **extra)

    # When it is executed
    call = cluster.submit(**{"conf": {"a.b": "c"}, **more})

    # Then the program has those arguments, in this order, and no other
    words = call.arguments
    py_files, launcher = words[words.index("--py-files") + 1], words[-9]
    work = "work/g.handle_batches-000001.json"
    [name] = [name for name in words if "airflow_keytab" in name] or [""]
    assert [word.replace(name, Path(name).name) if name else word for word in words[:-9]] == [
        *("--master", master, *conf, "--py-files", py_files, *own, "--deploy-mode", deploy_mode)
    ]
    assert words[-8:-4] == ["--run", cluster.run.spark_uri(), "--work", work]
    assert [words[-4], words[-2]] == ["--sha256", "--host"]
    assert not name or Path(name).read_bytes() == b"keys"

    # and its environment, and the code: as local files, or in the run's folder, as pods see it
    assert {name: call.environment.get(name) for name in variables} == variables
    if "shared disk" not in mode:
        assert (launcher[-24:], py_files[-30:]) == LOCAL_CODE
        assert [file for file in call.files if file != "airflow_keytab-me@EXAMPLE"] == UPLOADED
    else:
        assert call.files == []
        for uri, file in zip((launcher, py_files), UPLOADED, strict=True):
            assert uri.startswith(cluster.run.spark_uri().replace("file:", "local:") + "/code/")
            assert uri.endswith(f"/{file}")
            assert Path(uri.removeprefix("local://")).stat().st_size > 500


def test_deploy_mode_is_always_on_the_command_line(cluster, monkeypatch, tmp_path):
    # Given a file of settings with another deploy mode, and a connection with none
    file = tmp_path / "spark.conf"
    file.write_text("spark.submit.deployMode cluster\nspark.yarn.maxAppAttempts 3\n")
    cluster.connect(monkeypatch, "yarn", "")

    call = cluster.submit(properties_file=str(file))

    assert call.arguments[call.arguments.index("--deploy-mode") + 1] == "client"
    assert "spark.yarn.maxAppAttempts=1" not in call.arguments


# -- durable ---------------------------------------------------------------------------------------

TRACKED = {
    "yarn": ({"yarn_track_via_rm_api": True}, "RUNNING", "SUCCEEDED", "FAILED", APPLICATION),
    "k8s": ({"track_driver_via_k8s_api": True}, "Running", "Succeeded", "Failed", POD),
}


class Killed(BaseException):
    """The death of a worker."""


def die():
    """Dies."""
    raise Killed


@pytest.fixture(params=TRACKED)
def tracked(request, cluster, monkeypatch):
    """A cluster that is asked for the state of its application; what the operator needs for that;
    the states running, succeeded and failed; and the application's id."""
    extra = {"yarn_resourcemanager_webapp_address": "rm:8088"} if request.param == "yarn" else {}
    master = "yarn" if request.param == "yarn" else K8S
    cluster.connect(monkeypatch, master, "cluster", namespace="spark", **extra)
    return cluster, *TRACKED[request.param]


def test_a_retry_resumes_the_running_application(tracked):
    # Given an application that is running, and of which the worker died
    cluster, more, running, succeeded, _, app = tracked
    cluster.states = [running, die]
    with pytest.raises(Killed):
        cluster.execute(cluster.planned, **more)

    # When one batch has its outcome, and the task is retried until the application has ended
    cluster.handle("b0", files=cluster.staged.files)

    def end():
        cluster.handle("b1", "b2", files=cluster.staged.files)
        return succeeded

    cluster.states = [running, running, end, succeeded]
    operator = cluster.operator(cluster.planned, **more)
    assert operator.execute(cluster.context)["batches"] == 3

    # Then no second one was submitted, nor the first one fenced off
    assert len(cluster.program.calls) == 1
    assert cluster.staged.files.list("work") == ["g.handle_batches-000001.json"]

    # and the task would have killed it
    cluster.killed.clear()
    operator.on_kill()
    assert cluster.killed == [app]


def test_an_application_that_failed_is_followed_by_another(tracked):
    cluster, more, _, succeeded, failed, _ = tracked
    cluster.states = [failed]
    with pytest.raises(AirflowException, match="3 of 3 batches have no outcome"):
        cluster.execute(cluster.planned, **more)

    cluster.states = [failed, succeeded]
    cluster.handle()
    assert cluster.execute(cluster.planned, **more)["batches"] == 3
    assert len(cluster.program.calls) == 2


def test_an_application_that_succeeded_hides_no_later_one(tracked):
    # Given an application that ended in order without some outcomes, and a second one, which runs
    cluster, more, running, succeeded, _, _ = tracked
    cluster.states = [succeeded]
    with pytest.raises(AirflowException, match="no outcome"):
        cluster.execute(cluster.planned, **more)
    cluster.states = [succeeded, running, die]
    if more.get("track_driver_via_k8s_api"):
        cluster.states = [running, die]  # the first one's state is known
    with pytest.raises(Killed):
        cluster.execute(cluster.planned, **more)

    # Then a retry resumes the second one
    cluster.states = [running, succeeded]
    with pytest.raises(AirflowException, match="no outcome"):
        cluster.execute(cluster.planned, **more)
    assert len(cluster.program.calls) == 2


def test_an_application_of_other_plans_is_not_resumed(tracked):
    # Given an application that runs, whose batches the run no longer holds
    cluster, more, running, succeeded, _, _ = tracked
    cluster.states = [running, die]
    with pytest.raises(Killed):
        cluster.execute(cluster.planned, **more)

    # When the task has others
    other = cluster.plan(batcher="wide")
    cluster.states = [succeeded]
    with pytest.raises(AirflowException, match="6 of 6 batches have no outcome"):
        cluster.execute(cluster.planned, other, **more)

    # Then it submits another one
    assert len(cluster.program.calls) == 2


def test_without_the_manager_no_second_application_is_submitted(tracked):
    # Given an application that has begun, and a manager that is away from then on
    cluster, more, running, _, _, _ = tracked

    def away():
        say_started(cluster.staged.files, "g.handle_batches", 1, WORK)
        error: Any = requests.exceptions.ConnectionError("away")
        error.status = 503
        raise error

    cluster.states = [running, away]

    with pytest.raises((RuntimeError, OSError), match=r"away|unreachable"):
        cluster.execute(cluster.planned, **more)

    assert len(cluster.program.calls) == 1


@pytest.mark.parametrize(
    ("master", "option"),
    [("yarn", "yarn_track_via_rm_api"), (K8S, "track_driver_via_k8s_api")],
)
def test_durable_is_off_with_one_sentence(cluster, monkeypatch, capsys, master, option):
    # Given a cluster that is not asked for the application's state
    cluster.connect(monkeypatch, master, "cluster")
    operator = cluster.operator(cluster.planned, durable=True)
    cluster.program.exit_code = 1
    with pytest.raises(AirflowException, match="3 of 3 batches have no outcome"):
        operator.execute(cluster.context)

    # Then a retry submits another application, which fences off the first one, and the log says so
    cluster.program.exit_code = 0
    cluster.handle()
    cluster.execute(cluster.planned)
    assert len(cluster.program.calls) == 2
    assert cluster.staged.files.exists("work/g.handle_batches-000002.json")
    sentence = rf"A retry submits another application.* set {option}=True"
    assert len(re.findall(sentence, capsys.readouterr().out)) == 2


# -- what is not supported -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("master", "mode", "more", "error", "what"),
    [
        (STANDALONE, "cluster", {}, OptionsError, "'deploy_mode': expected 'client' with the mas"),
        ("local[2]", "cluster", {}, OptionsError, r"a driver in Python .* yarn and k8s://"),
        ("yarn", "Cluster", {}, OptionsError, "expected 'client' or 'cluster' with the master"),
        ("yarn-client", "", {}, BroadwayError, r"expected local\[\*\], yarn"),
        ("mesos://m:5050", "client", {}, BroadwayError, r"expected local\[\*\], yarn"),
        (K8S, "cluster", {"files": "/a, s3a://b"}, OptionsError, f"'files'.*{UPLOAD_PATH}"),
        (K8S, "cluster", {"py_files": "/a.py"}, OptionsError, f"'py_files'.*{UPLOAD_PATH}"),
    ],
)
def test_unsupported_mode_is_refused_before_a_jvm(
    cluster, monkeypatch, master, mode, more, error, what
):
    cluster.connect(monkeypatch, master, mode)
    with pytest.raises(error, match=what):
        cluster.execute(cluster.planned, **more)
    assert cluster.program.calls == []
    assert cluster.staged.files.list("work") == []


def test_kubernetes_client_is_loaded_at_its_first_use(tmp_path, monkeypatch):
    if not hasattr(hooks, "kube_client"):  # the provider is not installed
        package = tmp_path / "airflow" / "providers" / "cncf" / "kubernetes"
        package.mkdir(parents=True)
        (package / "kube_client.py").write_text("from kubernetes import ApiException")
        (tmp_path / "kubernetes.py").write_text("class ApiException(Exception): ...")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    script = (
        "import sys; from airflow_broadway.operators import spark_submit; "
        "from airflow.providers.apache.spark.hooks.spark_submit import kube_client; "
        "print('kubernetes' in sys.modules, kube_client.ApiException.__module__)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    before, module = result.stdout.split()[-2:]
    assert before == b"False"
    assert module.startswith(b"kubernetes")


def test_kubernetes_without_its_client_is_refused_with_the_extra(cluster, monkeypatch):
    cluster.connect(monkeypatch, K8S, "client")
    monkeypatch.delattr(hooks, "kube_client")
    with pytest.raises(SparkMissing, match=r"pip install 'airflow-broadway\[kubernetes\]'"):
        cluster.execute(cluster.planned)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"deploy_mode": "clutser"}, r"'deploy_mode': expected 'client' or 'cluster'"),
        ({"conf": {"spark.master": "yarn"}}, r"'conf.spark.master': .* the connection's host"),
        ({"conf": {"spark.submit.deployMode": "cluster"}}, r"deployMode': .* set deploy_mode"),
    ],
)
def test_wrong_deploy_mode_is_refused_while_the_dag_is_parsed(more, what):
    with pytest.raises(OptionsError, match=what):
        BroadwaySparkSubmitOperator(task_id="t", pipeline=Counting, batches=[], **more)
