"""A staging root that does not respond: pages time out, and others are not delayed."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any
from unittest import mock

import httpx
import pytest

from airflow_broadway.core.errors import StagingError
from airflow_broadway.plugin.declared import RunTasks
from airflow_broadway.plugin.pages import message, pipelines, run
from airflow_broadway.plugin.reading import Reading
from airflow_broadway.staging.disk import Disk
from tests.unit.plugin.dags import add_runs, stored_dags
from tests.unit.plugin.test_pipelines import Orders

RUN = "/broadway/dags/slow/runs/manual__1"
PAGES = (RUN, f"{RUN}/live", f"{RUN}/message?q=a", f"{RUN}/report", "/broadway/?q=slow")
#: Seconds that a call of the root would take.
PATIENCE = 30.0
TIMED_OUT = "The staging folder did not answer within 0.3 s"


@pytest.fixture
def gate(monkeypatch):
    """Every call of a disk waits for it."""
    gate = threading.Event()
    for name in ("read", "exists", "list"):
        quick = getattr(Disk, name)

        def slow(self, path, quick=quick):
            gate.wait(PATIENCE)
            return quick(self, path)

        monkeypatch.setattr(Disk, name, slow)
    yield gate
    gate.set()


@pytest.fixture
def reading(monkeypatch):
    """That of the pages, in a hurry."""
    reading = Reading(seconds=0.3, most=2)
    for module in (message, pipelines, run):
        monkeypatch.setattr(module, "READING", reading)
    known = RunTasks(state=None)
    monkeypatch.setattr(message, "tasks_of_run", lambda dag_id, run_id: known)
    return reading


def readers() -> int:
    return sum(t.name == "broadway-reading" for t in threading.enumerate())


def test_failed_thread_start_frees_its_slot(monkeypatch):
    reading = Reading(most=1)

    fails = mock.Mock(side_effect=RuntimeError("can't start new thread"))

    async def scenario():
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fails)
            with pytest.raises(RuntimeError, match="can't start"):
                await reading(lambda: "one")
        return await reading(lambda: "two")

    assert asyncio.run(scenario()) == "two"


def test_hanging_root_times_out_without_blocking_others(site, gate, reading):
    # Given a route of Airflow's own, which needs one of its threads
    @site.app.get("/own")
    def own():
        return "here"

    cookies = dict(site.browser("VIEWER").cookies)

    async def scenario():
        transport = httpx.ASGITransport(app=site.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://airflow.test", cookies=cookies
        ) as client:
            # When more requests than threads need a root that hangs
            tasks = [asyncio.create_task(client.get(page)) for page in PAGES * 20]
            took = []
            while not all(task.done() for task in tasks):
                began = time.monotonic()
                assert (await client.get("/own")).json() == "here"
                took.append(time.monotonic() - began)
                await asyncio.sleep(0.01)
            return [task.result() for task in tasks], took, readers()

    with stored_dags(Orders().dag("slow")):
        add_runs("slow", {"manual__1": "running"})
        answers, took, count = asyncio.run(scenario())

    # Then all responses are timeouts
    for answer in answers:
        live = answer.request.url.path.endswith("/live")
        assert answer.status_code == (200 if live else 503), answer.text
        assert TIMED_OUT in answer.text
    # And other requests have not waited for the root, nor do threads pile up
    assert took
    assert max(took) < PATIENCE / 2
    assert count <= 2


def test_pages_recover_when_the_root_responds(site, gate, reading):
    with stored_dags(Orders().dag("slow")):
        add_runs("slow", {"manual__1": "running"})
        browser = site.browser("VIEWER")
        first = browser.get(RUN)

        gate.set()
        while readers():
            time.sleep(0.01)
        second = browser.get(f"{RUN}/live")

    # The page polls on, and has the state that Airflow knows
    assert first.status_code == 503
    assert f'data-live="{RUN}/live"' in first.text
    assert "This page retries." in first.text
    assert (second.status_code, TIMED_OUT in second.text) == (200, False)


async def _read(reading: Reading, work: Any) -> Any:
    return await reading(work)


def test_reading_error_is_raised():
    for error in (StagingError("is damaged"), TimeoutError("of a socket")):
        with pytest.raises(type(error), match=str(error)):
            asyncio.run(_read(Reading(), mock.Mock(side_effect=error)))
    assert asyncio.run(_read(Reading(), lambda: 7)) == 7
