"""A staging root that does not answer: pages say so in time, and hold up nobody else."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from airflow_broadway.core.errors import StagingError
from airflow_broadway.plugin.declared import RunTasks
from airflow_broadway.plugin.pages import message, pipelines, run
from airflow_broadway.plugin.reading import Reading
from airflow_broadway.staging.disk import Disk
from tests.unit.plugin.dags import add_runs, stored_dags
from tests.unit.plugin.site import Site
from tests.unit.plugin.test_pipelines import Orders

RUN = "/broadway/dags/slow/runs/manual__1"
PAGES = (RUN, f"{RUN}/live", f"{RUN}/message?q=a", f"{RUN}/report", "/broadway/?q=slow")
#: Seconds that each call of the root would take.
PATIENCE = 30.0
SAID = "The staging folder did not answer within 0.3 s"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every call of a disk waits for it."""
    made = threading.Event()
    for name in ("read", "exists", "list"):
        quick = getattr(Disk, name)

        def slow(self: Disk, path: str, quick: Any = quick) -> Any:
            made.wait(PATIENCE)
            return quick(self, path)

        monkeypatch.setattr(Disk, name, slow)
    yield made
    made.set()


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    """That of the pages, in a hurry."""
    made = Reading(seconds=0.3, most=2)
    for module in (message, pipelines, run):
        monkeypatch.setattr(module, "READING", made)
    known = RunTasks(state=None)
    monkeypatch.setattr(message, "tasks_of_run", lambda dag_id, run_id: known)
    return made


def readers() -> int:
    return sum(each.name == "broadway-reading" for each in threading.enumerate())


def test_a_thread_that_cannot_be_started_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Reading(most=1)

    def fails(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> str:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fails)
            with pytest.raises(RuntimeError, match="can't start"):
                await made(lambda: "one")
        return await made(lambda: "two")

    assert asyncio.run(scenario()) == "two"


def test_pages_say_so_in_time_and_others_answer_meanwhile(
    site: Site, gate: threading.Event, reading: Reading
) -> None:
    # Given a route of Airflow's own, which needs one of its threads
    @site.app.get("/own")
    def own() -> str:
        return "here"

    cookies = dict(site.browser("VIEWER").cookies)

    async def scenario() -> tuple[list[httpx.Response], list[float], int]:
        transport = httpx.ASGITransport(app=site.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://airflow.test", cookies=cookies
        ) as client:
            # When more people than threads look at pages of a root that hangs
            asked = [asyncio.create_task(client.get(each)) for each in PAGES * 20]
            took = []
            while not all(each.done() for each in asked):
                began = time.monotonic()
                assert (await client.get("/own")).json() == "here"
                took.append(time.monotonic() - began)
                await asyncio.sleep(0.01)
            return [each.result() for each in asked], took, readers()

    with stored_dags(Orders().dag("slow")):
        add_runs("slow", {"manual__1": "running"})
        answers, took, held = asyncio.run(scenario())

    # Then each is told so
    for answer in answers:
        live = answer.request.url.path.endswith("/live")
        assert answer.status_code == (200 if live else 503), answer.text
        assert SAID in answer.text
    # And nobody else has waited for the root, nor do threads pile up
    assert took
    assert max(took) < PATIENCE / 2
    assert held <= 2


def test_when_it_answers_again_pages_do_too(
    site: Site, gate: threading.Event, reading: Reading
) -> None:
    with stored_dags(Orders().dag("slow")):
        add_runs("slow", {"manual__1": "running"})
        browser = site.browser("VIEWER")
        first = browser.get(RUN)

        gate.set()
        while readers():
            time.sleep(0.01)
        second = browser.get(f"{RUN}/live")

    # The page goes on asking, and has what Airflow itself knows
    assert first.status_code == 503
    assert f'data-live="{RUN}/live"' in first.text
    assert "This page retries." in first.text
    assert (second.status_code, SAID in second.text) == (200, False)


async def _read(reading: Reading, work: Any) -> Any:
    return await reading(work)


def test_what_reading_raises_is_raised() -> None:
    def fail() -> None:
        raise StagingError("is damaged")

    def slow() -> None:
        raise TimeoutError("of a socket")

    with pytest.raises(StagingError, match="is damaged"):
        asyncio.run(_read(Reading(), fail))
    with pytest.raises(TimeoutError, match="of a socket"):
        asyncio.run(_read(Reading(), slow))
    assert asyncio.run(_read(Reading(), lambda: 7)) == 7
