"""Errors of AWS are one sentence; by botocore's own stub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import (
    ConnectionMissing,
    OptionsError,
    ProducerError,
    ProducerUnavailable,
)
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.producers.engine.port import Denied, Expired, Hidden
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.producers.sqs.client import Queue, boto_client
from airflow_broadway.producers.sqs.errors import InFlightLimit
from airflow_broadway.testing import ManualClock
from tests.fake_sqs import URL

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


class OneConnection:
    def __init__(self, **connection: Any) -> None:
        self._connection = connection

    def get(self, conn_id: str) -> Connection:
        return Connection(conn_id=conn_id, **{"conn_type": "aws", **self._connection})


def env(**connection: Any) -> ProducerEnv:
    fields = {"login": "AKIAEXAMPLE", "password": SECRET, **connection}
    return ProducerEnv(connections=OneConnection(**fields), clock=ManualClock())


def queue(**options: Any) -> Queue:
    producer = SqsProducer(queue_url=URL, conn_id="aws", **options)
    return Queue(boto_client(producer, env()), URL)


CALLS: dict[str, tuple[str, Callable[[Queue], object]]] = {
    "ReceiveMessage": ("receive_message", lambda q: q.receive({"MaxNumberOfMessages": 1})),
    "DeleteMessage": ("delete_message_batch", lambda q: q.remove(["r"])),
    "ChangeMessageVisibility": (
        "change_message_visibility_batch",
        lambda q: q.hide([Hidden("r", 1)]),
    ),
    "SendMessage": ("send_message_batch", lambda q: q.send([{"MessageBody": "b"}])),
    "GetQueueAttributes": ("get_queue_attributes", lambda q: q.attributes("RedrivePolicy")),
    "GetQueueUrl": ("get_queue_url", lambda q: q.other("orders")),
}


@pytest.mark.parametrize("action", CALLS)
def test_denied_action_error_names_permission(action):
    from botocore.stub import Stubber

    method, call = CALLS[action]
    client = queue()
    with Stubber(client.client) as stub:
        text = f"User: arn:aws:iam::1:user/x key {SECRET}"
        stub.add_client_error(method, "AccessDenied", text, http_status_code=403)
        with pytest.raises(Denied, match=f"allow sqs:{action} on this queue") as raised:
            call(client)
    assert SECRET not in str(raised.value)
    assert "orders" in str(raised.value)


@pytest.mark.parametrize(
    ("code", "text", "kind", "words"),
    [
        ("AWS.SimpleQueueService.NonExistentQueue", "", ProducerError, "no SQS queue 'orders' in"),
        ("QueueDoesNotExist", "", ProducerError, "region 'eu-west-1'"),
        ("ExpiredToken", "The security token is expired", Expired, "credentials have expired"),
        ("InvalidClientTokenId", "", ProducerError, "does not accept the credentials"),
        ("SignatureDoesNotMatch", f"canonical {SECRET}", ProducerError, "access key, secret key"),
        (
            "SignatureDoesNotMatch",
            "Signature expired: 20260101T000000Z is now earlier than 20260101T001500Z",
            ProducerError,
            "this machine's clock differs",
        ),
        ("RequestTimeTooSkewed", "", ProducerError, "set the clock"),
        ("OverLimit", "", InFlightLimit, "as many messages in flight as it may have"),
        ("RequestThrottled", "", ProducerUnavailable, "throttles ReceiveMessage"),
        ("ServiceUnavailable", "", ProducerUnavailable, "could not do ReceiveMessage"),
        ("InvalidSecurity", "use HTTPS", ProducerError, "InvalidSecurity"),
    ],
)
def test_aws_error_is_one_sentence(code, text, kind, words):
    from botocore.stub import Stubber

    client = queue()
    with Stubber(client.client) as stub:
        stub.add_client_error("receive_message", code, text)
        with pytest.raises(kind, match=words) as raised:
            client.receive({"MaxNumberOfMessages": 1})
    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_unreachable_endpoint_is_transient():
    client = Queue(
        boto_client(
            SqsProducer(queue_url=URL, conn_id="aws", endpoint_url="http://127.0.0.1:9"),
            env(extra={"config_kwargs": {"retries": {"max_attempts": 1}}}),
        ),
        URL,
    )
    with pytest.raises(ProducerUnavailable, match=r"cannot be reached .* http://127\.0\.0\.1:9"):
        client.receive({"MaxNumberOfMessages": 1})


def test_missing_credentials_are_named(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    client = Queue(boto_client(SqsProducer(queue_url=URL, conn_id=None), ProducerEnv()), URL)
    with pytest.raises(ConnectionMissing, match="needs AWS credentials, and there are none"):
        client.receive({"MaxNumberOfMessages": 1})


def test_missing_region_is_named(monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    producer = SqsProducer(queue_name="orders", conn_id="aws")
    with pytest.raises(ConnectionMissing, match="no AWS region for 'orders'"):
        producer.source(env())


def test_region_comes_from_queue_url():
    assert boto_client(SqsProducer(queue_url=URL, conn_id="aws"), env()).meta.region_name == (
        "eu-west-1"
    )
    with pytest.raises(OptionsError, match="region of queue_url"):
        SqsProducer(queue_url=URL, region_name="us-east-1")


def test_connection_of_other_type_is_refused():
    with pytest.raises(ConnectionMissing, match="needs one of type 'aws'"):
        boto_client(SqsProducer(queue_url=URL, conn_id="x"), env(conn_type="rabbitmq"))


def test_incomplete_key_pair_is_refused_and_masked():
    with pytest.raises(ConnectionMissing, match="needs both or neither") as raised:
        boto_client(SqsProducer(queue_url=URL, conn_id="aws"), env(login=""))
    assert SECRET not in str(raised.value)


def test_connection_sets_endpoint_region_and_token():
    service = {"sqs": {"endpoint_url": "https://sqs.example.org"}}
    connected = env(
        extra={
            "region_name": "eu-north-1",
            "endpoint_url": "https://everything.example.org",
            "aws_session_token": "token",
            "service_config": service,
        }
    )
    client: Any = boto_client(SqsProducer(queue_name="orders", conn_id="aws"), connected)

    assert client.meta.region_name == "eu-north-1"
    assert client.meta.endpoint_url == "https://sqs.example.org"
    credentials = client._request_signer._credentials
    assert (credentials.access_key, credentials.token) == ("AKIAEXAMPLE", "token")


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        (URL, "https://sqs.eu-west-1.amazonaws.com"),
        ("http://127.0.0.1:5000/123456789012/orders", "http://127.0.0.1:5000"),
        (
            "https://vpce-1.sqs.eu-west-1.vpce.amazonaws.com/1/orders",
            "https://vpce-1.sqs.eu-west-1.vpce.amazonaws.com",
        ),
    ],
)
def test_endpoint_comes_from_queue_url(url, endpoint):
    client = boto_client(
        SqsProducer(queue_url=url, conn_id="aws"), env(extra={"region_name": "eu-west-1"})
    )
    assert client.meta.endpoint_url == endpoint


def test_amazon_provider_assumes_role(monkeypatch):
    from airflow.providers.amazon.aws.hooks.base_aws import BaseSessionFactory
    from boto3.session import Session

    taken: list[tuple[str | None, str | None]] = []

    def create_session(factory: BaseSessionFactory) -> Session:
        taken.append((factory.role_arn, factory.region_name))
        return Session(aws_access_key_id="AKIAROLE", aws_secret_access_key=SECRET)

    monkeypatch.setattr(BaseSessionFactory, "create_session", create_session)
    arn = "arn:aws:iam::123456789012:role/reader"
    client: Any = boto_client(
        SqsProducer(queue_url=URL, conn_id="aws"), env(extra={"role_arn": arn})
    )

    assert taken == [(arn, "eu-west-1")]
    assert client._request_signer._credentials.access_key == "AKIAROLE"


def test_missing_default_connection_falls_back_to_boto3(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    client: Any = boto_client(SqsProducer(queue_url=URL), ProducerEnv())
    assert client._request_signer._credentials.access_key == "AKIAENV"
    with pytest.raises(ConnectionMissing, match="'other' is not defined"):
        boto_client(SqsProducer(queue_url=URL, conn_id="other"), ProducerEnv())
