"""TLS and tokens by Google's own client: what requests carry, and errors without a token."""

from __future__ import annotations

import json
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from traceback import format_exception
from typing import Any

import grpc
import pytest
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.producers.engine.port import Expired
from airflow_broadway.producers.pubsub import PubSubProducer
from tests.pubsub_server import StubServer
from tests.pubsub_witness import Witness
from tests.tls import Authority
from tests.unit.producers.pubsub.kit import Generation, service_account

SECRET = "swordfish-4711"
REFUSED = {"error": "invalid_grant", "error_description": f"Token has been revoked: {SECRET}"}
SKEWED = {"error": "invalid_grant", "error_description": f"check your iat and exp, {SECRET}"}


class Tokens:
    """Google's token server: issues tokens that expire immediately, or answers ``refusal``."""

    def __init__(self) -> None:
        self.issued = 0
        self.refusal: tuple[int, dict[str, str]] | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = outer.refusal or (200, outer.token())
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Logs nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/token"

    def token(self) -> dict[str, Any]:
        self.issued += 1
        return {"access_token": f"token-{self.issued}", "expires_in": 1, "token_type": "Bearer"}

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def tokens():
    server = Tokens()
    yield server
    server.stop()


@pytest.fixture
def stub():
    with StubServer() as server:
        yield server


@pytest.fixture
def google(stub, tmp_path, monkeypatch):
    """The stub behind TLS."""
    authority = Authority.make(tmp_path, "authority")
    trusted = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    real = SubscriberGrpcTransport.create_channel

    def create_channel(host: str, **options: Any) -> Any:
        return real(host, **options, ssl_credentials=trusted)

    monkeypatch.setattr(SubscriberGrpcTransport, "create_channel", create_channel)
    with Witness(stub, authority) as witness:
        yield witness


account = cache(service_account)  # generating a key is slow


def begin(google: Witness, stub: StubServer, token_uri: str, **extra: str) -> Generation:
    """Starts a run by an Airflow connection to Google, over one message."""
    topic = stub.topic()
    name = stub.subscription(topic)
    stub.publish(topic, [b"a"])
    extras = {"keyfile_dict": {**account(), "token_uri": token_uri}, **extra}

    class Connections:
        def get(self, conn_id: str) -> Connection:
            return Connection(conn_id=conn_id, conn_type="google_cloud_platform", extra=extras)

    producer = PubSubProducer(
        subscription=name, endpoint=google.host, receive_timeout=5.0, request_timeout=0.5
    )
    return Generation(producer, ProducerEnv(connections=Connections()))


def test_requests_carry_token_and_quota_project(google, stub, tokens):
    run = begin(google, stub, tokens.uri, quota_project_id="payer")
    assert run.settle(run.take(1)) == SettleReport(acked=1)
    run.close()

    assert {request.call for request in google.requests} >= {
        *("GetSubscription", "Pull", "ModifyAckDeadline", "Acknowledge")
    }
    for request in google.requests:
        assert str(request.metadata["authorization"]).startswith("Bearer token-")
        assert request.metadata["x-goog-user-project"] == "payer"


@pytest.mark.parametrize(
    ("refusal", "expected", "words"),
    [
        ((400, REFUSED), Expired, "gives no token for GetSubscription on .*: the credentials are"),
        ((400, SKEWED), ProducerError, "this machine's clock differs from Google's"),
    ],
)
def test_refused_token_is_one_error_and_no_outage(
    refusal, expected, words, google, stub, tokens, caplog
):
    tokens.refusal = refusal

    with pytest.raises(expected, match=words) as raised:
        begin(google, stub, tokens.uri)

    assert "\n" not in str(raised.value)
    assert SECRET not in "".join(format_exception(raised.value)) + caplog.text
    assert google.requests == []


def test_unreachable_token_server_is_outage(google, stub, tokens):
    tokens.stop()
    with pytest.raises(ProducerUnavailable, match="token server cannot be reached") as raised:
        begin(google, stub, tokens.uri)
    assert not isinstance(raised.value, Expired)


def test_token_expired_during_run_loses_nothing(google, stub, tokens, caplog):
    run = begin(google, stub, tokens.uri)
    messages = run.take(1)
    tokens.refusal = (400, REFUSED)

    with pytest.raises(Expired, match="gives no token for Acknowledge"):
        run.settle(messages)

    tokens.refusal = None
    assert run.settle(messages, by=run.other()) == SettleReport(acked=1)
    assert SECRET not in caplog.text
    run.close()
