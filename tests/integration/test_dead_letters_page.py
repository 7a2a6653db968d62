"""The dead letters' page, its child processes and the runs it triggers, on the embedded queue."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.models.dagrun import DagRun
from airflow.sdk import DAG
from airflow.utils.session import create_session
from airflow.utils.state import DagRunState
from sqlalchemy import select

from airflow_broadway.plugin.access import BROWSER_COOKIE, CSRF_FIELD, make_token
from tests.integration.pipelines.puppets import Puppets
from tests.integration.pipelines.running import Ran, World
from tests.unit.plugin.site import Browser, mounted

pytestmark = pytest.mark.airflow

LETTERS = "/broadway/dags/real_letters/pipelines/Puppets/dead-letters"


def dag_of() -> DAG:
    # The queue's name is rendered only in a task.
    pipeline = Puppets(producer={"queue": "{{ 'pup' ~ 'pets' }}", "retry": {"max_attempts": 1}})
    dag: DAG = pipeline.dag("real_letters", default_args={"retry_delay": timedelta(0)})
    return dag


@pytest.fixture
def site(world):
    """The pages over the world's staging root, after a run that dead-lettered two messages."""
    world.numbers(range(2), process="fail")
    world.numbers(range(2, 4))
    ran = world.run(dag_of())
    assert ran.totals["dead_lettered"] == 2
    world.staging.mkdir(exist_ok=True)
    with mounted(world.staging, world.patch) as mounted_site:
        yield mounted_site


def act(browser: Browser, action: str, **fields: Any) -> str:
    """Confirms an action, as the previous page requested it."""
    user = SimpleAuthManagerUser(username="user", role="USER")
    token = make_token(user, browser.cookies[BROWSER_COOKIE])
    form = {CSRF_FIELD: token, "confirmed": "yes", **fields}
    response = browser.post(f"{LETTERS}/{action}", data=form)
    assert response.status_code == 200, response.text
    return str(response.text)


def run_triggered(world: World) -> Ran:
    """Runs the page's triggered run, as a scheduler does: with its conf."""
    with create_session() as session:
        query = select(DagRun).where(
            DagRun.dag_id == "real_letters", DagRun.state == DagRunState.QUEUED
        )
        [run] = session.scalars(query).all()
        conf = dict(run.conf or {})
        session.delete(run)
    return world.run(dag_of(), conf=conf)


def test_dead_letters_are_listed_shown_requeued_and_deleted_on_the_page(world, site):
    # Given a pipeline whose queue's name is rendered only in a task, and two dead letters
    first = world.queue.dead_letters(limit=None)[0].message_id
    browser = site.browser("USER")
    assert "reported by run" in browser.get(LETTERS).text
    assert first not in browser.get(LETTERS).text

    # With access to brokers they are listed, by reason, and one is shown
    world.patch.setenv("AIRFLOW__BROADWAY__ASK_BROKERS", "True")
    response = browser.get(LETTERS)
    assert response.status_code == 200, response.text
    assert "2 in queue &#39;puppets&#39;" in response.text
    assert first in response.text
    assert "&#34;process&#34;: &#34;fail&#34;" in browser.get(f"{LETTERS}/{first}").text

    # When one is requeued, the run of the page handles it, and it fails again
    act(browser, "requeue", scope="marked", chosen=[first])
    assert run_triggered(world).totals["received"] == 1
    assert len(world.queue.dead_letters(limit=None)) == 2

    # When all that match a filter are deleted, the run of the page receives nothing
    world.numbers(range(9, 10))
    act(browser, "delete", scope="all", stage="process")
    run_triggered(world)
    assert world.queue.dead_letters(limit=None) == []
    assert world.depth == (1, 0, 0, 0)
