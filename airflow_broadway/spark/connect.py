"""The sessions of an application on a Spark Connect server.

The driver is a client of the server: it has no JVM.  Each batch has a session of its own, with the
pipeline's code as artifacts.  The id of a session depends on the run, the task, the try and the
batch, so that a later try releases the session, and thereby ends the jobs, of a driver that was
killed in the batch.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.log_context import keep_ids
from airflow_broadway.spark.session import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("airflow_broadway.spark")

#: The variable of a driver that describes its server: the URL may include a token.
VARIABLE = "AIRFLOW_BROADWAY_CONNECT"
#: For about a minute a call is tried again, in milliseconds: a server may be started again.
RETRIES: Mapping[str, Any] = {"max_retries": 10, "max_backoff": 10_000}
#: The timeout for a server to accept a connection, in seconds.
TIMEOUT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A Spark Connect server, and what each session on it gets.

    :param url: ``sc://host:port/;parameter=value``.
    :param conf: Settings of a session.
    :param artifacts: Kind of artifact (``"pyfile"``, ``"file"``, ``"archive"``) → paths.
    """

    url: str
    conf: Mapping[str, str] = field(default_factory=dict)
    artifacts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The URL without parameters, which may be secret."""
        return address_of(self.url)

    def dumps(self) -> str:
        """Returns the value of :data:`VARIABLE`."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Server:
        """Reads the value of :data:`VARIABLE`."""
        return cls(**json.loads(text))


def address_of(url: str) -> str:
    """Returns the URL of a server without its parameters, which may be secret."""
    return url.partition(";")[0].rstrip("/")


class ConnectSessions:
    """Sessions on a Spark Connect server; see :class:`airflow_broadway.spark.session.Sessions`.

    :param run: The run's folder, and the id of its root: other hosts may have the same folder.
    :raises PipelineError: If the server does not answer, or its Spark is older than the client's.
    """

    def __init__(self, server: Server, run: str, work: Work) -> None:
        self._server = server
        self._name = f"{run}/{work.name}"
        self._try = work.try_number
        #: Batch → its session.  Sessions are opened and released by the threads of batches.
        self._open_sessions: dict[str, Any] = {}
        self._own = threading.local()
        self._check_server()
        #: The application's own session.
        self.main = self._open("")
        try:
            self._prepare(self.main)
        except BaseException:
            self.close()
            raise

    @property
    def application_id(self) -> str:
        return str(self.main.session_id)

    def open(self, batch_id: str, description: str, pool: str) -> SparkSession:
        self._release(getattr(self._own, "batch_id", ""))
        self._own.batch_id = batch_id
        session = self._open_sessions[batch_id] = self._open(batch_id)
        self._prepare(session)
        session.addTag(batch_id)
        return session  # type: ignore[no-any-return]

    def cancel(self, batch_id: str) -> None:
        session = self._open_sessions.get(batch_id)
        if session is not None:
            with suppress(Exception):
                session.interruptAll()

    def why_lost(self) -> str:
        # Of the thread's batch: a server that was started again has none of the sessions.
        session = self._open_sessions.get(getattr(self._own, "batch_id", ""), self.main)
        try:
            session.conf.get("spark.sql.session.timeZone")
        except Exception as error:
            return f"the Spark Connect server {self._server.address} is lost ({_reason(error)})"
        return ""

    def make_thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=keep_ids(target), name=name, daemon=True)

    def end_earlier(self, batch_ids: Iterable[str]) -> None:
        """Releases the sessions of batches in earlier tries, and so ends their jobs, which may
        occupy each core of the server; best effort.
        """
        from pyspark.sql.connect.client import SparkConnectClient
        from pyspark.sql.connect.client.retries import DefaultPolicy

        for number, batch_id in product(range(1, self._try), ["", *batch_ids]):
            with suppress(Exception):
                client = SparkConnectClient(self._url(number, batch_id))
                client.set_retry_policies([DefaultPolicy(max_retries=0)])
                try:
                    client.release_session()
                finally:
                    client.close()

    def close(self) -> None:
        """Releases all sessions; their jobs end."""
        for batch_id in list(self._open_sessions):
            self._release(batch_id)
        _stop(self.main)

    def _release(self, batch_id: str) -> None:
        session = self._open_sessions.pop(batch_id, None)
        if session is not None:
            _stop(session)

    # ----------------------------------------------------------------------------------------------

    def _check_server(self) -> None:
        import grpc
        from pyspark.sql.connect.client import DefaultChannelBuilder

        channel = DefaultChannelBuilder(self._server.url).toChannel()
        try:
            grpc.channel_ready_future(channel).result(TIMEOUT)
        except grpc.FutureTimeoutError:
            raise PipelineError(
                f"the Spark Connect server {self._server.address} does not accept connections"
                f" (waited {TIMEOUT:g} s): start it, or correct remote, or the connection; it must"
                " use TLS if the URL has a token or use_ssl=true"
            ) from None
        finally:
            channel.close()

    def _open(self, batch_id: str) -> Any:
        from pyspark.sql.connect.client.retries import DefaultPolicy
        from pyspark.sql.connect.session import SparkSession

        session: Any = SparkSession.builder.remote(self._url(self._try, batch_id)).create()
        session.client.set_retry_policies([DefaultPolicy(**RETRIES)])
        return session

    def _prepare(self, session: Any) -> None:
        """Checks the server's version, and adds settings and code.

        :raises PipelineError: If the server is not suitable, or does not take a setting.
        """
        import pyspark

        server = self._server
        try:
            theirs, ours = session.version, pyspark.__version__
        except Exception as error:
            raise PipelineError(
                f"the Spark Connect server {server.address} opens no session: {_reason(error)}"
            ) from error
        if _numbers(theirs) < _numbers(ours):
            raise PipelineError(
                f"the Spark Connect server {server.address} runs Spark {theirs}, which is older"
                f" than this worker's pyspark {ours}: update the server, or install"
                f" pyspark-client=={theirs} on the workers"
            )
        for name, value in {**SETTINGS, **server.conf}.items():
            try:
                session.conf.set(name, value)
            except Exception as error:
                raise PipelineError(
                    f"the Spark Connect server {server.address} does not take the setting {name} of"
                    f" a session ({_reason(error)}): set it where the server is started, and remove"
                    " it from conf"
                ) from error
        for kind, paths in server.artifacts.items():
            if paths:
                session.addArtifacts(*paths, **{kind: True})

    def _url(self, number: int, batch_id: str) -> str:
        session = uuid.uuid5(uuid.NAMESPACE_URL, f"{self._name}/{number}/{batch_id}")
        url = self._server.url.rstrip(";/")
        return f"{url}{';' if ';' in url else '/;'}session_id={session}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _stop(session: Any) -> None:
    """Releases a session; tried once, because the server may be gone."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    session.client.set_retry_policies([DefaultPolicy(max_retries=0)])
    session.stop()


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    details = re.search(r'details = "(.*)"', text)
    return f"{type(error).__name__}: {details[1] if details else text.partition(chr(10))[0]}"
