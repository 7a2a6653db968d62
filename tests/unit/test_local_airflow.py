"""The Airflow of ``make up``, the demo and the tests while its SQLite file is locked."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import sqlalchemy

from scripts.airflow_api import AirflowApi, ApiError
from scripts.sqlite_timeouts import SYNC


def test_sqlite_busy_timeout_is_shorter_on_an_event_loop(tmp_path):
    """The holder of the lock may need that loop to finish."""
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/airflow.db", connect_args=SYNC)

    def patience():
        with engine.connect() as connection:
            return connection.exec_driver_sql("PRAGMA busy_timeout").scalar()

    async def from_a_loop():
        return patience()

    async def from_a_thread_of_it():
        return await asyncio.to_thread(patience)

    assert patience() == 120_000
    assert asyncio.run(from_a_loop()) == 5_000
    assert asyncio.run(from_a_thread_of_it()) == 120_000
    engine.dispose()


class _Answers(BaseHTTPRequestHandler):
    """Answers a GET with a token, a POST with the next of its answers."""

    answers: list[tuple[int, Any]]
    paths: list[str]

    def do_GET(self) -> None:
        self._answer(201, {"access_token": "t"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.paths.append(self.path)
        self._answer(*self.answers.pop(0))

    def _answer(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def server():
    _Answers.answers, _Answers.paths = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield http
        http.shutdown()


LOCKED = (500, {"detail": {"reason": "Database error"}})


def test_request_is_repeated_after_a_database_error(server):
    api = AirflowApi(f"http://127.0.0.1:{server.server_port}")
    _Answers.answers = [LOCKED, LOCKED, (200, {"dag_run_id": "r"})]

    assert api.trigger("flights") == "r"
    assert len(_Answers.paths) == 3


@pytest.mark.parametrize(
    ("answers", "status", "requests"),
    [
        ([LOCKED, LOCKED, LOCKED], 500, 3),
        ([(500, {"detail": "Internal Server Error"})], 500, 1),
        ([(409, {"detail": {"reason": "Unique constraint violation"}})], 409, 1),
        ([(401, {}), (401, {}), (401, {})], 401, 3),
    ],
)
def test_other_errors_are_raised(server, answers, status, requests):
    api = AirflowApi(f"http://127.0.0.1:{server.server_port}")
    _Answers.answers = list(answers)

    with pytest.raises(ApiError) as raised:
        api.trigger("flights")

    assert raised.value.status == status
    assert len(_Answers.paths) == requests
