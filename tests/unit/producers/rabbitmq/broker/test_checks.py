"""What policies make of a run's queues, and what is said about it."""

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


def policy(
    name: str = "p",
    *,
    pattern: str = ".*",
    apply_to: str = "all",
    priority: int = 0,
    **definition: Any,
) -> dict[str, Any]:
    return {
        "name": name,
        "pattern": pattern,
        "apply-to": apply_to,
        "priority": priority,
        "definition": {key.replace("_", "-"): value for key, value in definition.items()},
    }


def found(
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
    shown = {"policy": policies, "operator policy": operators}
    return checks.effective(shown, queue, kind, arguments)


def role(name: str) -> Role:
    return next(each for each in roles_of(ORDERS) if each.name == name)


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
    assert [each for known in roles_of(ORDERS)[1:] for each in found(known)] == []
    assert len(roles_of(ORDERS, ["broadway.held.orders.0", "broadway.held.orders.1"])) == 12


@pytest.mark.parametrize("name", ["held", "delay", "dead"])
def test_policy_that_expires_own_queue_is_error(name):
    [one] = found(role(name), policy(expires=60_000))

    assert one.level == "error"
    assert f"the queue {role(name).queue!r}: the policy 'p' sets expires 60000 ms: " in one.text


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
    [one] = found(role(name), policy(**definition))

    assert one.level == level
    assert repr(role(name).queue) in one.text


def test_longer_retry_ttl_of_policy_has_no_finding():
    assert found(role("delay"), policy(message_ttl=10**12)) == []


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
    [one] = found(Role("source", "orders"), kind="classic", **arguments)

    assert one.level == "warning"
    assert text in one.text


def test_custom_dead_letter_queue_has_warnings_only():
    own = RabbitMQProducer(queue="orders", dead_letter="graveyard")
    sink = roles_of(own)[-1]

    assert sink == Role("sink", "graveyard")
    assert [each.level for each in found(sink, policy(expires=1, max_length=5))] == ["warning"] * 2


# -- the whole look --------------------------------------------------------------------------------


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
    made = type("Made", (Api,), {"queues": {"orders": {"type": "quorum", "durable": True}}})
    monkeypatch.setattr(checks, "Management", made)
    return made


def connection(version: str) -> Any:
    """One to a broker that has no queue of ours."""
    return SimpleNamespace(version=version, address=Address(), depth=lambda name: None)


def check(
    version: str, options: RabbitMQProducer = ORDERS, *, exists: bool = True
) -> list[Finding]:
    return check_queues(connection(version), options, exists=exists)


def test_disabled_feature_flag_is_error(api):
    api.flags = {"quorum_queue": "enabled", "stream_queue": "disabled"}

    [one] = check("3.10.8")

    assert one.level == "error"
    assert "enable_feature_flag stream_queue" in one.text
    assert check("3.13.1") == []


def test_unreadable_policies_are_reported(api):
    [one] = check("3.10.8")
    assert "only an administrator" in one.text

    api.queues = {}
    [other] = check("3.13.0")
    assert other.level == "warning"
    assert "is another broker's; set the connection's extra 'management_url'" in other.text


def test_source_to_declare_is_checked_as_declared(api):
    api.queues = {}
    arguments = {"x-queue-type": "stream"}
    own = RabbitMQProducer(queue="orders", declare={"durable": True, "arguments": arguments})

    [one] = check("3.13.0", own, exists=False)

    assert one.level == "error"
    assert "the queue 'orders': reading a stream" in one.text


def test_quorum_source_without_delivery_limit_warns_on_rabbitmq_4(api):
    [one] = check("4.1.0")

    assert one.level == "warning"
    assert "the queue 'orders': has no delivery-limit" in one.text
    assert "more than 20 times" in one.text


def test_transient_queue_and_missing_sink_warn(api):
    api.queues = {"orders": {"type": "classic", "durable": False}}
    own = RabbitMQProducer(queue="orders", dead_letter="graveyard")

    texts = [each.text for each in check("3.13.0", own)]

    assert texts == [
        "the queue 'orders': is not durable: it and its messages end with the broker",
        "the queue 'graveyard': does not exist: dead letters would come back",
    ]


def test_errors_are_raised_together_and_warnings_logged(api, caplog):
    api.policy_list = (
        policy(pattern="^broadway.dead", expires=1),
        policy(pattern="^broadway.held", expires=1),
        policy(pattern="^orders$", max_length=1),
    )

    with pytest.raises(
        ProducerError, match=r"lose messages of this run: .*\(and 1 more: "
    ) as raised:
        refuse_losses(connection("3.13.1"), ORDERS)

    assert "let no such policy match" in str(raised.value)
    [warning] = caplog.messages
    assert "the queue 'orders': the policy 'p' sets max-length 1: " in warning


def test_broker_losing_delayed_retries_is_refused():
    with pytest.raises(ProducerError, match=r"is 3\.9\.29: its quorum queues lose"):
        refuse_losses(connection("3.9.29"), ORDERS)
    for version in ("3.10.0", "4.1.2", "", "unknown"):
        assert check_version(connection(version)) == []
