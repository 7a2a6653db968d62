"""Pages that query a broker: no user waits for another's request, and no viewer sees hosts."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from airflow_broadway.adapters.staging import open_store
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.plugin.children import MOST_BYTES, Children
from airflow_broadway.plugin.depths import Depths
from airflow_broadway.plugin.pages import dead_letters, pipelines
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.runs.backlog.queues import WatchedQueues
from airflow_broadway.runs.backlog.reports import report_backlog
from tests.unit.plugin.site import Site
from tests.unit.plugin.test_dead_letters import PAGE, command, letter, listed

__all__ = ["command"]


def answer_with(
    monkeypatch: pytest.MonkeyPatch, folder: Path, value: dict[str, Any], *, seconds: float = 0.0
) -> None:
    """Makes every child process print this after some seconds."""
    (folder / "answer.json").write_text(json.dumps(value))
    path = str(folder / "answer.json")
    code = f"import time; time.sleep({seconds}); print(open({path!r}).read())"
    children = Children(program=(sys.executable, "-c", code))
    monkeypatch.setattr(dead_letters, "CHILDREN", children)


@asynccontextmanager
async def browsers(site: Site, *roles: str) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Browsers for users of all roles, in one event loop as in an API server."""
    async with AsyncExitStack() as stack:
        clients = [
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app=site.app),
                base_url="http://airflow.test",
                cookies=dict(site.browser(role).cookies),
                timeout=60.0,
            )
            for role in roles
        ]
        yield [await stack.enter_async_context(client) for client in clients]


@pytest.mark.parametrize(
    "value",
    [
        {"error": "a" * 64 * 1024},
        {"error": "password=a@" * 6_000},
        {"answer": listed(*(letter(f"m-{n}", reason="a" * 40_000) for n in range(100)))},
    ],
    ids=["an error of one word", "an error of secrets", "a list"],
)
def test_other_users_are_served_while_a_long_answer_is_rendered(
    site, command, tmp_path, monkeypatch, value
):
    # Given a route of Airflow's own, and a viewer whose page is as large as possible
    @site.app.get("/own")
    def own():
        return "here"

    assert len(json.dumps(value)) < MOST_BYTES
    answer_with(monkeypatch, tmp_path, value)

    async def scenario():
        async with browsers(site, "USER", "VIEWER") as [user, viewer]:
            tasks = asyncio.create_task(user.get(PAGE))
            took = []
            while not tasks.done():
                began = time.monotonic()
                assert (await viewer.get("/own")).json() == "here"
                await asyncio.sleep(0.01)
                took.append(time.monotonic() - began)
            return tasks.result(), took

    answer, took = asyncio.run(scenario())

    assert answer.status_code == (503 if "error" in value else 200)
    assert "aaa" in answer.text or "password" in answer.text
    assert max(took) < 1.5


def test_many_requests_of_a_viewer_do_not_delay_an_admin(site, command, tmp_path, monkeypatch):
    answer_with(monkeypatch, tmp_path, {"answer": listed(letter())}, seconds=0.4)

    async def scenario():
        async with browsers(site, "VIEWER", "ADMIN") as [viewer, admin]:
            tasks = [asyncio.create_task(viewer.get(f"{PAGE}?reason={n}")) for n in range(12)]
            await asyncio.sleep(0.1)
            answer = await admin.get(f"{PAGE}?reason=admin")
            before = sum(task.done() for task in tasks)
            return [answer, *await asyncio.gather(*tasks)], before

    answers, before = asyncio.run(scenario())

    assert [answer.status_code for answer in answers] == [200] * 13
    assert before <= 3


@pytest.mark.parametrize("there", [True, False], ids=["unused queue", "no file"])
def test_viewer_sees_neither_other_queues_nor_their_file(
    site, command, tmp_path, monkeypatch, there
):
    # Given an unused queue, in the file of another team
    children = Children(timeout=120.0)
    monkeypatch.setattr(dead_letters, "CHILDREN", children)
    monkeypatch.setattr(pipelines, "DEPTHS", Depths(children))
    path = str(tmp_path / "team.db")
    if there:
        with SqliteQueue(path, "payroll") as queue:
            queue.send([b"1"])
    queues = WatchedQueues("Orders", [SqliteProducer(queue="orders", path=path)])
    store = open_store(site.staging.as_uri())
    depth = QueueDepth(0, 0, 0, 0, None)
    report_backlog(store, "letters_unit", queues, depth, at=datetime.now(UTC), by="run r")

    for address in (PAGE, "/broadway/pipelines?q=letters_unit"):
        text = site.browser("VIEWER").get(address).text
        assert "Orders" in text
        assert "payroll" not in text
        assert str(tmp_path) not in text
    assert path in site.browser("USER").get(PAGE).text
