"""An S3 server on loopback that counts requests: moto's, in a thread of this process."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import fsspec

from airflow_broadway.staging.store import Store


class Requests(Counter[tuple[str, str]]):
    """Requests by kind (``PUT``, ``GET``, ``HEAD``, ``LIST``, ``DELETE``) and by key or prefix."""

    #: Seconds in which they were made, but for the server's own: it scans all keys for a list.
    seconds = 0.0

    def of(self, *kinds: str, part: str = "") -> int:
        """Returns the requests of these kinds, or of any, with ``part`` in their keys."""
        return sum(
            count
            for (kind, key), count in self.items()
            if (not kinds or kind in kinds) and part in key
        )


class S3Server:
    """The server, and its requests so far."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self.requests = Requests()
        self.busy = 0.0
        self.endpoint = ""
        #: A header that the server ignores, as in WSGI.
        self.ignored = ""
        #: An access key whose requests it denies.
        self.denied = ""
        #: Called for each request: ``"before"`` its execution, and ``"after"``, before the answer.
        self.on_request: Callable[[str], None] = lambda moment: None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        kind, key = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        query = environ.get("QUERY_STRING", "")
        if kind == "GET" and "list-type" in query:
            kind, key = "LIST", f"{key}?{query}"
        with self._lock:
            self.requests[kind, key] += 1
        self.on_request("before")
        environ.pop(self.ignored, None)
        if self.denied and f"Credential={self.denied}/" in environ.get("HTTP_AUTHORIZATION", ""):
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>InvalidAccessKeyId</Code><Message>No such key</Message></Error>"]
        begun = time.perf_counter()
        # S3 creates an object atomically; moto checks, then writes.
        with self._writing if kind == "PUT" else nullcontext():
            answer = self._app(environ, start_response)
        with self._lock:
            self.busy += time.perf_counter() - begun
        self.on_request("after")
        return answer

    @contextmanager
    def counted(self) -> Iterator[Requests]:
        """Counts requests from now on; complete when the context ends."""
        with self._lock:
            before, idle = Requests(self.requests), time.perf_counter() - self.busy
        counted = Requests()
        try:
            yield counted
        finally:
            with self._lock:
                counted.seconds = time.perf_counter() - self.busy - idle
                counted.update(
                    {k: n - before[k] for k, n in self.requests.items() if n > before[k]}
                )

    def root(self) -> str:
        """Returns the URI of a staging root in a new bucket."""
        bucket = f"bucket-{uuid.uuid4().hex}"
        self.store(f"s3://{bucket}").fs.mkdir(bucket)
        return f"s3://{bucket}/staging"

    def options(self) -> dict[str, Any]:
        """Returns s3fs's options for this server; every store opens its own client."""
        return {
            "key": "test",
            "secret": "test",
            "client_kwargs": {"endpoint_url": self.endpoint},
            "skip_instance_cache": True,
        }

    def store(self, uri: str) -> Store:
        """Opens a staging root with its own client."""
        return Store.open(uri, **self.options())


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Starts an empty server."""
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    class Silent(MotoRequestHandler):  # type: ignore[misc, unused-ignore]
        def log(self, *args: Any) -> None:
            """Logs nothing."""

    app = S3Server(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, True, request_handler=Silent)
    host, port = server.server_address[:2]
    app.endpoint = f"http://{host!s}:{port}"
    thread = threading.Thread(target=server.serve_forever, name="s3", daemon=True)
    thread.start()
    # Producers open the bucket by the environment.
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_ENDPOINT_URL_S3": app.endpoint,
    }
    clients = fsspec.get_filesystem_class("s3")
    clients.clear_instance_cache()
    try:
        with mock.patch.dict(os.environ, environment):
            yield app
    finally:
        clients.clear_instance_cache()
        server.shutdown()
        server.server_close()
        thread.join()
