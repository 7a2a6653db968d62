"""The sessions of an application on a Spark Connect server.

The driver is a client of the server: it has no JVM.  Each batch has a session of its own, with the
pipeline's code as artifacts.  The id of a session depends on the run, the task, the try and the
batch, so that a later try releases the session, and thereby ends the jobs, of a driver that was
killed in the batch.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.log_context import keep_ids
from airflow_broadway.spark.session import SETTINGS, SparkLost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The variable of a driver that describes its server: the URL may include a token.
VARIABLE = "AIRFLOW_BROADWAY_CONNECT"
#: For about a minute a call is tried again, in milliseconds: a server may be started again.
RETRIES: Mapping[str, Any] = {"max_retries": 10, "max_backoff": 10_000}
#: For a call that is not tried again.
ONCE: Mapping[str, Any] = {"max_retries": 0}
#: A server whose host has vanished is noticed after five minutes; Spark refuses shorter intervals.
KEEPALIVE = [("grpc.keepalive_time_ms", 300_000), ("grpc.keepalive_timeout_ms", 20_000)]
#: Seconds between two uses of a session.
KEEP_INTERVAL = 300.0
#: Errors of a connection, as gRPC writes them.
_BROKEN = re.compile(
    r"StatusCode\.(UNAVAILABLE|CANCELLED|DEADLINE_EXCEEDED|UNAUTHENTICATED)|RST_STREAM"
)
#: Begins of Spark's errors if the server gave up the operation of a client that was away, or ends.
_GIVEN_UP = re.compile(
    r"(\(\S+\) )?(\[(INVALID_HANDLE|INVALID_CURSOR|RESPONSE_ALREADY_RECEIVED)\b"
    r"|(Job \d+|Stage) cancelled because SparkContext was shut down"
    r"|SparkContext has been shutdown|Cannot call methods on a stopped SparkContext)"
)
#: Held while ``sys.path`` changes.
_PATH = threading.Lock()
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

    :param tries: The number of each try of the work, in order, this one last → text that identifies
        its work everywhere.
    :raises PipelineError: If the server does not answer, or its Spark is older than the client's.
    """

    def __init__(self, server: Server, tries: Mapping[int, str]) -> None:
        self._server = server
        *self._earlier, self._name = tries.values()
        #: Batch → its session.  Sessions are opened and released by the threads of batches.
        self._sessions: dict[str, Any] = {}
        self._own = threading.local()
        self._closed = threading.Event()
        #: The application's own session.
        self.main = self._open("")
        try:
            self._await_server()
            self._prepare(self.main)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._keep, name="keep-sessions", daemon=True).start()

    @property
    def application_id(self) -> str:
        return str(self.main.session_id)

    def open(self, batch_id: str, description: str, pool: str) -> SparkSession:
        self._release(getattr(self._own, "batch_id", ""))
        self._own.batch_id = batch_id
        try:
            session = self._sessions[batch_id] = self._open(batch_id)
            self._prepare(session)
        except Exception as error:
            raise SparkLost(self._lost(error)) from error
        session.addTag(batch_id)
        return session  # type: ignore[no-any-return]

    def cancel(self, batch_id: str) -> None:
        session = self._sessions.get(batch_id)
        if session is not None:
            with suppress(Exception):
                session.interruptAll()

    def why_lost(self, cause: BaseException | None = None) -> str:
        if cause is not None and _is_of_transport(cause):
            return self._lost(cause)  # even if the server is back: the batch has not failed
        # Of the thread's batch: a server that was started again has none of the sessions.
        session = self._sessions.get(getattr(self._own, "batch_id", ""), self.main)
        try:
            session.conf.get("spark.sql.session.timeZone")
        except Exception as error:
            return self._lost(error)
        return ""

    def _lost(self, error: BaseException) -> str:
        return f"the Spark Connect server {self._server.address} is lost ({_reason(error)})"

    def make_thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=keep_ids(target), name=name, daemon=True)

    def check_daily(self, check: Callable[[], None]) -> None:
        """Runs a check of the server's Python, unless it has succeeded today, on this server.

        A success is recorded by a global temporary view, which ends with the server.  On a server
        without such views the check is always run.
        """
        text = f"{time.strftime('%F', time.gmtime())} {sys.version}"
        view = f"airflow_broadway_{uuid.uuid5(uuid.NAMESPACE_URL, text).hex}"
        with suppress(Exception):
            if self.main.catalog.tableExists(f"global_temp.{view}"):
                return
        check()
        with suppress(Exception):
            self.main.range(0).createOrReplaceGlobalTempView(view)

    def end_earlier(self, batch_ids: Iterable[str]) -> None:
        """Releases the sessions of batches in earlier tries, and so ends their jobs, which may
        occupy each core of the server; best effort.
        """
        from pyspark.sql.connect.client import SparkConnectClient

        for name, batch_id in product(self._earlier, ["", *batch_ids]):
            with suppress(Exception):
                _release(SparkConnectClient(self._channel(name, batch_id)))

    def close(self) -> None:
        """Releases all sessions; their jobs end."""
        self._closed.set()
        for batch_id in list(self._sessions):
            self._release(batch_id)
        _release(self.main.client)

    def _release(self, batch_id: str) -> None:
        session = self._sessions.pop(batch_id, None)
        if session is not None:
            _release(session.client)

    # ----------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Uses the sessions periodically: the server closes one that is not used for an hour, as
        while a callback waits for another system.
        """
        while not self._closed.wait(KEEP_INTERVAL):
            for session in [self.main, *self._sessions.values()]:
                with suppress(Exception):
                    session.conf.get("spark.sql.session.timeZone")

    def _answers(self) -> bool:
        """Returns whether the server answers, even if by an error, which the next request reports.

        To wait for a ready channel would take a tenth of a second or more.
        """
        _set_retries(self.main.client, ONCE)
        try:
            self.main.version  # noqa: B018 - a request
        except Exception as error:
            return not _is_of_transport(error)
        finally:
            _set_retries(self.main.client, RETRIES)
        return True

    def _await_server(self) -> None:
        """Waits until the server accepts connections.

        :raises PipelineError: If it does not within :data:`TIMEOUT`.
        """
        import grpc

        end = time.monotonic() + TIMEOUT
        if self._answers():
            return
        channel = self._channel(self._name, "").toChannel()
        try:
            grpc.channel_ready_future(channel).result(max(1.0, end - time.monotonic()))
        except grpc.FutureTimeoutError:
            raise self._error(
                f"does not accept connections (waited {TIMEOUT:g} s): start it, or correct remote,"
                " or the connection; it must use TLS if the URL has a token or use_ssl=true"
            ) from None
        finally:
            channel.close()

    def _error(self, text: str) -> PipelineError:
        return PipelineError(f"the Spark Connect server {self._server.address} {text}")

    def _open(self, batch_id: str) -> Any:
        from pyspark.sql.connect.session import SparkSession

        channel = self._channel(self._name, batch_id)
        session: Any = SparkSession.builder.channelBuilder(channel).create()
        # Otherwise it stays that of the thread's first batch, and is none once that is released.
        SparkSession._active_session.session = session
        _set_retries(session.client, RETRIES)
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
            raise self._error(f"opens no session: {_reason(error)}") from error
        if _numbers(theirs) < _numbers(ours):
            raise self._error(
                f"runs Spark {theirs}, which is older than this worker's pyspark {ours}: update"
                f" the server, or install pyspark-client=={theirs} on the workers"
            )
        for name, value in {**SETTINGS, **server.conf}.items():
            try:
                session.conf.set(name, value)
            except Exception as error:
                raise self._error(
                    f"does not take the setting {name} of a session ({_reason(error)}): set it"
                    " where the server is started, and remove it from conf"
                ) from error
        for kind, paths in filter(itemgetter(1), server.artifacts.items()):
            try:
                session.addArtifacts(*paths, **{kind: True})
            except Exception as error:
                names = ", ".join(paths)
                raise self._error(f"does not take the files {names} ({_reason(error)})") from error
        with _PATH:  # each session has added them; other threads may have changed it, too
            for path in map(os.path.abspath, server.artifacts.get("pyfile", ())):
                while sys.path.count(path) > 1:
                    sys.path.remove(path)

    def _channel(self, name: str, batch_id: str) -> Any:
        """Returns the builder of the channel of a session."""
        from pyspark.sql.connect.client import DefaultChannelBuilder

        # A slash in a parameter, as of a token, would be one of the path.
        url, _, parameters = self._server.url.partition(";")
        parameters = parameters.replace("/", "%2F")
        if "user_id=" not in parameters:  # not that of the process, which differs by host
            parameters += ";user_id=airflow-broadway"
        session_id = uuid.uuid5(uuid.NAMESPACE_URL, f"{name}/{batch_id}")
        text = f"{url.rstrip('/')}/;{parameters.strip(';')};session_id={session_id}"
        try:
            return DefaultChannelBuilder(text, channelOptions=KEEPALIVE)
        except Exception:  # its text has the parameters, which may be secret
            raise PipelineError(
                f"the URL of the Spark Connect server {self._server.address} is not valid: expected"
                " sc://host:port/;name=value;…, with special characters of values as %XX"
            ) from None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _set_retries(client: Any, retries: Mapping[str, Any]) -> None:
    from pyspark.sql.connect.client.retries import DefaultPolicy

    client.set_retry_policies([DefaultPolicy(**retries)])


def _release(client: Any) -> None:
    """Releases a session; tried once, because the server may have ended."""
    _set_retries(client, ONCE)
    with suppress(Exception):
        client.release_session()
    with suppress(Exception):
        client.close()
    atexit.unregister(client._on_exit)  # else each client is kept


def _is_of_transport(error: BaseException) -> bool:
    """Returns whether an error, or one from which it came, is of the connection to the server."""
    from pyspark.errors import PySparkException
    from pyspark.errors.exceptions.connect import SparkConnectGrpcException

    chain: BaseException | None = error
    seen: set[int] = set()  # an error may be its own cause
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        # Errors that the server reports are of subclasses.
        if type(chain) is SparkConnectGrpcException:
            code = getattr(chain, "_grpc_status_code", "")  # since Spark 4.1; before in the text
            if _BROKEN.search(f"{code} {chain}"):
                return True
        if isinstance(chain, PySparkException) and _GIVEN_UP.match(str(chain)):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    details = re.search(r'details = "(.*)"', text)
    return f"{type(error).__name__}: {details[1] if details else text.partition(chr(10))[0]}"
