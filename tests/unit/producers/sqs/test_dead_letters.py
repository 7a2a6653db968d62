"""Dead letters within SQS's limits."""

from __future__ import annotations

import base64
import json
from typing import Any, cast

import pytest

from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.producers.sqs.client import Queue
from airflow_broadway.producers.sqs.dead_letters import (
    letter,
    letter_of,
    publisher_of,
    received_again,
    sent_back,
    size_of,
)
from airflow_broadway.producers.sqs.limits import MAX_BODY, unsendable
from tests.fake_sqs import URL, FakeSqs


def entry(body: bytes = b"body", reason: str = "too late", attributes: int = 0) -> Entry:
    given: dict[str, Any] = {
        f"a{number}": {"data_type": "String", "string_value": f"v{number}"}
        for number in range(attributes)
    }
    if attributes:
        raw = base64.b64encode(b"\x00").decode()
        given[f"a{attributes - 1}"] = {"data_type": "Binary", "binary_value": raw}
    properties = json.dumps({"attributes": given, "MessageGroupId": "g"})
    verdict = Verdict(Action.DEAD_LETTER, 0.0, reason, "process")
    return Entry("id-1", "", verdict, 3, body, properties)


def values(made: dict[str, Any]) -> dict[str, str]:
    return {name: value.get("StringValue", "") for name, value in made["MessageAttributes"].items()}


def test_dead_letter_has_id_queue_and_reason():
    made = letter(entry(), "orders", fifo=False)

    assert made["MessageBody"] == "body"
    assert values(made) == {
        "broadway_message_id": "id-1",
        "broadway_queue": "orders",
        "broadway_attempt": "3",
        "broadway_stage": "process",
        "broadway_reason": "too late",
    }
    assert "MessageGroupId" not in made


@pytest.mark.parametrize("count", [5, 6, 9, 10])
def test_dead_letter_packs_attributes_into_ten(count):
    made = letter(entry(attributes=count), "orders", fifo=False)

    attributes = made["MessageAttributes"]
    assert len(attributes) <= 10
    packed = json.loads(attributes.get("broadway", {}).get("StringValue", "{}"))
    own = {name for name in attributes if not name.startswith("broadway")}
    assert own | set(packed.get("attributes", {})) == {f"a{number}" for number in range(count)}
    why = packed.get("reason") or attributes["broadway_reason"]["StringValue"]
    assert why == "too late"


def test_second_dead_letter_has_latest_reason_only():
    before = letter(entry(reason="too early", attributes=1), "orders", fifo=False)
    attributes = {
        name: {"data_type": value["DataType"], "string_value": value.get("StringValue", "")}
        for name, value in before["MessageAttributes"].items()
    }
    again = entry()._replace(properties=json.dumps({"attributes": attributes}))

    made = values(letter(again, "orders", fifo=False))

    assert made["broadway_reason"] == "too late"
    assert set(made) == {"a0", *values(letter(entry(), "orders", fifo=False))}


def test_fifo_dead_letter_keeps_group_and_is_deduplicated():
    made = letter(entry(), "orders.fifo", fifo=True)

    assert (made["MessageGroupId"], made["MessageDeduplicationId"]) == ("g", "id-1")


def test_refused_characters_are_replaced_in_reason():
    made = letter(entry(reason="a\x00b\ud800c\uffffd"), "orders", fifo=False)

    assert values(made)["broadway_reason"] == "a�b�c�d"
    assert unsendable("tab\t, line\r\n, ż, 😀") == ""
    assert unsendable("a\x0b") == "U+000B"


def test_long_reason_is_truncated_to_fit():
    full = letter(entry(reason="r" * 5000), "orders", fifo=False)
    assert len(values(full)["broadway_reason"]) == 2048

    tight = letter(entry(b"x" * (MAX_BODY - 300), "r" * 5000), "orders", fifo=False)
    assert size_of(tight) <= MAX_BODY
    assert values(tight)["broadway_reason"] == "r" * 64

    whole = letter(entry(b"x" * MAX_BODY), "orders", fifo=False)
    assert size_of(whole) == MAX_BODY
    assert "MessageAttributes" not in whole


def test_requests_have_ten_entries_and_256_kib():
    publisher = publisher_of(Queue(cast("Any", FakeSqs()), URL))
    small = {str(number): {"MessageBody": "x"} for number in range(25)}
    assert [len(request) for request in publisher.requests(small)] == [10, 10, 5]

    large = {str(number): {"MessageBody": "x" * 100_000} for number in range(5)}
    large["whole"] = {"MessageBody": "x" * MAX_BODY}
    assert [len(request) for request in publisher.requests(large)] == [2, 2, 1, 1]


# -- requeued -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 5, 9, 10])
def test_requeued_message_has_original_attributes(count):
    # Given a letter whose message had up to ten attributes
    sent = letter(entry(attributes=count), "orders", fifo=True)
    raw = {
        "MessageId": "the letter's",
        "Body": sent["MessageBody"],
        "MessageAttributes": sent["MessageAttributes"],
        "Attributes": {"MessageGroupId": sent["MessageGroupId"]},
    }

    # When it is read and requeued
    read = letter_of(raw, "another")
    back = sent_back(raw, read.original_id, fifo=True)

    # Then its message has its attributes, and is marked as redelivered
    assert (read.original_id, read.origin, read.attempt) == ("id-1", "orders", 3)
    assert (read.reason, read.stage) == ("too late", "process")
    assert len(back["MessageAttributes"]) <= 10
    assert (back["MessageGroupId"], back["MessageDeduplicationId"]) == ("g", "the letter's")
    received = received_again(back["MessageAttributes"])
    assert received is not None
    own = {name: item for name, item in received.items() if name != "broadway_requeued"}
    assert {n: e.get("StringValue", e.get("BinaryValue")) for n, e in own.items()} == {
        f"a{number}": b"\x00" if number == count - 1 else f"v{number}" for number in range(count)
    }


def test_foreign_attribute_is_no_mark():
    for text in ("no JSON", "[1]", '{"reason": "x"}', "[" * 100_000):
        foreign = {"broadway": {"DataType": "String", "StringValue": text}}
        assert received_again(foreign) is None
        raw = {"MessageId": "m", "Body": "", "MessageAttributes": foreign}
        attributes = letter_of(raw, "orders").properties["attributes"]
        assert attributes == {"broadway": {"data_type": "String", "string_value": text}}
    assert received_again({"other": {"DataType": "String", "StringValue": "1"}}) is None
