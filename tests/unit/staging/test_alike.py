"""A batch holds the same whether its messages were staged or not."""

from __future__ import annotations

import gc
import tempfile
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
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
MORNING = datetime(2013, 1, 31, 5, tzinfo=UTC)
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
#: The batches, and (id, reason) of each message that failed before them.
_Seen = tuple[list[_Batch], list[tuple[str, str]]]


def typed(value: Any) -> Any:
    """A value with the types of all its parts, to compare; NaN is like NaN."""
    kind = type(value).__name__
    if isinstance(value, (set, frozenset)):
        return kind, sorted((typed(item) for item in value), key=repr)
    if isinstance(value, (list, tuple)):
        return kind, [typed(item) for item in value]
    if isinstance(value, dict):
        return kind, [(typed(key), typed(item)) for key, item in value.items()]
    return kind, repr(value)


def seen(info: BatchInfo, messages: Sequence[Message]) -> _Batch:
    contents = [
        (m.message_id, typed(m.data), typed(m.batch_key), typed(dict(m.metadata))) for m in messages
    ]
    key = typed(info.batch_key)
    return key, info.partition, info.size, info.trigger.value, info.batch_id, contents


def pipeline_of(**options: Any) -> Broadway:
    class Case(Passing):
        name = "Case"
        producer = DummyProducer()
        batchers = {"default": Batcher(**{"engine": "python", "batch_timeout": None, **options})}

    return Case()


def unstaged(pipeline: Broadway, messages: list[Message]) -> _Seen:
    driver = PipelineDriver(pipeline)
    driver.push([message.with_acknowledger(driver.message(0).acknowledger) for message in messages])
    driver.drain()
    failed = [message for call in driver.acknowledger.calls for message in call.failed]
    batches = [seen(batch.info, batch.messages) for batch in driver.batches]
    return batches, [(m.message_id, m.status.text) for m in failed]


def staged(pipeline: Broadway, messages: list[Message], folder: str) -> _Seen:
    run = open_run(folder)
    result = ProcessorStage(pipeline, convert=RowConverter, ack=lambda good, bad: None).handle(
        messages
    )
    generation = open_generation(run).generation
    with ProcessWriter(run, generation, pipeline) as writer:
        writer.messages(result.successful)
    written = writer.close()
    counts: Any = {"batchers": written.batchers, "files": written.files}
    assert run.publish(manifest_of(run, generation, len(result.successful), **counts))
    plan = plan_batches(run, pipeline, "default", [generation], try_label="1")
    batches = []
    with BatchReader(run, plan) as reader:
        for planned in batches_of(run, plan):
            key, trigger = load_key(planned.batch_key), Trigger(planned.trigger)
            size, name = planned.size, planned.batch_id
            info = BatchInfo("default", key, planned.partition, size, trigger, name)
            batches.append(seen(info, reader.read(planned)))
    return batches, [(m.message_id, m.status.text) for m in result.failed]


def check_alike(messages: list[Message], **options: Any) -> _Seen:
    """Checks that both ways see the same, and returns it."""
    here = unstaged(pipeline_of(**options), messages)
    with tempfile.TemporaryDirectory() as folder:
        there = staged(pipeline_of(**options), messages, folder)
    assert sorted(here[0], key=repr) == sorted(there[0], key=repr)
    assert here[1] == there[1]
    return here


SAME: list[Any] = [
    *(None, True, 7, 2.5, NAN, float("-inf"), "Zürich", b"\xff\x00", Decimal("1.50")),
    *(Decimal("NaN"), date(2013, 1, 31), NOON, EVENING.astimezone(UTC), ID),
    [1, (2, 3), {4}, frozenset({(5, "6")})],
    {"a": {1: "x", None: b"y"}, (1, 2): [NAN]},
    {"!": [1]},
    {"!": ["tuple", [1]]},
    *(10**30, {}, (), set()),
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
def test_python_batcher_gets_plain_values_unchanged(value):
    [batch], failed = check_alike([message(1, value, metadata={"m": value})])
    assert not failed
    assert batch[5][0][1:4:2] == (typed(value), typed({"m": value}))


@pytest.mark.parametrize(("value", "plain"), CHANGED, ids=lambda value: type(value).__name__)
def test_nearly_plain_values_become_plain(value, plain):
    [batch], _ = check_alike([message(1, value, metadata={"m": [value]})])
    assert batch[5][0][1:4:2] == (typed(plain), typed({"m": [plain]}))


def circle() -> list[Any]:
    value: list[Any] = [()]
    value.append({"a": value})
    return value


REFUSED = [object(), lambda: 0, 1j, "\ud800", {"\ud800": 1}, {1: object}, circle(), 10**5000]


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Disables garbage collection: in a deep recursion a finalizer may fail for lack of stack."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("where", ["data", "metadata", "batch_key"])
def test_unserializable_message_fails_everywhere(value, where):
    attributes: Any = {where: {"m": value} if where == "metadata" else value}
    batches, failed = check_alike([message(1), message(2, **{"data": b"x", **attributes})])
    assert [message_id for message_id, _ in failed] == ["m-2"]
    assert sum(batch[2] for batch in batches) == 1


@pytest.mark.parametrize("engine", ["python", "spark"])
def test_schema_is_respected_everywhere(engine):
    schema = "n int not null, f float, at timestamp, tags array<struct<k string, v float>>"
    records = [
        {"n": 1, "f": 0.1, "at": "2013-01-31T12:00:00+07:00", "extra": 1},
        {"n": 2, "tags": [{"k": "a", "v": 0.1}, None], "at": EVENING},
        {"n": "3"},
        {"f": 1.0},
    ]
    driver = PipelineDriver(pipeline_of(schema=schema, engine=engine))
    driver.push(records)
    driver.drain()
    [batch] = driver.batches
    assert [message.data for message in batch.messages] == [
        {"n": 1, "f": 0.10000000149011612, "at": MORNING, "tags": None},
        {"n": 2, "f": None, "at": EVENING, "tags": [{"k": "a", "v": 0.10000000149011612}, None]},
    ]
    [call] = [call for call in driver.acknowledger.calls if call.failed]
    assert [m.data for m in call.failed] == records[2:]
    if engine == "python":
        check_alike([message(n, data) for n, data in enumerate(records)], schema=schema)


def test_maps_and_nested_columns_are_read_alike():
    schema = (
        "m map<string, float>, d map<date, array<int>>, s struct<a decimal(9,2), b binary>,"
        " t timestamp_ntz, e array<array<float>>"
    )
    records = [
        {"m": {"a": 0.1, "b": None}, "d": {date(2026, 1, 1): [1, None]}, "e": [[0.1], None, []]},
        {"s": {"a": Decimal(3), "b": bytearray(b"x")}, "t": "2026-01-01T00:00:00.5", "m": {}},
        {"s": Point(1, 2)},
        {},
    ]
    batches, failed = check_alike(
        [message(n, data) for n, data in enumerate(records)], schema=schema
    )
    assert (len(batches), failed) == (1, [])


def test_keys_with_one_text_are_one_key_everywhere():
    keys = [1, True, 1.0, "1", b"1", NAN, float("nan"), frozenset("ab"), frozenset("ba"), Level.LOW]
    keys += [(1, "a"), (True, "a"), Point(1, 2), (1, 2), None, Decimal(1), Word.YES, "yes"]
    keys += [0.0, -0.0]
    batches, _ = check_alike([message(n, batch_key=key) for n, key in enumerate(keys)])
    together = sorted([row[0] for row in batch[5]] for batch in batches)
    assert [ids for ids in together if len(ids) > 1] == [
        *(["m-0", "m-9"], ["m-12", "m-13"], ["m-16", "m-17"], ["m-5", "m-6"], ["m-7", "m-8"])
    ]


def test_raising_partition_by_fails_its_message_everywhere():
    options: Any = {"partition_by": lambda message: 1 // message.data, "concurrency": 2}
    batches, failed = check_alike([message(n, n) for n in (1, 0, -1, 2)], **options)
    assert [message_id for message_id, _ in failed] == ["m-0", "m--1"]
    assert sorted(batch[1] or 0 for batch in batches) == [0, 1]
    assert failed[0][1].startswith("ZeroDivisionError")


def test_partition_by_sees_the_message_and_the_splitter_the_row():
    def split(message, so_far):
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
def test_merged_keys_make_the_same_batches(batch_size):
    messages = [message(n, batch_key=key) for n, key in enumerate("abcab")]
    batches, _ = check_alike(messages, merge_keys=True, batch_size=batch_size)
    assert all(batch[0] == typed(None) for batch in batches)


scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary()),
    *(st.decimals(), st.dates(), st.datetimes(timezones=st.timezones() | st.none()), st.uuids()),
    st.sampled_from([Level.LOW, Word.YES, Point(1, 2), "\ud800", "!", object()]),
)
keys = st.recursive(
    scalars.filter(lambda key: not (isinstance(key, Decimal) and key.is_snan())),
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
def test_any_messages_make_the_same_batches(contents):
    messages = [
        message(n, data, batch_key=key, metadata=headers)
        for n, (data, key, headers) in enumerate(contents)
    ]
    check_alike(messages, batch_size=3)
