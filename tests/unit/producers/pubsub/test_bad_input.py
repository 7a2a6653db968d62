"""Errors are one sentence, lose nothing and show no secret."""

import json
import logging
import sys
from contextlib import closing
from types import ModuleType
from typing import Any

import pytest

from airflow_broadway import RetryPolicy
from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import (
    ConnectionMissing,
    OptionsError,
    ProducerError,
    ProducerUnavailable,
)
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.producers.engine.port import Denied, Expired
from airflow_broadway.producers.kit import checks
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.pubsub.client import credentials_of, open_client
from airflow_broadway.producers.pubsub.errors import translated
from tests.pubsub_server import PROJECT
from tests.pubsub_stub.errors import Refused
from tests.unit.producers.halves import DEAD
from tests.unit.producers.pubsub.kit import Generation, service_account, settings

SECRET = "swordfish-4711"


@pytest.mark.parametrize(
    ("sub", "options", "words"),
    [
        ({"push_config": {"push_endpoint": "https://example.com"}}, {}, "is a push subscription"),
        ({"bigquery_config": {"table": "p.d.t"}}, {}, "is a BigQuery subscription"),
        ({"cloud_storage_config": {"bucket": "b-1"}}, {}, "is a Cloud Storage subscription"),
        ({"bigtable_config": {"table": "p/i/t"}}, {}, "is a Bigtable subscription"),
        ({"enable_message_ordering": True}, {}, "give the producer message_ordering=True"),
        ({}, {"message_ordering": True}, "needs a subscription that delivers in order"),
        ({}, {"on_failure": "retry"}, "there is no topic for dead letters"),
    ],
    indirect=["sub"],
)
def test_unusable_subscription_is_refused_before_pull(sub, options, words):
    with pytest.raises(ProducerError, match=words):
        sub.begin(**options)
    assert sub.broker.requests["Pull"] == 0


def test_detached_subscription_is_refused(sub):
    sub.server.publisher.detach_subscription(request={"subscription": sub.name})
    with pytest.raises(ProducerError, match="is detached from its topic"):
        sub.begin()


@pytest.mark.parametrize("name", ["none", "projects/other-project/subscriptions/none"])
def test_missing_subscription_is_named_in_full(name, sub):
    full = name if "/" in name else f"projects/{PROJECT}/subscriptions/{name}"
    with pytest.raises(ProducerError, match=f"there is no subscription '{full}'"):
        sub.begin(subscription=name, project_id=PROJECT)


def test_subscription_deleted_during_run_ends_it(sub):
    run, messages = sub.taken("a")
    sub.server.subscriber.delete_subscription(subscription=sub.name)
    sub.clock.advance(10.0)  # it was empty
    with pytest.raises(ProducerError, match=f"there is no subscription '{sub.name}'") as raised:
        run.source.receive(10, timeout=5.0)
    assert "\n" not in str(raised.value)
    report = run.settle(messages)
    assert report.failed == 1
    assert f"there is no subscription '{sub.name}'" in report.errors[0]


def test_deleted_topic_warns_and_backlog_is_drained(caplog, sub):
    sub.put("a")
    sub.server.publisher.delete_topic(topic=sub.topic)
    run = sub.begin()
    assert "was deleted: what is left is drained" in caplog.text
    assert len(run.take()) == 1


@pytest.mark.parametrize(
    ("limit", "options", "words"),
    [
        (5, {}, "after 5 deliveries: what"),
        (5, {"retry": RetryPolicy(max_attempts=7)}, "before its 7 attempts"),
        (20, {}, ""),
    ],
)
def test_dead_letter_policy_below_max_attempts_warns(limit, options, words, caplog, sub):
    policy = {"dead_letter_topic": sub.topic, "max_delivery_attempts": limit}
    name = sub.server.subscription(sub.topic, dead_letter_policy=policy)
    sub.begin(subscription=name, on_failure="retry", **options)
    assert words in caplog.text
    assert any(line.levelno >= logging.WARNING for line in caplog.records) is bool(words)


@settings(retry_policy={"minimum_backoff": {"seconds": 90}, "maximum_backoff": {"seconds": 600}})
def test_longer_retry_policy_warns(caplog, sub):
    sub.begin(on_failure="retry", dead_letter=sub.topic)
    assert "delays redeliveries by 90 s at least" in caplog.text


# ---------------------------------------------------------------------------------- permissions


def test_dead_letter_topic_needs_publish_permission_only(sub):
    sub.deny("GetTopic")
    sub.begin(dead_letter="some-topic", on_failure="dead_letter")
    assert sub.broker.requests["GetTopic"] == 1


@pytest.mark.parametrize("call", ["Pull", "ModifyAckDeadline", "Acknowledge", "Publish"])
def test_missing_permission_is_named(call, sub):
    sub.put("a", "b")
    run = sub.begin(dead_letter=sub.topic, on_failure="dead_letter")
    messages = run.take() if call not in ("Pull", "ModifyAckDeadline") else []
    sub.deny(call)
    permission = {"Publish": "pubsub.topics.publish on this topic"}.get(
        call, "pubsub.subscriptions.consume on this subscription"
    )

    if not messages:
        with pytest.raises(Denied, match=f"denies {call} on .*: allow {permission}"):
            run.source.receive(10, timeout=5.0)
    else:
        report = run.settle(messages, {"a": DEAD})
        assert report.failed >= 1
        assert permission in " ".join(report.errors)

    sub.broker.answer = lambda call, _: None
    run.source.stop()
    sub.clock.advance(600.0)
    assert sub.left() >= 1


def test_missing_permission_of_check_is_named(sub):
    sub.put("a")
    run = sub.begin()
    denied = Refused("PERMISSION_DENIED", f"User is not authorized, {SECRET}.")
    sub.broker.answer = lambda call, _: denied
    [finding] = run.producer.check(run.env)
    assert "pubsub.subscriptions.get" in finding.text
    assert SECRET not in finding.text
    assert sub.left() == 1


@settings(ack_deadline_seconds=600)
def test_run_pulls_without_get_permission(sub):
    sub.put("a")
    sub.deny("GetSubscription")
    run = sub.begin()
    assert run.settle(run.take()) == SettleReport(acked=1)
    # Its ack deadline is unknown, so pulled messages are extended.
    assert sub.broker.requests["ModifyAckDeadline"] == 1


def test_missing_dead_letter_topic_is_reported_and_message_kept(sub):
    sub.put("a", "b")
    options = {"dead_letter": "gone-topic", "on_failure": "dead_letter"}
    missing = f"there is no topic 'projects/{PROJECT}/topics/gone-topic'"
    with pytest.raises(ProducerError, match=missing):
        sub.begin(**options)
    sub.server.topic("gone-topic")
    run = sub.begin(**options)
    messages = run.take()
    sub.server.publisher.delete_topic(topic=f"projects/{PROJECT}/topics/gone-topic")
    report = run.settle(messages, {"a": DEAD})
    assert (report.acked, report.failed) == (1, 1)
    assert missing in report.errors[0]
    assert sub.left() == 1


@pytest.mark.parametrize(
    ("code", "expected", "words"),
    [
        ("UNAUTHENTICATED", Expired, "does not accept the credentials for Pull"),
        ("RESOURCE_EXHAUSTED", ProducerUnavailable, "a quota is used up: per minute;"),
        ("FAILED_PRECONDITION", ProducerError, "as it is now: per minute"),
    ],
)
def test_pull_error_is_one_sentence(code, expected, words, sub):
    run = sub.begin()
    sub.broker.answer = lambda call, _: Refused(code, "per minute")
    with pytest.raises(expected, match=words) as raised:
        run.source.receive(10, timeout=120.0)
    assert "\n" not in str(raised.value)


def test_without_get_permission_dead_letters_need_option(sub):
    sub.put("a")
    sub.deny("GetSubscription")
    run = sub.begin(on_failure="dead_letter")
    report = run.settle(run.take(), {"a": DEAD})
    assert report == SettleReport(failed=1, errors=report.errors)
    assert "pubsub.subscriptions.get" in report.errors[0]
    assert sub.left() == 1


@pytest.mark.parametrize(
    ("endpoint", "warned"),
    [("http://pubsub.internal:8085", True), ("http://127.0.0.1:8085", False)],
)
def test_unencrypted_endpoint_warns_once(endpoint, warned, caplog):
    checks.warn_of_plain_http.cache_clear()
    producer = PubSubProducer(subscription="orders", project_id=PROJECT, endpoint=endpoint)
    for _ in range(2):
        open_client(producer, ProducerEnv()).close()
    assert caplog.text.count("go unencrypted to") == warned


# ---------------------------------------------------------------------------------- credentials


def env_of(conn_type: str = "google_cloud_platform", **extra: Any) -> ProducerEnv:
    class Connections:
        def get(self, conn_id: str) -> Connection:
            return Connection(conn_id=conn_id, conn_type=conn_type, extra=extra)

    return ProducerEnv(connections=Connections())


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A machine without any credentials of Google's."""
    for name in ("PUBSUB_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


KEY = json.dumps({"type": "service_account", "private_key": SECRET, "project_id": "p-12345"})


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "there are no Google credentials: give the connection a key"),
        ({"keyfile_dict": KEY}, "the credentials of the connection 'gcp' cannot be read"),
        ({"keyfile_dict": SECRET}, "the credentials of the connection 'gcp' cannot be read"),
        ({"keyfile_dict": {"private_key": SECRET}}, "'gcp' cannot be read"),
        ({"key_path": "/none/key.json"}, "'gcp' cannot be read"),
        ({"extra__google_cloud_platform__key_path": "/none/key.json"}, "'gcp' cannot be read"),
        ({"credential_config_file": "/none/c.json"}, "'gcp' cannot be read"),
        ({"credential_config_file": {"type": SECRET}}, "'gcp' cannot be read"),
        ({"keyfile_dict": KEY, "key_path": "/x"}, "keyfile_dict and key_path: it needs one"),
        ({"key_secret_name": "s"}, "needs apache-airflow-providers-google"),
    ],
)
def test_unusable_credentials_error_shows_no_secret(extra, words):
    producer = PubSubProducer(subscription="projects/p-12345/subscriptions/orders", conn_id="gcp")
    with pytest.raises(ConnectionMissing, match=words) as raised:
        producer.source(env_of(**extra))
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None or SECRET not in str(raised.value.__cause__)


@pytest.mark.usefixtures("nowhere")
def test_connection_of_other_type_is_refused():
    producer = PubSubProducer(subscription="orders", conn_id="gcp")
    with pytest.raises(ConnectionMissing, match="is of type 'aws'; Pub/Sub needs one of type"):
        producer.source(env_of("aws"))


@pytest.mark.usefixtures("nowhere")
def test_connection_key_is_used_and_names_project(tmp_path):
    file = tmp_path / "key.json"
    file.write_text(json.dumps(service_account()))
    key = service_account()
    extras: list[dict[str, Any]] = [{"keyfile_dict": key}, {"keyfile_dict": json.dumps(key)}]
    for extra in [*extras, {"key_path": str(file)}]:
        assert project_of(env_of(**extra), conn_id="gcp") == "projects/key-project"
    env = env_of(keyfile_dict=key, project="conn-project")
    assert project_of(env, conn_id="gcp") == "projects/conn-project"


def project_of(env: ProducerEnv, **options: Any) -> str:
    """Opens a client; returns the project of its subscription."""
    with closing(open_client(PubSubProducer(subscription="orders", **options), env)) as client:
        return str(client.name).removesuffix("/subscriptions/orders")


@pytest.mark.usefixtures("nowhere")
def test_default_credentials_are_used_without_connection(monkeypatch, tmp_path):
    file = tmp_path / "key.json"
    file.write_text(json.dumps(service_account()))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))

    class Nothing:
        def get(self, conn_id: str) -> Connection:
            raise ConnectionMissing(f"there is no connection {conn_id!r}")

    none = ProducerEnv(connections=Nothing())
    for env, options in ((none, {}), (none, {"conn_id": None}), (env_of(), {"conn_id": "gcp"})):
        assert project_of(env, **options) == "projects/key-project"


@pytest.mark.usefixtures("nowhere")
def test_impersonation_chain_ends_at_last_account():
    producer = PubSubProducer(subscription="orders", conn_id="gcp")
    chain = "a@p.iam.gserviceaccount.com, b@p.iam.gserviceaccount.com"
    env = env_of(keyfile_dict=service_account(), impersonation_chain=chain)
    credentials, _ = credentials_of(producer, env)
    assert credentials.service_account_email == "b@p.iam.gserviceaccount.com"
    assert credentials._delegates == ["a@p.iam.gserviceaccount.com"]


@pytest.mark.usefixtures("nowhere")
def test_provider_credentials_are_not_impersonated_again(monkeypatch):
    """Its hook applies the chain, whose last account may not impersonate itself."""
    credentials = object()

    class Hook:
        def __init__(self, gcp_conn_id: str) -> None:
            assert gcp_conn_id == "gcp"

        def get_credentials_and_project_id(self) -> tuple[object, str]:
            return credentials, "p-12345"

    names = "google", "google.common", "google.common.hooks", "google.common.hooks.base_google"
    for name in names:
        module = ModuleType(f"airflow.providers.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__dict__["GoogleBaseHook"] = Hook
    producer = PubSubProducer(subscription="orders", conn_id="gcp")
    env = env_of(key_secret_name="s", impersonation_chain="b@p.iam.gserviceaccount.com")
    assert credentials_of(producer, env)[0] is credentials


def test_short_name_without_project_is_refused(monkeypatch):
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", "127.0.0.1:1")
    with pytest.raises(ConnectionMissing, match="in which project the subscription 'orders' is"):
        PubSubProducer(subscription="orders").source(ProducerEnv())


REVOKED = f"Token has been revoked {SECRET}"
WRONG_CLOCK = "Invalid JWT: check your iat and exp values"


@pytest.mark.parametrize(
    ("by_grpc", "text", "expected", "words"),
    [
        (False, WRONG_CLOCK, ProducerError, "clock"),
        (False, REVOKED, Expired, "expired, revoked"),
        (True, WRONG_CLOCK, ProducerError, "clock"),
        (True, REVOKED, ProducerUnavailable, "there is no token for ListTimeSeries"),
    ],
)
def test_refused_token_error_hides_server_text(by_grpc, text, expected, words):
    """The client refreshes it, or gRPC in its own thread."""
    from google.api_core.exceptions import ServiceUnavailable
    from google.auth.exceptions import RefreshError

    text = f"invalid_grant: {text}"
    kind: Any = RefreshError
    if by_grpc:
        kind = ServiceUnavailable
        text = f"Getting metadata from plugin failed with error: ('{text}', {{}})"
    error = translated(kind(text), "ListTimeSeries", "projects/p", "here")
    assert isinstance(error, expected)
    assert words in str(error)
    assert SECRET not in str(error)


# ---------------------------------------------------------------------------------- limits


def dead_letter_all(run: Generation, reason: str) -> None:
    """Receives all messages, and dead-letters them."""
    verdict = Verdict(Action.DEAD_LETTER, 0.0, reason, "batch")
    entries = [entry_of(message, verdict) for message in run.take()]
    request = Settlement(rest=RELEASE, entries=lambda: iter(entries), expected=len(entries))
    report = run.custodian.settle(run.source.lease, request)
    assert report == SettleReport(dead_lettered=len(entries))


@pytest.mark.parametrize(
    ("message", "ours"),
    [
        ({"data": b"x"}, 5),
        ({"data": b"x", "attributes": {f"k{n}": "v" * 1024 for n in range(100)}}, 0),
        ({"data": b"x", "attributes": {f"k{n}": "v" for n in range(97)}}, 3),
        ({"data": b"x" * 9_999_000}, 0),
        ({"data": b"", "attributes": {"k": "v"}, "ordering_key": "o" * 1024}, 5),
    ],
    ids=["small", "100 attributes", "97 attributes", "10 MB", "no body"],
)
def test_dead_letter_keeps_message_and_fitting_reason(message, ours, sub):
    dead = sub.server.topic()
    dead_letters = sub.server.subscription(dead)
    sub.server.publish_all(sub.topic, [message])
    dead_letter_all(sub.begin(dead_letter=dead, on_failure="dead_letter"), "r" * 2048)

    assert sub.left() == 0
    [letter] = sub.server.drain(dead_letters)
    assert letter.data == message["data"]
    assert letter.ordering_key == message.get("ordering_key", "")
    own = {k: v for k, v in letter.attributes.items() if not k.startswith("broadway_")}
    assert own == message.get("attributes", {})
    assert len(letter.attributes) - len(own) == ours
    if ours:
        assert len(letter.attributes["broadway_reason"].encode()) == 1024


def test_large_dead_letters_are_split_over_requests(sub):
    dead = sub.server.topic()
    for _ in range(2):
        sub.server.publish_all(sub.topic, [{"data": b"x" * 6_000_000}])
    run = sub.begin(dead_letter=dead, on_failure="dead_letter")
    calls: list[str] = []
    sub.broker.answer = lambda call, _: calls.append(call)
    dead_letter_all(run, "bad")
    assert calls.count("Publish") == 2
    assert sub.left() == 0


# ---------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscription": ""}, "subscription"),
        ({"subscription": "1-orders"}, "subscription"),
        ({"subscription": "goog-orders"}, "subscription"),
        ({"subscription": "projects/p-12345/topics/orders"}, "subscription"),
        ({"subscription": "projects/P/subscriptions/orders"}, "subscription"),
        ({}, "subscription"),
        ({"subscription": "orders", "lease": 601}, "lease"),
        ({"subscription": "orders", "lease": 9}, "lease"),
        ({"subscription": "orders", "lease": 10, "receive_timeout": 6}, "twice receive_timeout"),
        ({"subscription": "orders", "max_number_of_messages": 0}, "max_number_of_messages"),
        ({"subscription": "orders", "max_number_of_messages": 1001}, "max_number_of_messages"),
        ({"subscription": "orders", "receive_timeout": 0}, "receive_timeout"),
        ({"subscription": "orders", "on_failure": "foo"}, "on_failure"),
        ({"subscription": "orders", "on_failure": ("nack", 601)}, "on_failure"),
        ({"subscription": "orders", "on_failure": ("nack", 1.5)}, "on_failure"),
        ({"subscription": "orders", "on_failure": ("nack", float("inf"))}, "on_failure"),
        ({"subscription": "orders", "on_failure": ("nack", float("nan"))}, "on_failure"),
        ({"subscription": "orders", "on_failure": "nack(601)"}, "on_failure"),
        ({"subscription": "orders", "on_success": ("ack", 1)}, "on_success"),
        ({"subscription": "orders", "dead_letter": "projects/p-12345/subscriptions/x"}, "topic"),
        ({"subscription": "orders", "endpoint": "https://user@host/path"}, "endpoint"),
        ({"subscription": "orders", "token": "x"}, "token"),
    ],
)
def test_invalid_option_is_named(options, words):
    with pytest.raises(OptionsError, match=words):
        PubSubProducer(**options)


def test_actions_are_normalized_to_text():
    actions = ["ack", "noop", "nack", ("nack", 100), ["nack", 0], "nack(7)", "nack(0)"]
    producers = [PubSubProducer(subscription="orders", on_failure=action) for action in actions]
    assert [producer.on_failure for producer in producers] == [
        "ack",
        "noop",
        "nack",
        "nack(100)",
        "nack",
        "nack(7)",
        "nack",
    ]


@pytest.mark.parametrize(
    ("action", "service"), [("Pull", "pubsub"), ("ListTimeSeries", "monitoring")]
)
def test_disabled_api_is_named(action, service):
    from google.api_core.exceptions import PermissionDenied
    from google.rpc.error_details_pb2 import ErrorInfo

    error = PermissionDenied("no", error_info=ErrorInfo(reason="SERVICE_DISABLED"))
    text = str(translated(error, action, "projects/p/subscriptions/s", "here"))
    assert f"gcloud services enable {service}.googleapis.com" in text
