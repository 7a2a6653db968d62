"""Promises of ``docs/sqs.md`` that no other test covers, at their limits."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.producers.sqs.client import boto_client
from tests.fake_sqs import URL
from tests.unit.producers.halves import DEAD as DEAD_LETTERED
from tests.unit.producers.halves import RETRY, renewed
from tests.unit.producers.sqs.kit import SqsHalves, halves, options
from tests.unit.producers.sqs.test_errors import env

DEAD = f"{URL}-dead"
HOUR = 3600.0


# ---------------------------------------------------------------------------------- connection


def test_other_connection_extras_apply():
    extra = {
        "region_name": "eu-north-1",
        "verify": "/etc/ours.pem",
        "config_kwargs": {"connect_timeout": 3, "retries": {"total_max_attempts": 2}},
    }
    client: Any = boto_client(SqsProducer(queue_name="orders", conn_id="aws"), env(extra=extra))

    assert client._endpoint.http_session._verify == "/etc/ours.pem"
    assert client.meta.config.connect_timeout == 3
    assert client.meta.config.retries["total_max_attempts"] == 2


def test_endpoint_is_option_or_environment_variable(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:4566")
    given = env(extra={"region_name": "us-east-1"})

    named = boto_client(SqsProducer(queue_name="orders", conn_id="aws"), given)
    optional = boto_client(
        SqsProducer(queue_name="orders", conn_id="aws", endpoint_url="http://127.0.0.1:9324"), given
    )

    assert named.meta.endpoint_url == "http://127.0.0.1:4566"
    assert optional.meta.endpoint_url == "http://127.0.0.1:9324"


@options(queue_url=None, queue_name="orders")
def test_queue_name_is_resolved_once(run):
    run.fake.put(["a"])

    assert [message.data for message in run.take()] == [b"a"]
    assert run.fake.requests["GetQueueUrl"] == 1


# ------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize(
    "place", [DEAD, "arn:aws:sqs:eu-west-1:123456789012:orders-dead", "orders-dead"]
)
def test_dead_letter_queue_is_url_arn_or_name(place):
    with halves(dead_letter=place) as run:
        dead_letter(run)

        assert [letter["MessageBody"] for letter in run.fake.queue(DEAD).sent] == ["a"]
        assert run.fake.left() == 0


@options(dead_letter=f"{URL}-ours")
def test_dead_letter_option_overrides_redrive_policy(run):
    policy = {"deadLetterTargetArn": "arn:aws:sqs:eu-west-1:1:orders-dead"}
    run.fake.queue().attributes["RedrivePolicy"] = json.dumps(policy)
    dead_letter(run)

    assert len(run.fake.queue(f"{URL}-ours").sent) == 1
    assert run.fake.queue(DEAD).sent == []


@options(dead_letter=DEAD)
def test_dead_letter_keeps_binary_attribute(run):
    own = {"picture": {"DataType": "Binary", "BinaryValue": b"\x00\xff"}}
    dead_letter(run, MessageAttributes=own)

    [letter] = run.fake.queue(DEAD).sent
    assert letter["MessageAttributes"]["picture"] == own["picture"]


def dead_letter(run: SqsHalves, **more: Any) -> None:
    """Receives a message, and dead-letters it."""
    report = run.settle(run.take_new(["a"], **more), {"a": DEAD_LETTERED})
    assert report.dead_lettered == 1, report


@pytest.mark.parametrize(("delay", "seconds"), [(1.0, 1), (1.001, 2), (59.5, 60)])
def test_delay_is_rounded_up_to_seconds(delay, seconds, run):
    run.settle(run.take_new(["a"]), {"a": RETRY._replace(delay=delay)})

    run.clock.advance(seconds - 0.001)
    assert run.fake.waiting() == []
    run.clock.advance(0.001)
    assert run.fake.waiting() == ["a"]


# ------------------------------------------------------------------------------------ holding


@options(lease=1000.0)
def test_message_is_renewed_at_60_percent_of_lease(run):
    run.fake.put(["a"])
    run.take()
    run.clock.advance(399.0)
    run.renew()
    assert run.fake.requests["ChangeMessageVisibility"] == 0
    run.clock.advance(1.0)

    run.renew()

    assert run.fake.requests["ChangeMessageVisibility"] == 1


@pytest.mark.parametrize(("lease", "ahead"), [(HOUR, 2 * HOUR), (900.0, HOUR)])
def test_twelve_hour_limit_warns_ahead(lease, ahead, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "airflow_broadway.producers.sqs")
    with halves(f"file://{tmp_path}", lease=lease) as run:
        run.fake.put(["a"])
        run.take()
        held = run.source.lease
        for _ in range(int((12 * HOUR - ahead) / (lease / 4))):
            held = renewed(run.custodian, held)
            run.clock.advance(lease / 4)
        assert caplog.messages == []
        run.clock.advance(0.4 * lease)  # no renewal is due before

        run.custodian.renew(held)

        [warning] = [line for line in caplog.messages if "12 hours" in line]
        assert "cannot be renewed beyond that" in warning


@pytest.mark.parametrize(("left", "reported"), [(HOUR + 1, False), (HOUR - 1, True)])
@options(lease=12 * HOUR)
def test_settlement_in_last_hour_is_reported(left, reported, run):
    messages = run.take_new(["a"])
    run.clock.advance(12 * HOUR - left)

    report = run.settle(messages)

    assert report.acked == 1
    assert bool(report.errors) is reported


def test_lapse_keeps_retry_count(tmp_path):
    staging = f"file://{tmp_path}"
    with halves(staging) as run:
        run.settle(run.take_new(["a"]), {"a": RETRY})
    with halves(staging, fake=run.fake) as lapsed:
        assert [message.attempt for message in lapsed.take()] == [2]
        lapsed.clock.advance(601.0)
    with halves(staging, fake=run.fake) as heir:
        [again] = heir.take()

    assert (again.attempt, again.redelivered) == (2, True)
