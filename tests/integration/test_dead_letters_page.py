"""The dead letters' page with the command line behind it, on the embedded queue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.plugin.access import BROWSER_COOKIE, CSRF_FIELD, make_token
from airflow_broadway.plugin.declared import declared_pipeline
from airflow_broadway.plugin.rendered import reference_of
from tests.integration.pipelines.puppets import Puppets
from tests.integration.pipelines.running import World
from tests.unit.plugin.site import Browser, Site, mounted

pytestmark = pytest.mark.airflow

LETTERS = "/broadway/dags/real_letters/pipelines/Puppets/dead-letters"


@pytest.fixture
def site(world: World) -> Iterator[Site]:
    """The pages over the world's staging root, after a run that set two messages aside."""
    world.numbers(range(2), process="fail")
    world.numbers(range(2, 4))
    # Which queue it is, only a task knows.
    pipeline = Puppets(producer={"queue": "{{ 'pup' ~ 'pets' }}", "retry": {"max_attempts": 1}})
    ran = world.run(pipeline.dag("real_letters", default_args={"retry_delay": timedelta(0)}))
    assert ran.totals["dead_lettered"] == 2
    world.staging.mkdir(exist_ok=True)
    with mounted(world.staging, world.patch) as made:
        yield made


def act(browser: Browser, action: str, **fields: Any) -> str:
    """Confirm an action, as the page before has asked for it."""
    user = SimpleAuthManagerUser(username="user", role="USER")
    token = make_token(user, browser.cookies[BROWSER_COOKIE], int(time.time()))
    sent = {CSRF_FIELD: token, "confirmed": "yes", **fields}
    answer = browser.post(f"{LETTERS}/{action}", data=sent)
    assert answer.status_code == 200, answer.text
    return str(answer.text)


def test_letters_are_listed_shown_sent_back_and_deleted(world: World, site: Site) -> None:
    # Given a pipeline of which only a task knows the queue, and two letters
    declared = declared_pipeline("real_letters", "Puppets")
    assert declared is not None
    assert reference_of(declared)["options"]["producer"]["queue"] == "puppets"
    first, second = (each.message_id for each in world.queue.dead_letters(limit=None))
    browser = site.browser("USER")

    # They are listed, by reason, and one is shown
    listed = browser.get(LETTERS)
    assert listed.status_code == 200, listed.text
    assert "2 in queue &#39;puppets&#39;" in listed.text
    assert first in listed.text
    assert "&#34;process&#34;: &#34;fail&#34;" in browser.get(f"{LETTERS}/{first}").text

    # When one is sent back while somebody else deletes the other
    world.queue.purge_dead([second])
    done = act(browser, "requeue", scope="marked", chosen=[first, second])

    # Then the page says what became of each, and the next run receives it
    assert "1 dead letter was" in done
    assert second in done.split("Somebody else was faster", 1)[1]
    assert [each.message_id for each in world.queue.receive("g", 9)] == [first]

    # When it fails again, and all that a filter finds are deleted
    world.queue.settle("g", Settlement(rest=Verdict(Action.DEAD_LETTER, 0.0, "again", "batch")))
    done = act(browser, "delete", scope="all", reason="again")

    # Then it is gone
    assert "1 dead letter was" in done
    assert world.depth == (0, 0, 0, 0)


@pytest.mark.slow
def test_a_hundred_thousand_letters_are_shown_in_pages_and_all_sent_back(
    world: World, site: Site
) -> None:
    world.queue.purge_dead()
    for at in range(0, 100_000, 10_000):
        world.numbers(range(at, at + 10_000))
        world.queue.receive(f"g{at}", 10_000)
        dead = Verdict(Action.DEAD_LETTER, 0.0, f"reason {at}", "process")
        world.queue.settle(f"g{at}", Settlement(rest=dead))
    browser = site.browser("USER")
    thin = "\N{NARROW NO-BREAK SPACE}"

    last = browser.get(f"{LETTERS}?page=1000")
    done = act(browser, "requeue", scope="all")

    assert f"Page 1{thin}000 of 1{thin}000" in last.text
    assert f"99{thin}901 to 100{thin}000" in last.text
    assert f"100{thin}000 dead letters were sent back" in done
    assert world.depth == (100_000, 0, 0, 0)
