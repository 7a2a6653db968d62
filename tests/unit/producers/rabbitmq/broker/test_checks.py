"""Effective policies of a run's queues, and the findings about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.amqp.address import Address
from airflow_broadway.producers.rabbitmq.broker import checks
from airflow_broadway.producers.rabbitmq.broker.checks import (
    ApiError,
    Role,
    Setting,
    _matches,
    check_queues,
    check_version,
    judge,
    refuse_losses,
    roles_of,
)

ORDERS = RabbitMQProducer(queue="orders")


def policy(name: str = "p", *, pattern: str = ".*", **options: Any) -> dict[str, Any]:
    """Returns a policy; other options than its place are its definition."""
    return {
        "name": name,
        "pattern": pattern,
        "apply-to": options.pop("apply_to", "all"),
        "priority": options.pop("priority", 0),
        "definition": {key.replace("_", "-"): value for key, value in options.items()},
    }


def judged(
    role: Role, *policies: dict[str, Any], kind: str = "quorum", **arguments: Any
) -> list[Finding]:
    own = {key.replace("_", "-"): value for key, value in arguments.items()} or role.arguments or {}
    return judge(role, kind, effective(role.queue, kind, own, policies))


def effective(
    queue: str,
    kind: str,
    arguments: Mapping[str, Any],
    policies: Iterable[dict[str, Any]],
    operators: Iterable[dict[str, Any]] = (),
) -> dict[str, Setting]:
    sources = {"policy": policies, "operator policy": operators}
    return checks.effective(sources, queue, kind, arguments)


def role_of(name: str) -> Role:
    return next(role for role in roles_of(ORDERS) if role.name == name)


# -- policies --------------------------------------------------------------------------------------


def test_only_matching_policy_of_highest_priority_applies():
    settings = effective(
        "broadway.dead.orders",
        "quorum",
        {},
        [
            policy("low", expires=1, max_length=1),
            policy("high", pattern="^broadway", priority=2, expires=2),
            policy("other", pattern="^other", priority=9, expires=3),
            policy("classic", apply_to="classic_queues", priority=9, expires=4),
            policy("exchange", apply_to="exchanges", priority=9, expires=5),
        ],
    )

    assert {name: setting.value for name, setting in settings.items()} == {"expires": 2}
    assert settings["expires"].by == "the policy 'high'"


def test_lower_limit_and_declared_arguments_win():
    settings = effective(
        "q",
        "quorum",
        {"x-message-ttl": 50, "x-max-length": 5, "x-overflow": "reject-publish"},
        [policy("users", message_ttl=40, max_length=9, overflow="drop-head")],
        [policy("operators", message_ttl=30)],
    )

    assert settings["message-ttl"] == (30, "the operator policy 'operators'")
    assert settings["max-length"] == (5, "its declaration")
    assert settings["overflow"].value == "reject-publish"


def test_unparsable_pattern_counts_as_match():
    assert effective("orders", "quorum", {}, [policy(pattern=r"^broadway\.(?|a|b", expires=1)])


@pytest.mark.parametrize(
    "pattern",
    [
        r"^broadway\.dead\.(a+)+$x",
        r"^broadway\.dead\.(\w|a)*$x",
        r"(a)\1\1\1x",
        "a?" * 40 + "x",
        ".*a.*a.*a.*a.*a.*x",
    ],
)
def test_catastrophic_pattern_counts_as_match(pattern):
    assert _matches(pattern, f"broadway.dead.{'a' * 200}")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (".*", True),
        ("", True),
        ("^orders$", True),
        ("^order", True),
        ("rde", True),
        ("^ord.rs", True),
        (r"^orders\..*", False),
        ("^(orders|bills)$", True),
        ("^[a-m]", False),
        (r"^(?!broadway\.).*", True),
        ("^(?!orders).*", False),
        (r"^[a-z]+\.[a-z]+\.(eu|us)(\.dlx)?$", False),
    ],
)
def test_pattern_matches_like_broker(pattern, expected):
    assert _matches(pattern, "orders") is expected


# -- rules -----------------------------------------------------------------------------------------


def test_own_queues_as_declared_have_no_findings():
    assert [finding for role in roles_of(ORDERS)[1:] for finding in judged(role)] == []
    assert len(roles_of(ORDERS, ["broadway.held.orders.0", "broadway.held.orders.1"])) == 12


@pytest.mark.parametrize("name", ["held", "delay", "dead"])
def test_policy_that_expires_own_queue_is_error(name):
    [finding] = judged(role_of(name), policy(expires=60_000))

    assert finding.level == "error"
    assert (
        f"the queue {role_of(name).queue!r}: the policy 'p' sets expires 60000 ms: " in finding.text
    )


@pytest.mark.parametrize(
    ("name", "definition", "level"),
    [
        ("held", {"message_ttl": 60_000}, "error"),
        ("dead", {"message_ttl": 60_000}, "error"),
        ("delay", {"message_ttl": 500}, "warning"),
        ("held", {"delivery_limit": 20}, "error"),
        ("dead", {"delivery_limit": 20}, "error"),
        ("delay", {"max_length_bytes": 20}, "warning"),
        ("held", {"max_length": 20}, "warning"),
        ("dead", {"max_length": 20, "overflow": "drop-head"}, "warning"),
    ],
)
def test_policy_that_loses_messages_of_own_queues_is_error(name, definition, level):
    [finding] = judged(role_of(name), policy(**definition))

    assert finding.level == level
    assert repr(role_of(name).queue) in finding.text


def test_longer_retry_ttl_of_policy_has_no_finding():
    assert judged(role_of("delay"), policy(message_ttl=10**12)) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"x_expires": 60_000}, "the queue is deleted"),
        ({"x_message_ttl": 60_000}, "is dropped"),
        ({"x_message_ttl": 60_000, "x_dead_letter_exchange": "d"}, "goes to its dead-letter"),
        ({"x_delivery_limit": 5}, "also by runs that died"),
        ({"x_max_length": 5}, "the oldest message is dropped"),
        ({"x_max_length": 5, "x_overflow": "reject-publish"}, "stays in its holding queue"),
    ],
)
def test_source_queue_policies_are_warnings(arguments, text):
    [finding] = judged(Role("source", "orders"), kind="classic", **arguments)

    assert finding.level == "warning"
    assert text in finding.text


def test_custom_dead_letter_queue_has_warnings_only():
    producer = RabbitMQProducer(queue="orders", dead_letter="graveyard")
    sink = roles_of(producer)[-1]

    assert sink == Role("sink", "graveyard")
    assert [finding.level for finding in judged(sink, policy(expires=1, max_length=5))] == [
        "warning"
    ] * 2


# -- checks of a broker ----------------------------------------------------------------------------


class Api:
    """A management API that knows one source queue."""

    url = "http://broker:15672"
    policy_list: tuple[dict[str, Any], ...] = ()
    queues: dict[str, dict[str, Any]] = {}
    flags: dict[str, str] | None = None

    def __init__(self, address: Address) -> None:
        pass

    def policies(self) -> dict[str, Iterable[dict[str, Any]]]:
        return {"policy": self.policy_list}

    def queue(self, name: str) -> dict[str, Any] | None:
        return self.queues.get(name)

    def feature_flags(self) -> dict[str, str]:
        if self.flags is None:
            raise ApiError("for administrators")
        return self.flags


@pytest.fixture
def api(monkeypatch):
    api = type("FakeApi", (Api,), {"queues": {"orders": {"type": "quorum", "durable": True}}})
    monkeypatch.setattr(checks, "Management", api)
    return api


def connection(version: str) -> Any:
    """Returns a connection to a broker without queues of ours."""
    return SimpleNamespace(version=version, address=Address(), depth=lambda name: None)


def check(
    version: str, options: RabbitMQProducer = ORDERS, *, exists: bool = True
) -> list[Finding]:
    return check_queues(connection(version), options, exists=exists)


def test_disabled_feature_flag_is_error(api):
    api.flags = {"quorum_queue": "enabled", "stream_queue": "disabled"}

    [finding] = check("3.10.8")

    assert finding.level == "error"
    assert "enable_feature_flag stream_queue" in finding.text
    assert check("3.13.1") == []


def test_unreadable_policies_are_reported(api):
    [finding] = check("3.10.8")
    assert "only an administrator" in finding.text

    api.queues = {}
    [warning] = check("3.13.0")
    assert warning.level == "warning"
    assert "is another broker's; set the connection's extra 'management_url'" in warning.text


def test_source_to_declare_is_checked_as_declared(api):
    api.queues = {}
    arguments = {"x-queue-type": "stream"}
    producer = RabbitMQProducer(queue="orders", declare={"durable": True, "arguments": arguments})

    [finding] = check("3.13.0", producer, exists=False)

    assert finding.level == "error"
    assert "the queue 'orders': reading a stream" in finding.text


def test_quorum_source_without_delivery_limit_warns_on_rabbitmq_4(api):
    [finding] = check("4.1.0")

    assert finding.level == "warning"
    assert "the queue 'orders': has no delivery-limit" in finding.text
    assert "more than 20 times" in finding.text


def test_transient_queue_and_missing_sink_warn(api):
    api.queues = {"orders": {"type": "classic", "durable": False}}
    producer = RabbitMQProducer(queue="orders", dead_letter="graveyard")

    texts = [finding.text for finding in check("3.13.0", producer)]

    assert texts == [
        "the queue 'orders': is not durable: it and its messages end with the broker",
        "the queue 'graveyard': does not exist: dead letters would be redelivered",
    ]


def test_errors_are_raised_together_and_warnings_logged(api, caplog):
    api.policy_list = (
        policy(pattern="^broadway.dead", expires=1),
        policy(pattern="^broadway.held", expires=1),
        policy(pattern="^orders$", max_length=1),
    )

    error = r"lose messages of this run: .*\(and 1 more: "
    with pytest.raises(ProducerError, match=error) as raised:
        refuse_losses(connection("3.13.1"), ORDERS)

    assert "let no such policy match" in str(raised.value)
    [warning] = caplog.messages
    assert "the queue 'orders': the policy 'p' sets max-length 1: " in warning


def test_broker_losing_delayed_retries_is_refused():
    with pytest.raises(ProducerError, match=r"is 3\.9\.29: its quorum queues lose"):
        refuse_losses(connection("3.9.29"), ORDERS)
    for version in ("3.10.0", "4.1.2", "", "unknown"):
        assert check_version(connection(version)) == []
