"""The Airflow of ``make up``, the demo and the tests, where its SQLite is in use by others."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from scripts.airflow_api import AirflowApi, ApiError
from scripts.airflow_patience import SYNC


def test_who_asks_sqlite_from_an_event_loop_waits_less_than_others(tmp_path: Path) -> None:
    """Whoever has the file may need that loop to come to its end."""
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/airflow.db", connect_args=SYNC)

    def patience() -> Any:
        with engine.connect() as connection:
            return connection.exec_driver_sql("PRAGMA busy_timeout").scalar()

    async def from_a_loop() -> Any:
        return patience()

    async def from_a_thread_of_it() -> Any:
        return await asyncio.to_thread(patience)

    assert patience() == 120_000
    assert asyncio.run(from_a_loop()) == 5_000
    assert asyncio.run(from_a_thread_of_it()) == 120_000
    engine.dispose()


class _Answers(BaseHTTPRequestHandler):
    """Answers each request with the next of its list; a token to whoever wants one."""

    left: list[tuple[int, Any]]
    asked: list[str]

    def do_GET(self) -> None:
        self._answer(201, {"access_token": "t"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(self.path)
        self._answer(*self.left.pop(0))

    def _answer(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    _Answers.left, _Answers.asked = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as made:
        threading.Thread(
            target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        yield made
        made.shutdown()


LOCKED = (500, {"detail": {"reason": "Database error"}})


def test_what_the_database_did_not_do_is_asked_for_again(server: ThreadingHTTPServer) -> None:
    api = AirflowApi(f"http://127.0.0.1:{server.server_port}")
    _Answers.left = [LOCKED, LOCKED, (200, {"dag_run_id": "r"})]

    assert api.trigger("flights") == "r"
    assert len(_Answers.asked) == 3


@pytest.mark.parametrize(
    ("answers", "status", "asked"),
    [
        ([LOCKED, LOCKED, LOCKED], 500, 3),
        ([(500, {"detail": "Internal Server Error"})], 500, 1),
        ([(409, {"detail": {"reason": "Unique constraint violation"}})], 409, 1),
        ([(401, {}), (401, {}), (401, {})], 401, 3),
    ],
)
def test_other_errors_are_raised(
    server: ThreadingHTTPServer, answers: list[Any], status: int, asked: int
) -> None:
    api = AirflowApi(f"http://127.0.0.1:{server.server_port}")
    _Answers.left = list(answers)

    with pytest.raises(ApiError) as raised:
        api.trigger("flights")

    assert raised.value.status == status
    assert len(_Answers.asked) == asked
