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
    # Which queue it is, only a task knows.
    pipeline = Puppets(producer={"queue": "{{ 'pup' ~ 'pets' }}", "retry": {"max_attempts": 1}})
    dag: DAG = pipeline.dag("real_letters", default_args={"retry_delay": timedelta(0)})
    return dag


@pytest.fixture
def site(world):
    """The pages over the world's staging root, after a run that set two messages aside."""
    world.numbers(range(2), process="fail")
    world.numbers(range(2, 4))
    ran = world.run(dag_of())
    assert ran.totals["dead_lettered"] == 2
    world.staging.mkdir(exist_ok=True)
    with mounted(world.staging, world.patch) as made:
        yield made


def act(browser: Browser, action: str, **fields: Any) -> str:
    """Confirm an action, as the page before has asked for it."""
    user = SimpleAuthManagerUser(username="user", role="USER")
    token = make_token(user, browser.cookies[BROWSER_COOKIE])
    sent = {CSRF_FIELD: token, "confirmed": "yes", **fields}
    answer = browser.post(f"{LETTERS}/{action}", data=sent)
    assert answer.status_code == 200, answer.text
    return str(answer.text)


def moved(world: World) -> Ran:
    """Runs what the page has just triggered, as a scheduler does: with the conf of its run."""
    with create_session() as session:
        wanted = select(DagRun).where(
            DagRun.dag_id == "real_letters", DagRun.state == DagRunState.QUEUED
        )
        [run] = session.scalars(wanted).all()
        conf = dict(run.conf or {})
        session.delete(run)
    return world.run(dag_of(), conf=conf)


def test_letters_are_listed_shown_requeued_and_deleted(world, site):
    # Given a pipeline of which only a task knows the queue, and two letters
    first = world.queue.dead_letters(limit=None)[0].message_id
    browser = site.browser("USER")
    assert "reported by run" in browser.get(LETTERS).text
    assert first not in browser.get(LETTERS).text

    # Where brokers may be asked they are listed, by reason, and one is shown
    world.patch.setenv("AIRFLOW__BROADWAY__ASK_BROKERS", "True")
    listed = browser.get(LETTERS)
    assert listed.status_code == 200, listed.text
    assert "2 in queue &#39;puppets&#39;" in listed.text
    assert first in listed.text
    assert "&#34;process&#34;: &#34;fail&#34;" in browser.get(f"{LETTERS}/{first}").text

    # When one is sent back, the run of the page handles it, and it fails again
    act(browser, "requeue", scope="marked", chosen=[first])
    assert moved(world).totals["received"] == 1
    assert len(world.queue.dead_letters(limit=None)) == 2

    # When all that a filter finds are deleted, the run of the page receives nothing
    world.numbers(range(9, 10))
    act(browser, "delete", scope="all", stage="process")
    moved(world)
    assert world.queue.dead_letters(limit=None) == []
    assert world.depth == (1, 0, 0, 0)
