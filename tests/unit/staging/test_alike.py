"""A batch holds the same whether its messages were staged or not."""

from __future__ import annotations

import tempfile
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_broadway import Broadway
from airflow_broadway.core.model.batch_info import BatchInfo, Trigger
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.core.schema.encoding import load_key
from airflow_broadway.core.stages.processor import ProcessorStage
from airflow_broadway.core.stages.staged_row import RowConverter
from airflow_broadway.staging.batch_reader import BatchReader
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.writer import ProcessWriter
from airflow_broadway.testing import DummyProducer, PipelineDriver
from tests.unit.passing import Passing
from tests.unit.staging.kit import batches_of, manifest_of, message, open_generation, open_run

NAN = float("nan")
EVENING = datetime(2013, 1, 31, 19, tzinfo=timezone(timedelta(hours=7)))
NOON = datetime(2013, 1, 31, 12)  # noqa: DTZ001  # it has no zone to lose
ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


class Point(NamedTuple):
    x: int
    y: int


class Level(IntEnum):
    LOW = 1


class Word(StrEnum):
    YES = "yes"


#: A batch: key, partition, size, trigger, id; and of each message id, data, key and metadata.
_Batch = tuple[Any, int | None, int, str, str, list[Any]]
#: What became of messages: the batches, and (id, reason) of each that failed before them.
_Seen = tuple[list[_Batch], list[tuple[str, str]]]


def typed(value: Any) -> Any:
    """A value with the types of all its parts, to compare; NaN is like NaN."""
    kind = type(value).__name__
    if isinstance(value, (set, frozenset)):
        return kind, sorted((typed(each) for each in value), key=repr)
    if isinstance(value, (list, tuple)):
        return kind, [typed(each) for each in value]
    if isinstance(value, dict):
        return kind, [(typed(key), typed(item)) for key, item in value.items()]
    return kind, repr(value)


def told(info: BatchInfo, messages: Sequence[Message]) -> _Batch:
    shown = [
        (each.message_id, typed(each.data), typed(each.batch_key), typed(dict(each.metadata)))
        for each in messages
    ]
    key = typed(info.batch_key)
    return key, info.partition, info.size, info.trigger.value, info.batch_id, shown


def pipeline(**options: Any) -> Broadway:
    class Case(Passing):
        name = "Case"
        producer = DummyProducer()
        batchers = {"default": Batcher(**{"engine": "python", "batch_timeout": None, **options})}

    return Case()


def unstaged(made: Broadway, messages: list[Message]) -> _Seen:
    driver = PipelineDriver(made)
    driver.push([each.with_acknowledger(driver.message(0).acknowledger) for each in messages])
    driver.drain()
    failed = [each for call in driver.acknowledger.calls for each in call.failed]
    batches = [told(each.info, each.messages) for each in driver.batches]
    return batches, [(each.message_id, each.status.text) for each in failed]


def staged(made: Broadway, messages: list[Message], folder: str) -> _Seen:
    run = open_run(folder)
    result = ProcessorStage(made, convert=RowConverter, ack=lambda good, bad: None).handle(messages)
    generation = open_generation(run).generation
    with ProcessWriter(run, generation, made) as writer:
        writer.messages(result.successful)
    written = writer.close()
    received, files = len(result.successful), written.files
    assert run.publish(
        manifest_of(run, generation, received, batchers=written.batchers, files=files)
    )
    plan = plan_batches(run, made, "default", [generation], try_label="1")
    batches = []
    with BatchReader(run, plan) as reader:
        for planned in batches_of(run, plan):
            key, trigger = load_key(planned.batch_key), Trigger(planned.trigger)
            size, name = planned.size, planned.batch_id
            info = BatchInfo("default", key, planned.partition, size, trigger, name)
            batches.append(told(info, reader.read(planned)))
    return batches, [(each.message_id, each.status.text) for each in result.failed]


def check_alike(messages: list[Message], **options: Any) -> _Seen:
    """Check that both ways see the same; returns it."""
    here = unstaged(pipeline(**options), messages)
    with tempfile.TemporaryDirectory() as folder:
        there = staged(pipeline(**options), messages, folder)
    assert sorted(here[0], key=repr) == sorted(there[0], key=repr)
    assert here[1] == there[1]
    return here


SAME: list[Any] = [
    None,
    True,
    7,
    2.5,
    NAN,
    float("-inf"),
    "Zürich",
    b"\xff\x00",
    Decimal("1.50"),
    Decimal("NaN"),
    date(2013, 1, 31),
    NOON,
    EVENING.astimezone(UTC),
    ID,
    [1, (2, 3), {4}, frozenset({(5, "6")})],
    {"a": {1: "x", None: b"y"}, (1, 2): [NAN]},
    {"!": [1]},
    {"!": ["tuple", [1]]},
    10**30,
    {},
    (),
    set(),
]

CHANGED = [
    (EVENING, EVENING.astimezone(UTC)),
    (Point(1, 2), (1, 2)),
    (Level.LOW, 1),
    (Word.YES, "yes"),
    (OrderedDict(a=1), {"a": 1}),
    (MappingProxyType({"a": Point(1, 2)}), {"a": (1, 2)}),
    (bytearray(b"x"), b"x"),
    ([memoryview(b"x")], [b"x"]),
]


@pytest.mark.parametrize("value", SAME, ids=lambda value: type(value).__name__)
def test_a_python_batcher_gets_plain_values_as_they_were(value: Any) -> None:
    [batch], failed = check_alike([message(1, value, metadata={"m": value})])
    assert not failed
    assert batch[5][0][1:4:2] == (typed(value), typed({"m": value}))


@pytest.mark.parametrize(("value", "plain"), CHANGED, ids=lambda value: type(value).__name__)
def test_what_is_nearly_plain_becomes_plain(value: Any, plain: Any) -> None:
    [batch], _ = check_alike([message(1, value, metadata={"m": [value]})])
    assert batch[5][0][1:4:2] == (typed(plain), typed({"m": [plain]}))


def circle() -> list[Any]:
    value: list[Any] = [()]
    value.append({"a": value})
    return value


REFUSED = [object(), lambda: 0, 1j, "\ud800", {"\ud800": 1}, {1: object}, circle(), 10**5000]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("where", ["data", "metadata", "batch_key"])
def test_what_cannot_be_staged_fails_its_message_everywhere(value: Any, where: str) -> None:
    given: Any = {where: {"m": value} if where == "metadata" else value}
    batches, failed = check_alike([message(1), message(2, **{"data": b"x", **given})])
    assert [each for each, _ in failed] == ["m-2"]
    assert sum(batch[2] for batch in batches) == 1


@pytest.mark.parametrize("engine", ["python", "spark"])
def test_a_schema_is_respected_everywhere(engine: str) -> None:
    schema = "n int not null, f float, at timestamp, tags array<struct<k string, v float>>"
    given = [
        {"n": 1, "f": 0.1, "at": "2013-01-31T12:00:00+07:00", "extra": 1},
        {"n": 2, "tags": [{"k": "a", "v": 0.1}, None], "at": EVENING},
        {"n": "3"},
        {"f": 1.0},
    ]
    made = pipeline(schema=schema, engine=engine)
    driver = PipelineDriver(made)
    driver.push(given)
    driver.drain()
    [batch] = driver.batches
    assert [each.data for each in batch.messages] == [
        {
            "n": 1,
            "f": 0.10000000149011612,
            "at": datetime(2013, 1, 31, 5, tzinfo=UTC),
            "tags": None,
        },
        {
            "n": 2,
            "f": None,
            "at": EVENING,
            "tags": [{"k": "a", "v": 0.10000000149011612}, None],
        },
    ]
    [call] = [each for each in driver.acknowledger.calls if each.failed]
    assert [each.data for each in call.failed] == given[2:]
    if engine == "python":
        check_alike([message(n, data) for n, data in enumerate(given)], schema=schema)


def test_maps_and_nested_columns_are_read_alike() -> None:
    schema = (
        "m map<string, float>, d map<date, array<int>>, s struct<a decimal(9,2), b binary>,"
        " t timestamp_ntz, e array<array<float>>"
    )
    given = [
        {"m": {"a": 0.1, "b": None}, "d": {date(2026, 1, 1): [1, None]}, "e": [[0.1], None, []]},
        {"s": {"a": Decimal(3), "b": bytearray(b"x")}, "t": "2026-01-01T00:00:00.5", "m": {}},
        {"s": Point(1, 2)},
        {},
    ]
    batches, failed = check_alike([message(n, each) for n, each in enumerate(given)], schema=schema)
    assert (len(batches), failed) == (1, [])


def test_keys_are_one_key_everywhere_if_their_text_is_one() -> None:
    keys = [1, True, 1.0, "1", b"1", NAN, float("nan"), frozenset("ab"), frozenset("ba"), Level.LOW]
    keys += [
        (1, "a"),
        (True, "a"),
        Point(1, 2),
        (1, 2),
        None,
        Decimal(1),
        Word.YES,
        "yes",
        0.0,
        -0.0,
    ]
    batches, _ = check_alike([message(n, batch_key=key) for n, key in enumerate(keys)])
    together = sorted([each[0] for each in batch[5]] for batch in batches)
    assert [each for each in together if len(each) > 1] == [
        ["m-0", "m-9"],
        ["m-12", "m-13"],
        ["m-16", "m-17"],
        ["m-5", "m-6"],
        ["m-7", "m-8"],
    ]


def test_partition_by_that_raises_fails_its_message_everywhere() -> None:
    options: Any = {"partition_by": lambda message: 1 // message.data, "concurrency": 2}
    messages = [message(n, n) for n in (1, 0, -1, 2)]
    batches, failed = check_alike(messages, **options)
    assert [each for each, _ in failed] == ["m-0", "m--1"]
    assert sorted(batch[1] or 0 for batch in batches) == [0, 1]
    assert failed[0][1].startswith("ZeroDivisionError")


def test_partition_by_is_asked_of_what_handle_message_returned_and_the_splitter_of_the_row() -> (
    None
):
    def split(message: Message, so_far: int) -> Any:
        so_far += message.data["x"]
        return ("emit", 0) if so_far >= 3 else ("cont", so_far)

    options: Any = {
        "partition_by": lambda message: message.data.x,
        "concurrency": 2,
        "schema": "x int",
        "batch_size": (0, split),
        "max_demand": 10,
    }
    messages = [message(n, Point(x, 0)) for n, x in enumerate([2, 1, 2, 1, 1])]
    batches, failed = check_alike(messages, **options)
    assert not failed
    assert sorted(batch[2] for batch in batches) == [2, 3]


@pytest.mark.parametrize("batch_size", [2, 3])
def test_merged_keys_make_the_same_batches(batch_size: int) -> None:
    given = [message(n, batch_key=key) for n, key in enumerate("abcab")]
    batches, _ = check_alike(given, merge_keys=True, batch_size=batch_size)
    assert all(batch[0] == typed(None) for batch in batches)


scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary()),
    *(st.decimals(), st.dates(), st.datetimes(timezones=st.timezones() | st.none()), st.uuids()),
    st.sampled_from([Level.LOW, Word.YES, Point(1, 2), "\ud800", "!", object()]),
)
keys = st.recursive(
    scalars.filter(lambda each: not (isinstance(each, Decimal) and each.is_snan())),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.sets(keys, max_size=3),
    ),
    max_leaves=6,
)
metadata = st.dictionaries(st.text(max_size=3) | st.integers(), values, max_size=3)


@settings(max_examples=60)
@given(st.lists(st.tuples(values, keys, metadata), min_size=1, max_size=6))
def test_whatever_messages_hold_their_batches_are_alike(given: list[Any]) -> None:
    check_alike(
        [
            message(n, data, batch_key=key, metadata=about)
            for n, (data, key, about) in enumerate(given)
        ],
        batch_size=3,
    )
