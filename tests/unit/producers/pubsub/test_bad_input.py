"""What is wrong, said in one sentence: nothing is lost, and no secret is shown."""

import json
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.producer import Connection, ProducerEnv
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import (
    BroadwayError,
    ConnectionMissing,
    OptionsError,
    ProducerError,
    ProducerUnavailable,
)
from airflow_broadway.producers.engine.port import Denied, Expired
from airflow_broadway.producers.kit import checks
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.pubsub.client import credentials_of, open_client
from airflow_broadway.producers.pubsub.errors import translated
from tests.pubsub_server import PROJECT
from tests.pubsub_stub.errors import Refused
from tests.unit.producers.pubsub.kit import Place, place, service_account

SECRET = "swordfish-4711"


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({"push_config": {"push_endpoint": "https://example.com"}}, {}, "is a push subscription"),
        ({"bigquery_config": {"table": "p.d.t"}}, {}, "is a BigQuery subscription"),
        ({"cloud_storage_config": {"bucket": "b-1"}}, {}, "is a Cloud Storage subscription"),
        ({"bigtable_config": {"table": "p/i/t"}}, {}, "is a Bigtable subscription"),
        ({"enable_message_ordering": True}, {}, "give the producer message_ordering=True"),
        ({}, {"message_ordering": True}, "needs a subscription that delivers in order"),
        ({}, {"on_failure": "retry"}, "there is no topic for dead letters"),
    ],
)
def test_a_subscription_that_no_run_can_pull_is_refused_at_once(
    settings: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with place(**settings) as at:
        with pytest.raises(ProducerError, match=words):
            at.begin(**options)
        assert at.broker.requests["Pull"] == 0


def test_a_detached_subscription_is_refused() -> None:
    with place() as at:
        at.server.publisher.detach_subscription(request={"subscription": at.name})
        with pytest.raises(ProducerError, match="is detached from its topic"):
            at.begin()


@pytest.mark.parametrize("name", ["none", "projects/other-project/subscriptions/none"])
def test_a_subscription_that_is_not_there_is_named_in_full(name: str) -> None:
    with place() as at:
        full = name if "/" in name else f"projects/{PROJECT}/subscriptions/{name}"
        with pytest.raises(ProducerError, match=f"there is no subscription '{full}'"):
            at.begin(subscription=name, project_id=PROJECT)


def test_a_subscription_that_is_deleted_while_a_run_is_at_work_ends_it_with_one_sentence(
    tmp_path: Path,
) -> None:
    with place(tmp_path) as at:
        at.put("a")
        run = at.begin()
        found = run.take()
        at.server.subscriber.delete_subscription(subscription=at.name)
        at.clock.advance(10.0)  # it was found empty
        with pytest.raises(ProducerError, match=f"there is no subscription '{at.name}'") as caught:
            run.source.receive(10, timeout=5.0)
        assert "\n" not in str(caught.value)
        report = run.settle(found)
        assert report.failed == 1
        assert f"there is no subscription '{at.name}'" in report.errors[0]


def test_a_deleted_topic_is_warned_of_and_what_is_left_is_drained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with place() as at:
        at.put("a")
        at.server.publisher.delete_topic(topic=at.topic)
        run = at.begin()
        assert "was deleted: what is left is drained" in caplog.text
        assert len(run.take()) == 1


@pytest.mark.parametrize(
    ("most", "options", "words"),
    [
        (5, {"on_failure": "retry"}, "after 5 deliveries: what"),
        (5, {"on_failure": "retry", "retry": {"max_attempts": 7}}, "before its 7 attempts"),
        (20, {"on_failure": "retry"}, ""),
    ],
)
def test_a_dead_letter_policy_that_comes_before_our_attempts_is_warned_of(
    most: int, options: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    from airflow_broadway import RetryPolicy

    if "retry" in options:
        options = {**options, "retry": RetryPolicy(**options["retry"])}
    with place() as at:
        policy = {"dead_letter_topic": at.topic, "max_delivery_attempts": most}
        name = at.server.subscription(at.topic, dead_letter_policy=policy)
        at.begin(subscription=name, **options)
    assert words in caplog.text
    assert any(each.levelno >= logging.WARNING for each in caplog.records) is bool(words)


def test_a_retry_policy_that_puts_off_longer_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with place() as at:
        name = at.server.subscription(
            at.topic,
            retry_policy={"minimum_backoff": {"seconds": 90}, "maximum_backoff": {"seconds": 600}},
        )
        at.begin(subscription=name, on_failure="retry", dead_letter=at.topic)
    assert "delays redeliveries by 90 s at least" in caplog.text


# ---------------------------------------------------------------------------------- permissions


def test_who_may_publish_dead_letters_need_not_be_allowed_to_look_at_their_topic() -> None:
    with place() as at:
        denied = Refused("PERMISSION_DENIED", "User not authorized to perform this action.")
        at.broker.answer = lambda asked, _: denied if asked == "GetTopic" else None
        at.begin(dead_letter="some-topic", on_failure="dead_letter")
        assert at.broker.requests["GetTopic"] == 1


@pytest.mark.parametrize("call", ["Pull", "ModifyAckDeadline", "Acknowledge", "Publish"])
def test_a_permission_that_is_lacking_is_named(call: str, tmp_path: Path) -> None:
    with place(tmp_path) as at:
        at.put("a", "b")
        denied = Refused("PERMISSION_DENIED", "User not authorized to perform this action.")
        run = at.begin(dead_letter=at.topic, on_failure="dead_letter")
        found = run.take() if call not in ("Pull", "ModifyAckDeadline") else []
        at.broker.answer = lambda asked, _: denied if asked == call else None
        permission = {
            "Publish": "pubsub.topics.publish on this topic",
        }.get(call, "pubsub.subscriptions.consume on this subscription")

        if not found:
            with pytest.raises(Denied, match=f"denies {call} on .*: allow {permission}"):
                run.source.receive(10, timeout=5.0)
        else:
            verdicts = {"a": Verdict(Action.DEAD_LETTER, 0.0, "bad", "process")}
            report = run.settle(found, verdicts)
            assert report.failed >= 1
            assert permission in " ".join(report.errors)

        at.broker.answer = lambda asked, _: None
        run.source.stop()
        at.clock.advance(600.0)
        assert at.left() >= 1  # what could not be done is still there


def test_a_permission_that_a_check_lacks_is_named(tmp_path: Path) -> None:
    denied = Refused("PERMISSION_DENIED", f"User is not authorized, {SECRET}.")
    with place(tmp_path) as at:
        at.put("a")
        run = at.begin()
        at.broker.answer = lambda asked, _: denied
        [finding] = run.producer.check(run.env)
        assert "pubsub.subscriptions.get" in finding.text
        assert SECRET not in finding.text
        assert at.left() == 1


def test_who_may_not_look_at_the_subscription_may_pull_all_the_same(tmp_path: Path) -> None:
    with place(tmp_path, ack_deadline_seconds=600) as at:
        at.put("a")
        denied = Refused("PERMISSION_DENIED", "User not authorized to perform this action.")
        at.broker.answer = lambda asked, _: denied if asked == "GetSubscription" else None
        run = at.begin()
        assert run.settle(run.take()) == SettleReport(acked=1)
        # Its own deadline is not known: what is pulled is held anew.
        assert at.broker.requests["ModifyAckDeadline"] == 1


def test_who_has_no_dead_letter_topic_hears_of_it_and_the_message_comes_again(
    tmp_path: Path,
) -> None:
    with place(tmp_path) as at:
        at.put("a", "b")
        options = {"dead_letter": "gone-topic", "on_failure": "dead_letter"}
        missing = f"there is no topic 'projects/{PROJECT}/topics/gone-topic'"
        with pytest.raises(ProducerError, match=missing):
            at.begin(**options)
        at.server.topic("gone-topic")
        run = at.begin(**options)
        found = run.take()
        at.server.publisher.delete_topic(topic=f"projects/{PROJECT}/topics/gone-topic")
        report = run.settle(found, {"a": Verdict(Action.DEAD_LETTER, 0.0, "bad", "process")})
        assert (report.acked, report.failed) == (1, 1)
        assert missing in report.errors[0]
        assert at.left() == 1


@pytest.mark.parametrize(
    ("code", "expected", "words"),
    [
        ("UNAUTHENTICATED", Expired, "does not accept the credentials for Pull"),
        ("RESOURCE_EXHAUSTED", ProducerUnavailable, "a quota is used up: per minute;"),
        ("FAILED_PRECONDITION", ProducerError, "as it is now: per minute"),
    ],
)
def test_what_google_says_while_pulling_is_one_sentence(
    code: str, expected: type[BroadwayError], words: str
) -> None:
    with place() as at:
        run = at.begin()
        at.broker.answer = lambda asked, _: Refused(code, "per minute")
        with pytest.raises(expected, match=words) as caught:
            run.source.receive(10, timeout=120.0)
        assert "\n" not in str(caught.value)


def test_who_may_not_look_at_the_subscription_needs_the_option_for_dead_letters(
    tmp_path: Path,
) -> None:
    with place(tmp_path) as at:
        at.put("a")
        denied = Refused("PERMISSION_DENIED", "User not authorized to perform this action.")
        at.broker.answer = lambda asked, _: denied if asked == "GetSubscription" else None
        run = at.begin(on_failure="dead_letter")
        verdict = Verdict(Action.DEAD_LETTER, 0.0, "bad", "process")
        report = run.settle(run.take(), {"a": verdict})
        assert report == SettleReport(failed=1, errors=report.errors)
        assert "pubsub.subscriptions.get" in report.errors[0]
        assert at.left() == 1


@pytest.mark.parametrize(
    ("endpoint", "warned"),
    [("http://pubsub.internal:8085", True), ("http://127.0.0.1:8085", False)],
)
def test_an_endpoint_that_is_not_encrypted_is_told(
    endpoint: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    checks.warn_of_plain_http.cache_clear()
    producer = PubSubProducer(subscription="orders", project_id=PROJECT, endpoint=endpoint)
    for _ in range(2):
        open_client(producer, ProducerEnv()).close()
    assert sum("go unencrypted to" in each for each in caplog.messages) == warned


# ---------------------------------------------------------------------------------- credentials


def env_of(conn_type: str = "google_cloud_platform", **extra: Any) -> ProducerEnv:
    class Connections:
        def get(self, conn_id: str) -> Connection:
            return Connection(conn_id=conn_id, conn_type=conn_type, extra=extra)

    return ProducerEnv(connections=Connections())


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
def test_credentials_that_cannot_be_used_are_said_without_a_secret(
    extra: dict[str, Any], words: str
) -> None:
    producer = PubSubProducer(subscription="projects/p-12345/subscriptions/orders", conn_id="gcp")
    with pytest.raises(ConnectionMissing, match=words) as caught:
        producer.source(env_of(**extra))
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None or SECRET not in str(caught.value.__cause__)


@pytest.mark.usefixtures("nowhere")
def test_a_connection_of_another_type_is_refused() -> None:
    producer = PubSubProducer(subscription="orders", conn_id="gcp")
    with pytest.raises(ConnectionMissing, match="is of type 'aws'; Pub/Sub needs one of type"):
        producer.source(env_of("aws"))


@pytest.mark.usefixtures("nowhere")
def test_a_key_of_the_connection_is_used_and_names_the_project(tmp_path: Path) -> None:
    from airflow_broadway.producers.pubsub.client import open_client

    file = tmp_path / "key.json"
    file.write_text(json.dumps(service_account()))
    ways: list[dict[str, Any]] = [
        {"keyfile_dict": service_account()},
        {"keyfile_dict": json.dumps(service_account())},
        {"key_path": str(file)},
    ]
    for extra in ways:
        client = open_client(PubSubProducer(subscription="orders", conn_id="gcp"), env_of(**extra))
        assert client.name == "projects/key-project/subscriptions/orders"
        client.close()
    over = open_client(
        PubSubProducer(subscription="orders", conn_id="gcp"),
        env_of(keyfile_dict=service_account(), project="conn-project"),
    )
    assert over.name == "projects/conn-project/subscriptions/orders"
    over.close()


@pytest.mark.usefixtures("nowhere")
def test_application_default_credentials_are_used_where_there_is_no_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "key.json"
    file.write_text(json.dumps(service_account()))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))

    class Nothing:
        def get(self, conn_id: str) -> Connection:
            raise ConnectionMissing(f"there is no connection {conn_id!r}")

    none = ProducerEnv(connections=Nothing())
    for env, options in ((none, {}), (none, {"conn_id": None}), (env_of(), {"conn_id": "gcp"})):
        client = open_client(PubSubProducer(subscription="orders", **options), env)
        assert client.name == "projects/key-project/subscriptions/orders"
        client.close()


@pytest.mark.usefixtures("nowhere")
def test_a_chain_of_impersonation_ends_at_its_last() -> None:
    producer = PubSubProducer(subscription="orders", conn_id="gcp")
    chain = "a@p.iam.gserviceaccount.com, b@p.iam.gserviceaccount.com"
    env = env_of(keyfile_dict=service_account(), impersonation_chain=chain)
    found, _ = credentials_of(producer, env)
    assert found.service_account_email == "b@p.iam.gserviceaccount.com"
    assert found._delegates == ["a@p.iam.gserviceaccount.com"]


@pytest.mark.usefixtures("nowhere")
def test_what_the_google_provider_has_impersonated_is_not_impersonated_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its hook reads the connection's chain, and whom it ends at may not impersonate itself."""
    made = object()

    class Hook:
        def __init__(self, gcp_conn_id: str) -> None:
            assert gcp_conn_id == "gcp"

        def get_credentials_and_project_id(self) -> tuple[object, str]:
            return made, "p-12345"

    names = "google", "google.common", "google.common.hooks", "google.common.hooks.base_google"
    for name in names:
        module = ModuleType(f"airflow.providers.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__dict__["GoogleBaseHook"] = Hook
    producer = PubSubProducer(subscription="orders", conn_id="gcp")
    env = env_of(key_secret_name="s", impersonation_chain="b@p.iam.gserviceaccount.com")
    assert credentials_of(producer, env)[0] is made


def test_without_a_project_a_short_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_token_that_is_not_given_is_said_without_the_servers_text(
    by_grpc: bool, text: str, expected: type[BroadwayError], words: str
) -> None:
    """Asked for by the client itself, and by gRPC in a thread of its own."""
    from google.api_core.exceptions import ServiceUnavailable
    from google.auth.exceptions import RefreshError

    raised: Any = RefreshError
    said = f"invalid_grant: {text}"
    if by_grpc:
        raised = ServiceUnavailable
        said = f"Getting metadata from plugin failed with error: ('{said}', {{}})"
    error = translated(raised(said), "ListTimeSeries", "projects/p", "here")
    assert isinstance(error, expected)
    assert words in str(error)
    assert SECRET not in str(error)


# ---------------------------------------------------------------------------------- clocks


# ---------------------------------------------------------------------------------- at the limits


def buried(at: Place, message: dict[str, Any]) -> Any:
    """The dead letter of a message, with a long reason."""
    dead = at.server.topic()
    grave = at.server.subscription(dead)
    at.server.publish_all(at.topic, [message])
    run = at.begin(dead_letter=dead, on_failure="dead_letter")
    [found] = run.take()
    verdict = Verdict(Action.DEAD_LETTER, 0.0, "r" * 2048, "batch")
    entries = [entry_of(found, verdict)]
    settled = Settlement(rest=RELEASE, entries=lambda: iter(entries), expected=1)
    report = run.custodian.settle(run.source.lease, settled)
    assert report == SettleReport(dead_lettered=1)
    assert at.left() == 0
    [letter] = at.server.drain(grave)
    return letter


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
def test_a_dead_letter_keeps_the_message_and_as_much_of_the_reason_as_fits(
    message: dict[str, Any], ours: int, tmp_path: Path
) -> None:
    with place(tmp_path) as at:
        letter = buried(at, message)
        assert letter.data == message["data"]
        assert letter.ordering_key == message.get("ordering_key", "")
        own = {k: v for k, v in letter.attributes.items() if not k.startswith("broadway_")}
        assert own == message.get("attributes", {})
        assert len(letter.attributes) - len(own) == ours
        if ours:
            assert len(letter.attributes["broadway_reason"].encode()) == 1024


def test_dead_letters_that_are_too_large_for_one_request_are_sent_in_several(
    tmp_path: Path,
) -> None:
    with place(tmp_path) as at:
        dead = at.server.topic()
        for _ in range(2):
            at.server.publish_all(at.topic, [{"data": b"x" * 6_000_000}])
        run = at.begin(dead_letter=dead, on_failure="dead_letter")
        verdict = Verdict(Action.DEAD_LETTER, 0.0, "bad", "batch")
        asked: list[str] = []
        at.broker.answer = lambda call, _: asked.append(call)
        entries = [entry_of(each, verdict) for each in run.take()]
        settled = Settlement(rest=RELEASE, entries=lambda: iter(entries), expected=2)
        report = run.custodian.settle(run.source.lease, settled)
        assert report == SettleReport(dead_lettered=2)
        assert asked.count("Publish") == 2
        assert at.left() == 0


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
def test_an_option_that_cannot_be_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionsError, match=words):
        PubSubProducer(**options)


def test_actions_are_text_wherever_they_are_kept() -> None:
    given = ["ack", "noop", "nack", ("nack", 100), ["nack", 0], "nack(7)", "nack(0)"]
    made = [PubSubProducer(subscription="orders", on_failure=each).on_failure for each in given]
    assert made == ["ack", "noop", "nack", "nack(100)", "nack", "nack(7)", "nack"]


@pytest.mark.parametrize(
    ("action", "service"), [("Pull", "pubsub"), ("ListTimeSeries", "monitoring")]
)
def test_an_api_that_is_not_enabled_is_named(action: str, service: str) -> None:
    from google.api_core.exceptions import PermissionDenied
    from google.rpc.error_details_pb2 import ErrorInfo

    info = ErrorInfo(reason="SERVICE_DISABLED")
    error = PermissionDenied("no", error_info=info)  # type: ignore[no-untyped-call]
    found = translated(error, action, "projects/p/subscriptions/s", "here")
    assert f"gcloud services enable {service}.googleapis.com" in str(found)
