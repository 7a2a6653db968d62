"""Links from tasks, as Airflow's UI gives them: each is followed."""

from __future__ import annotations

import json
import urllib.parse

import pytest
import requests

from tests.browser.site import Run
from tests.browser.spark_history import history_server
from tests.rabbitmq_fixtures import wanted_server

pytestmark = [pytest.mark.browser, pytest.mark.airflow, pytest.mark.spark, pytest.mark.broker]

TASKS = {
    "broadway.process": {"Broadway", "Report", "Broker's console"},
    "broadway.batch.default": {"Broadway", "Report"},
    "broadway.handle_batches": {"Broadway", "Report", "Spark"},
    "broadway.ack": {"Broadway", "Report", "Broker's console"},
}


@pytest.fixture
def rabbitmq(site):
    """A RabbitMQ that Airflow has a connection to, with its console's address."""
    server = wanted_server()
    server.declare("linked")
    server.fill("linked", [b"1", b"2", b"3"])
    given = server.connection()
    console = {"management_url": f"http://127.0.0.1:{server.management_port}"}
    connection = {**given, "connection_id": "links_rabbitmq", "extra": json.dumps(console)}
    site.airflow.api("POST", "/connections", connection)
    yield server
    site.airflow.api("DELETE", "/connections/links_rabbitmq")


def links(run: Run, task_id: str) -> dict[str, str]:
    """The links of a task, by Airflow's API, which its UI asks."""
    run_id = urllib.parse.quote(run.run_id, safe="")
    path = f"/dags/{run.dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/links"
    # A process task is mapped, even with one producer.
    index = {"map_index": 0} if task_id == "broadway.process" else {}
    response = run.site.airflow.api("GET", path, **index)["extra_links"]
    return {name: url for name, url in response.items() if url}


def text_at(address: str) -> str:
    session = requests.Session()
    session.trust_env = False
    answer = session.get(address, timeout=30)
    assert answer.status_code == 200, (address, answer.status_code)
    return answer.text


@pytest.mark.timeout(500)
def test_task_links_open_the_right_page(as_admin, site, rabbitmq):
    # Given a run whose batch is at work
    (site.folder / "events").mkdir(exist_ok=True)
    run = site.trigger("links")
    spark = "broadway.handle_batches"
    as_admin.until(lambda _: "Spark" in links(run, spark), "Spark has no UI", timeout=240)

    # Then Spark's own UI shows the application
    address = links(run, spark)["Spark"]
    assert "links.broadway.handle_batches" in text_at(address)
    as_admin.open(run.page)
    assert as_admin.link("Spark", within=".batches").get_attribute("href") == f"{address}/"

    # When the run is over
    (site.folder / "go").touch()
    run.wait()

    # Then each task has its links, in the UI too
    urls = {task_id: links(run, task_id) for task_id in TASKS}
    assert {task_id: set(given) for task_id, given in urls.items()} == TASKS
    run_id = urllib.parse.quote(run.run_id, safe="")
    as_admin.open(f"/dags/links/runs/{run_id}/tasks/broadway.ack/details")
    for name, url in urls["broadway.ack"].items():
        assert as_admin.link(name).get_attribute("href") == url

    # And each leads to its page
    for given in urls.values():
        as_admin.driver.get(given["Broadway"])
        assert as_admin.text("h1") == run.run_id
        assert "3 received" in as_admin.text(".sum")
        report = site.get(given["Report"].removeprefix(site.url), user="admin")
        assert (report.status_code, report.headers["content-type"]) == (
            200,
            "text/plain; charset=utf-8",
        )
        assert report.text.startswith("# Linked\n")
    with history_server(
        site.folder / "events", site.spark_history, site.folder / "logs" / "history.log"
    ):
        history = urls[spark]["Spark"]
        assert history.startswith(f"http://127.0.0.1:{site.spark_history}/history/local-")
        as_admin.until(lambda _: kept(history), "its history has no application", timeout=60)
    as_admin.driver.get(urls["broadway.process"]["Broker's console"])
    for name in ("username", "password"):
        as_admin.find(f"input[name={name}]").send_keys("guest")
    as_admin.find("input[type=submit]").click()
    as_admin.wait_text("Queue linked", "h1", timeout=60)


def kept(address: str) -> bool:
    """Whether the history server has the application's page by now."""
    session = requests.Session()
    session.trust_env = False
    answer = session.get(address, timeout=30)
    return answer.status_code == 200 and "links.broadway.handle_batches" in answer.text
