"""Pages that ask a broker: no user waits for another's question, and no viewer is told of hosts."""

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
from tests.unit.plugin.test_dead_letters import PAGE, Command, command, letter, listed

__all__ = ["command"]


def answer_with(
    monkeypatch: pytest.MonkeyPatch, folder: Path, value: dict[str, Any], *, seconds: float = 0.0
) -> None:
    """Have every child process print this after some seconds."""
    (folder / "answer.json").write_text(json.dumps(value))
    path = str(folder / "answer.json")
    code = f"import time; time.sleep({seconds}); print(open({path!r}).read())"
    children = Children(program=(sys.executable, "-c", code))
    monkeypatch.setattr(dead_letters, "CHILDREN", children)


@asynccontextmanager
async def browsers(site: Site, *roles: str) -> AsyncIterator[list[httpx.AsyncClient]]:
    """A browser for a user of each role, in one event loop as in an API server."""
    async with AsyncExitStack() as stack:
        made = [
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app=site.app),
                base_url="http://airflow.test",
                cookies=dict(site.browser(role).cookies),
                timeout=60.0,
            )
            for role in roles
        ]
        yield [await stack.enter_async_context(each) for each in made]


@pytest.mark.parametrize(
    "value",
    [
        {"error": "a" * 64 * 1024},
        {"error": "password=a@" * 6_000},
        {"answer": listed(*(letter(f"m-{n}", reason="a" * 40_000) for n in range(100)))},
    ],
    ids=["an error of one word", "an error of secrets", "a list"],
)
def test_other_users_are_answered_while_a_long_answer_is_shown(
    site: Site,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: dict[str, Any],
) -> None:
    # Given a route of Airflow's own, and a viewer whose page has as much to show as it may have
    @site.app.get("/own")
    def own() -> str:
        return "here"

    assert len(json.dumps(value)) < MOST_BYTES
    answer_with(monkeypatch, tmp_path, value)

    async def scenario() -> tuple[httpx.Response, list[float]]:
        async with browsers(site, "USER", "VIEWER") as [user, viewer]:
            asked = asyncio.create_task(user.get(PAGE))
            took = []
            while not asked.done():
                began = time.monotonic()
                assert (await viewer.get("/own")).json() == "here"
                await asyncio.sleep(0.01)
                took.append(time.monotonic() - began)
            return asked.result(), took

    answer, took = asyncio.run(scenario())

    assert answer.status_code == (503 if "error" in value else 200)
    assert "aaa" in answer.text or "password" in answer.text
    assert max(took) < 1.5


def test_many_requests_of_a_viewer_keep_no_admin_waiting(
    site: Site, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, tmp_path, {"answer": listed(letter())}, seconds=0.4)

    async def scenario() -> tuple[list[httpx.Response], int]:
        async with browsers(site, "VIEWER", "ADMIN") as [viewer, admin]:
            asked = [asyncio.create_task(viewer.get(f"{PAGE}?reason={n}")) for n in range(12)]
            await asyncio.sleep(0.1)
            answer = await admin.get(f"{PAGE}?reason=admin")
            before = sum(each.done() for each in asked)
            return [answer, *await asyncio.gather(*asked)], before

    answers, before = asyncio.run(scenario())

    assert [each.status_code for each in answers] == [200] * 13
    assert before <= 3


@pytest.mark.parametrize("there", [True, False], ids=["unused queue", "no file"])
def test_a_viewer_is_told_neither_other_queues_nor_the_path_of_their_file(
    site: Site, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    # Given a queue that nobody has used yet, in the file of another team
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
