"""No secret in an option, in any place, is in the text of an error."""

from __future__ import annotations

import dataclasses
import pickle
import string
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_broadway import Broadway
from airflow_broadway.cli.output import print_error
from airflow_broadway.core.errors import BroadwayError, OptionsError
from airflow_broadway.core.masking import redacted, shown
from airflow_broadway.core.model.options import Options, build, override
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.testing import DummyProducer

PRODUCERS: dict[type[Any], dict[str, Any]] = {
    RabbitMQProducer: {"queue": "q"},
    SqliteProducer: {"queue": "q"},
    SqsProducer: {"queue_url": "https://sqs.eu-west-1.amazonaws.com/123456789012/orders"},
    DummyProducer: {},
}
OPTIONS = [(cls, field.name) for cls in PRODUCERS for field in dataclasses.fields(cls)]
#: Names that no option has, and that name a secret.
NAMES = ["password", "secret", "aws_secret_access_key", "api_key", "auth_token", "management_url"]

#: Begins and ends so that no other part of an error can hold it.
SECRETS = st.text(string.ascii_letters + string.digits + "/@:#?&%+=!-_.", max_size=12).map(
    lambda middle: f"Zq7{middle}x9K"
)
#: Ways in which a secret may stand in a text.
FORMS: list[Callable[[str], str]] = [
    lambda secret: f"amqp://guest:{secret}@rabbit.example.org:5672/shop",
    lambda secret: f"amqps://{secret}@rabbit.example.org",
    lambda secret: f"https://user:{secret}@host/path?x=1",
    lambda secret: f"guest:{secret}@host",
    lambda secret: f"amqp://a:{secret}@one,amqp://b:{secret}@two",
    lambda secret: f"s3://key:{secret}@bucket/folder",
    lambda secret: f"amqp://{{{{ user }}}}:{secret}@host",
    lambda secret: f"host=one password='{secret}' user=me",
]


def texts_of(error: BaseException) -> str:
    """Returns all printable texts of an error."""
    again = pickle.loads(pickle.dumps(error))
    shown = traceback.format_exception_only(error)
    return "\n".join([str(error), repr(error), str(again), *shown])


def refusals(cls: type[Any], name: str, value: object) -> list[BaseException]:
    """The errors of an option's value: declared, overriding, rendered, in a pipeline."""
    required = PRODUCERS[cls]
    base = cls(**required)

    class Pipeline(Broadway):
        producer = base

    raised: list[BaseException] = []
    tries: list[Callable[[], object]] = [
        lambda: cls(**{**required, name: value}),
        lambda: override(base, {name: value}, "producer"),
        lambda: override(base, {name: value}, "producer", rendered=True),
        lambda: build(cls, {**required, name: value}, "producer", rendered=True),
        lambda: Pipeline(producer={name: value}),
        lambda: Pipeline(producer={name: {"password": value}}),
        lambda: Pipeline(producer={name: [{"uri": value}]}),
        lambda: Pipeline(batchers={name: value}),
        lambda: Pipeline(**{name: value}),
    ]
    for attempt in tries:
        try:
            attempt()
        except BroadwayError as error:
            raised.append(error)
    return raised


@pytest.mark.parametrize(("cls", "name"), OPTIONS)
@given(secret=SECRETS, form=st.sampled_from(FORMS))
@settings(max_examples=5, deadline=None)
def test_secret_in_an_address_is_never_shown(cls, name, secret, form):
    for error in refusals(cls, name, form(secret)):
        assert secret not in texts_of(error)


@pytest.mark.parametrize("cls", PRODUCERS)
@pytest.mark.parametrize("name", [*NAMES, "uri", "endpoint_url"])
@given(secret=SECRETS)
@settings(max_examples=5, deadline=None)
def test_secret_or_address_option_is_never_shown(cls, name, secret):
    raised = refusals(cls, name, secret)

    assert any(isinstance(error, OptionsError) for error in raised)
    for error in raised:
        assert secret not in texts_of(error)


def nested_of(cls: type[Any]) -> list[tuple[str, type[Options]]]:
    return [
        (field.name, field.metadata["nested"])
        for field in dataclasses.fields(cls)
        if field.metadata["nested"] is not None
    ]


@pytest.mark.parametrize(
    ("cls", "name", "inner"),
    [
        (cls, name, field.name)
        for cls in PRODUCERS
        for name, nested in nested_of(cls)
        for field in dataclasses.fields(nested)  # type: ignore[arg-type]
    ],
)
@given(secret=SECRETS, form=st.sampled_from(FORMS))
@settings(max_examples=3, deadline=None)
def test_secret_in_a_nested_option_is_never_shown(cls, name, inner, secret, form):
    raised = refusals(cls, name, {inner: form(secret), "token": secret})

    assert raised
    for error in raised:
        assert secret not in texts_of(error)


def test_password_error_does_not_print_the_password():
    with pytest.raises(OptionsError) as raised:
        RabbitMQProducer(queue="q", uri="amqp://guest:s3cret@host")

    assert str(raised.value) == (
        "invalid value for option 'RabbitMQProducer.uri': expected amqp://host:port/virtual-host"
        " without a password: that belongs into an Airflow connection or None, got: ***"
    )


@pytest.mark.parametrize(
    "value",
    [
        *(5, -1.5, None, True, "", "orders", "orders@home", "amqp://host:5672/v"),
        "s3://aws_default@bucket/folder",
        "abfss://container@account.dfs.core.windows.net/x",
        "https://sqs.eu-west-1.amazonaws.com/123456789012/orders",
        ["a", ("b", 1)],
        {"durable": True, "arguments": {"x-max-length": 5}},
        b"bytes",
        ("exchange",),
    ],
)
def test_harmless_value_is_shown(value):
    assert shown(value, "queue") == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        "AKIAZq7x9KZq7x9KZq7x",
        "ghp_Zq7x9KZq7x9KZq7x9K",
        "Bearer Zq7x9K.Zq7x9K",
        "eyJhbGciOi.Zq7x9K.Zq7x9K",
        "https://host/?X-Amz-Signature=Zq7x9K&a=1",
        "amqp://guest:Zq7x9K",
        "-----BEGIN RSA PRIVATE KEY-----\nZq7x9K",
        {"spark.hadoop.fs.s3a.secret.key": "Zq7x9K", "spark.hadoop.fs.s3a.access.key": "Zq7x9K"},
        [{"deep": {"Password": "Zq7x9K"}}],
        b"amqp://guest:Zq7x9K@host",
        {"amqp://guest:Zq7x9K@host": 1},
    ],
)
def test_secret_like_value_is_masked(value):
    assert "Zq7x9K" not in shown(value, "context")
    assert "***" in shown(value, "context")


@given(secret=SECRETS)
@settings(max_examples=100, deadline=None)
def test_command_line_masks_secrets_of_addresses(secret):
    for text in (
        f"cannot reach amqp://guest:{secret}@host:5672/v",
        f"cannot reach https://{secret}@host/path, twice",
        f"s3://key:{secret}@bucket/x and amqp://g:{secret}@h",
    ):
        assert secret not in redacted(text)


def test_command_line_leaves_paths_and_connections(capsys):
    text = "file:///data/me@home/x s3://aws_default@bucket/x http://host/path me@example.org"

    print_error(text)

    assert text in capsys.readouterr().err


def test_every_address_of_a_word_is_masked():
    assert redacted("file:///x,amqp://g:p@h") == "file:///x,amqp://***@h"


#: Runs of the characters that a pattern repeats, and beginnings of what it searches for.
RUNS = [
    *("a", "0123456789abcdef", " ", "\n", "@", ":", "/", "://", "a://", "a@", "a://b@", "a."),
    *("a-", "a+", "a=", "a='", "a: ", "é", "token", "token ", "token=", "token='", "?token"),
    *("&a", "&sig=a", "password: ", "api_key.", "eyJ", "-eyJ", "eyJ.", ".eyJ", "eyJa.", "AKIA"),
    *("ghp_", "xoxb-", "Bearer ", "Bearer a.b ", "-----BEGIN ", "-----BEGIN A", "PRIVATE KEY-----"),
    *("https://shop.example/hook?token=abc&x=1 ", "https://shop.example/a?b=c,", "a://b:1"),
    *('{"id": 1, "token": "abc", "to": "bob@example.org"}, ', "a://b:1/"),
]
MEGABYTE = 1 << 20


def least_time(call: Callable[[], object]) -> float:
    """The least processor time of three calls."""
    times = []
    for _ in range(3):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("before", "after"), [("", ""), ("", "@host"), ("a://b:", "@")])
@pytest.mark.parametrize("run", RUNS)
def test_masking_takes_linear_time(run, before, after):
    def text(size):
        return f"{before}{run * (size // len(run.encode()) + 1)}{after} ?token=x"

    for mask in (redacted, shown):
        small = least_time(partial(mask, text(MEGABYTE // 16)))
        # Quadratic time would be 256 times as long, or would pass this test's timeout.
        begin = time.process_time()
        mask(text(MEGABYTE))
        assert time.process_time() - begin < 100 * max(small, 0.001)
