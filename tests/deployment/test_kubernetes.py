"""``docker/k8s``: the files are what Kubernetes and Airflow read, to the last field."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization

from airflow_broadway.adapters.staging import open_store
from airflow_broadway.runs.metrics import Metric
from scripts.airflow_env import ROOT
from tests.unit.spark.pipelines import Counting

FOLDER = ROOT / "docker/k8s"
FILES: dict[str, Any] = {path.name: yaml.safe_load(path.read_text()) for path in FOLDER.iterdir()}


@pytest.fixture
def kubernetes():
    pytest.importorskip("airflow.providers.cncf.kubernetes", reason="scripts/run.sh --cluster")
    return pytest.importorskip("kubernetes.client")


@pytest.mark.parametrize("name", [name for name in FILES if name != "scaled_object.yaml"])
def test_every_field_is_one_of_kubernetes(kubernetes, name):
    client = kubernetes.ApiClient()
    response = SimpleNamespace(data=json.dumps(FILES[name]))

    read = client.deserialize(response, f"V1{FILES[name]['kind']}")

    # A field that it does not know is dropped
    assert client.sanitize_for_serialization(read) == FILES[name]


def test_airflow_makes_pods_of_the_template(kubernetes):
    from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator

    template = PodGenerator.deserialize_model_file(str(FOLDER / "pod_template.yaml"))
    pod = PodGenerator.construct_pod(
        dag_id="orders",
        task_id="broadway.process",
        pod_id="orders-process",
        try_number=1,
        kube_image="another/image:1",
        date=None,
        args=["python", "-m", "airflow.sdk.execution_time.execute_workload"],
        pod_override_object=None,
        base_worker_pod=template,
        namespace="airflow",
        scheduler_job_id="1",
        run_id="manual",
        map_index=0,
    )

    [container] = pod.spec.containers
    assert container.name == "base"
    assert pod.spec.service_account_name == FILES["service_account.yaml"]["metadata"]["name"]
    assert container.env_from[0].config_map_ref.name == FILES["settings.yaml"]["metadata"]["name"]
    assert pod.spec.security_context.run_as_non_root


def test_a_task_has_a_pod_of_its_own_and_ack_none_while_it_waits(kubernetes, monkeypatch):
    resources = kubernetes.V1ResourceRequirements(requests={"memory": "8Gi"})
    containers = [kubernetes.V1Container(name="base", resources=resources)]
    override = {"pod_override": kubernetes.V1Pod(spec=kubernetes.V1PodSpec(containers=containers))}
    for name, value in FILES["settings.yaml"]["data"].items():
        monkeypatch.setenv(name, value)

    def dag() -> DAG:
        with DAG("orders") as dag:
            Counting().task_group(spark={"executor_config": override})
        return dag

    assert dag().get_task("broadway.handle_batches").executor_config == override
    ack: Any = dag().get_task("broadway.ack")
    assert ack.deferrable
    assert DagSerialization.to_dict(dag()) == DagSerialization.to_dict(dag())


def test_staging_needs_no_connection(monkeypatch):
    pytest.importorskip("s3fs")
    settings = FILES["settings.yaml"]["data"]
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", settings["AIRFLOW__BROADWAY__STAGING"])
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/secrets/token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/airflow-task")

    store = open_store(None)

    assert store.uri == "s3://lake/broadway"
    assert not store.fs.anon


def test_workers_scale_by_a_metric_that_runs_send():
    spec = FILES["scaled_object.yaml"]["spec"]
    [trigger] = spec["triggers"]
    named = set(re.findall(r"airflow_\w+", trigger["metadata"]["query"]))
    assert named == {"airflow_" + Metric.QUEUE_DEPTH.value.replace(".", "_")}
    # The gauge is measured by a run
    assert spec["minReplicaCount"] > 0
