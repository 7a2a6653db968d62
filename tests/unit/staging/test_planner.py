from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_broadway import Broadway
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.staging import plan_data_files
from airflow_broadway.staging import planner as planner_module
from airflow_broadway.staging import writer as writer_module
from airflow_broadway.staging.batch_reader import BatchReader
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.settlement_journal import record_settled
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import ParquetFile
from tests.unit.staging.kit import (
    batches_of,
    message,
    open_generation,
    open_run,
    pipeline_of,
    publish,
    read_batch,
    record_outcome,
)


def plan_of(
    run: StagedRun, pipeline: Broadway, *generations: str, batcher: str = "b"
) -> tuple[BatchPlan, list[PlannedBatch]]:
    plan = plan_batches(run, pipeline, batcher, generations, try_label="1")
    return plan, batches_of(run, plan)


def python(**options: Any) -> Broadway:
    given = {"engine": "python", "batch_timeout": None, "batch_size": 3, **options}
    return pipeline_of(b=Batcher(**given))


def ids(run: StagedRun, plan: BatchPlan, batch: PlannedBatch) -> list[int]:
    return [each.position for each in read_batch(run, plan, batch)]


def stream(count: int, **given: Any) -> list[Message]:
    return [message(number, batcher="b", **given) for number in range(count)]


# --------------------------------------------------------------------------------------------------
# What makes a batch
# --------------------------------------------------------------------------------------------------


def test_batches_close_by_size_and_the_rest_at_the_end(tmp_path: Path) -> None:
    run, pipeline = open_run(tmp_path), python()
    plan, batches = plan_of(run, pipeline, publish(run, pipeline, [stream(7)]))
    assert [(ids(run, plan, batch), batch.trigger) for batch in batches] == [
        ([0, 1, 2], "size"),
        ([3, 4, 5], "size"),
        ([6], "flush"),
    ]
    assert (plan.messages, plan.batches, plan.triggers) == (7, 3, {"flush": 1, "size": 2})


def test_each_key_has_its_own_batches(tmp_path: Path) -> None:
    run, pipeline = open_run(tmp_path), python()
    messages = [message(n, batcher="b", batch_key="xy"[n % 2]) for n in range(8)]
    plan, batches = plan_of(run, pipeline, publish(run, pipeline, [messages]))
    assert [(batch.batch_key, ids(run, plan, batch)) for batch in batches] == [
        ("x", [0, 2, 4]),
        ("y", [1, 3, 5]),
        ("x", [6]),
        ("y", [7]),
    ]


def test_a_key_that_is_no_text_is_the_batchs_key_as_json(tmp_path: Path) -> None:
    run, pipeline = open_run(tmp_path), python()
    keys: list[Any] = [("EWR", 1), None, 7, "7"]
    messages = [message(n, batcher="b", batch_key=key) for n, key in enumerate(keys)]
    _, batches = plan_of(run, pipeline, publish(run, pipeline, [messages]))
    assert [batch.batch_key for batch in batches] == [["EWR", 1], None, 7, "7"]


def test_a_batch_times_out_by_when_its_messages_were_received(tmp_path: Path) -> None:
    # Given chunks received at 0, 1.5 and 4 seconds, and a timeout of 2
    run, pipeline = open_run(tmp_path), python(batch_timeout=2.0)
    chunks = [[message(n, batcher="b", at=at)] for n, at in enumerate((0.0, 1.5, 4.0))]
    plan, batches = plan_of(run, pipeline, publish(run, pipeline, chunks))
    assert [(ids(run, plan, batch), batch.trigger) for batch in batches] == [
        ([0, 1], "timeout"),
        ([2], "flush"),
    ]


@pytest.mark.parametrize("group_rows", [3, 100], ids=["chunk-in-two-groups", "one-group"])
def test_a_flush_reaches_to_the_end_of_its_chunk_and_no_further(
    group_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "GROUP_ROWS", group_rows)
    run, pipeline = open_run(tmp_path), python(batch_size=100)
    flush = message(2, batcher="b", batch_mode="flush")
    chunks = [stream(2), [flush, message(3, batcher="b")], [message(4, batcher="b")]]
    plan, batches = plan_of(run, pipeline, publish(run, pipeline, chunks))
    assert [(ids(run, plan, batch), batch.trigger) for batch in batches] == [
        ([0, 1, 2, 3], "flush"),
        ([4], "flush"),
    ]


def test_bytes_close_a_batch_before_they_pass_the_bound(tmp_path: Path) -> None:
    run, pipeline = open_run(tmp_path), python(batch_size=100, batch_bytes=100)
    messages = [message(n, batcher="b", size=size) for n, size in enumerate((60, 30, 30, 500, 1))]
    plan, batches = plan_of(run, pipeline, publish(run, pipeline, [messages]))
    assert [(ids(run, plan, batch), batch.bytes, batch.trigger) for batch in batches] == [
        ([0, 1], 90, "bytes"),
        ([2], 30, "bytes"),
        ([3], 500, "bytes"),
        ([4], 1, "flush"),
    ]


def test_partitions_keep_their_messages_apart(tmp_path: Path) -> None:
    pipeline = python(partition_by=lambda message: message.data["n"], concurrency=2)
    run = open_run(tmp_path)
    messages = [message(n, {"n": n}, batcher="b") for n in range(6)]
    plan, batches = plan_of(run, pipeline, publish(run, pipeline, [messages]))
    assert [(batch.partition, ids(run, plan, batch)) for batch in batches] == [
        (0, [0, 2, 4]),
        (1, [1, 3, 5]),
    ]


def test_a_custom_splitter_sees_messages_as_they_were(tmp_path: Path) -> None:
    # Given a splitter that closes a batch when its data adds up to 10
    seen: list[Message] = []

    def split(message: Message, acc: int) -> tuple[str, int]:
        seen.append(message)
        acc += message.data["n"]
        return ("emit", 0) if acc >= 10 else ("cont", acc)

    pipeline = python(batch_size=(0, split), max_demand=10)
    run = open_run(tmp_path)
    messages = [
        message(n, {"n": n}, batcher="b", batch_key=("k", 1), metadata={"q": 1}) for n in range(8)
    ]
    plan, batches = plan_of(run, pipeline, publish(run, pipeline, [messages]))

    assert [ids(run, plan, batch) for batch in batches] == [[0, 1, 2, 3, 4], [5, 6], [7]]
    assert (seen[1].data, seen[1].batcher, seen[1].batch_key) == ({"n": 1}, "b", ("k", 1))
    assert seen[1].metadata == {"q": 1}


def test_merged_keys_share_a_batch_of_whole_batches(tmp_path: Path) -> None:
    run, pipeline = open_run(tmp_path), python(batch_size=4, merge_keys=True)
    messages = [message(n, batcher="b", batch_key=n % 3) for n in range(9)]
    plan, batches = plan_of(run, pipeline, publish(run, pipeline, [messages]))
    found = [ids(run, plan, batch) for batch in batches]
    assert found == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]

    two = python(batch_size=6, merge_keys=True)
    plan, batches = plan_of(run, two, publish(run, two, [messages]))
    assert [(ids(run, plan, batch), batch.keys, batch.batch_key) for batch in batches] == [
        ([0, 3, 6, 1, 4, 7], 2, None),
        ([2, 5, 8], 1, None),
    ]


def test_redelivered_messages_and_sources_are_counted(tmp_path: Path) -> None:
    run, pipeline = open_run(tmp_path), python(batch_size=10)
    first = publish(run, pipeline, [stream(2)])
    again = [message(n, batcher="b", redelivered=True, message_id=f"o-{n}", at=1) for n in range(3)]
    second = publish(run, pipeline, [again], map_index=1)
    _, [batch] = plan_of(run, pipeline, first, second)
    assert batch.redelivered == 3
    assert batch.sources == {first: 2, second: 3}


def test_sources_are_merged_by_when_their_chunks_were_received(tmp_path: Path) -> None:
    run, pipeline = open_run(tmp_path), python(batch_size=100)
    first = [[message(n, batcher="b", at=n * 2.0)] for n in range(4)]
    second = [[message(10 + n, batcher="b", at=n * 3.0)] for n in range(4)]
    generations = [
        publish(run, pipeline, chunks, map_index=index)
        for index, chunks in enumerate((first, second))
    ]
    plan, [batch] = plan_of(run, pipeline, *generations)
    assert ids(run, plan, batch) == [0, 10, 1, 11, 2, 3, 12, 13]


def test_a_clock_that_is_set_back_keeps_the_order_of_arrival(tmp_path: Path) -> None:
    run, pipeline = open_run(tmp_path), python(batch_size=100, batch_timeout=5.0)
    chunks = [[message(n, batcher="b", at=at)] for n, at in enumerate((10.0, 3.0, 11.0))]
    plan, [batch] = plan_of(run, pipeline, publish(run, pipeline, chunks))
    assert ids(run, plan, batch) == [0, 1, 2]


# --------------------------------------------------------------------------------------------------
# What is written
# --------------------------------------------------------------------------------------------------


def data_of(run: StagedRun, plan: BatchPlan) -> pa.Table:
    return pa.concat_tables(
        pq.read_table(run.files.full(f"{plan.path}/{name}")) for name in plan.data
    )


def test_spark_gets_the_public_columns_in_their_types(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    pipeline = pipeline_of(b=Batcher(schema="n int, at timestamp"))
    messages = [
        message(0, {"n": 1}, batcher="b", batch_key='say "hi"', metadata={"a": "b"}),
        message(1, {"n": 2}, batcher="b", batch_key=["x"]),
    ]
    plan, _ = plan_of(run, pipeline, publish(run, pipeline, [messages]))
    table = data_of(run, plan)
    instant = pa.timestamp("us", tz="UTC")
    assert {field.name: field.type for field in table.schema if field.name[0] != "_"} == {
        "message_id": pa.string(),
        "data": pa.struct([("n", pa.int32()), ("at", instant)]),
        "batch_key": pa.string(),
        "metadata": pa.map_(pa.string(), pa.string()),
        "attempt": pa.int32(),
        "redelivered": pa.bool_(),
        "received_at": instant,
        "position": pa.int64(),
        "batch": pa.int64(),
        "source": pa.int32(),
    }
    assert table["batch_key"].to_pylist() == ['say "hi"', '["x"]']
    assert (plan.schema, plan.as_bytes) == ("n int, at timestamp", False)


@pytest.mark.parametrize(
    ("data", "as_bytes", "expected"),
    [
        ([b"a", b"\xff"], True, [b"a", b"\xff"]),
        ([{"n": 1}, "a"], False, ['{"n":1}', '"a"']),
        ([b"a", b"\xff", 1], False, ['"a"', '"base64:/w=="', "1"]),
    ],
)
def test_without_a_schema_data_is_binary_if_all_of_it_is_bytes_else_json(
    tmp_path: Path, data: list[Any], as_bytes: bool, expected: list[Any]
) -> None:
    run, pipeline = open_run(tmp_path), pipeline_of(b=Batcher())
    messages = [message(n, each, batcher="b") for n, each in enumerate(data)]
    plan, _ = plan_of(run, pipeline, publish(run, pipeline, [messages]))
    assert plan.as_bytes is as_bytes
    assert data_of(run, plan)["data"].to_pylist() == expected


def test_python_gets_its_data_back_as_it_was(tmp_path: Path) -> None:
    run, pipeline = open_run(tmp_path), python(batch_size=10)
    values: list[Any] = [b"\xff", {"a": [1, None, "é"]}, "text", 1.5, None]
    messages = [message(n, each, batcher="b") for n, each in enumerate(values)]
    plan, [batch] = plan_of(run, pipeline, publish(run, pipeline, [messages]))
    assert [each.data for each in read_batch(run, plan, batch)] == values


def test_a_reader_looks_only_into_the_row_groups_of_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a small buffer and small row groups, and a batch in the middle of them
    monkeypatch.setattr(plan_data_files, "BUFFER_ROWS", 40)
    monkeypatch.setattr(plan_data_files, "OWN_GROUP_ROWS", 5)
    monkeypatch.setattr(writer_module, "GROUP_ROWS", 20)
    run, pipeline = open_run(tmp_path), python(batch_size=10)
    plan, batches = plan_of(run, pipeline, publish(run, pipeline, [stream(200)]))
    groups: list[int] = []
    read = ParquetFile.read

    def counted(file: ParquetFile, group: int) -> pa.Table:
        groups.append(group)
        return read(file, group)

    monkeypatch.setattr(ParquetFile, "read", counted)
    with BatchReader(run, plan) as reader:
        assert [each.position for each in reader.read(batches[7])] == list(range(70, 80))
    assert len(groups) == 1


def test_a_reader_opens_each_file_once_for_all_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a plan of many row groups, whose batches threads read in turn
    monkeypatch.setattr(plan_data_files, "BUFFER_ROWS", 40)
    monkeypatch.setattr(plan_data_files, "OWN_GROUP_ROWS", 5)
    run, pipeline = open_run(tmp_path), python(batch_size=10)
    plan, batches = plan_of(run, pipeline, publish(run, pipeline, [stream(200)]))
    opened: list[str] = []
    source = Folder.source

    def counted(folder: Folder, path: str) -> Any:
        opened.append(path)
        return source(folder, path)

    monkeypatch.setattr(Folder, "source", counted)
    with BatchReader(run, plan) as reader, ThreadPoolExecutor(4) as threads:
        found = list(threads.map(reader.read, batches))
    assert [each.position for messages in found for each in messages] == list(range(200))
    assert opened == [f"{plan.path}/{name}" for name in plan.data]


def test_small_batches_share_row_groups_and_large_ones_have_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_data_files, "OWN_GROUP_ROWS", 10)
    run, pipeline = open_run(tmp_path), python(batch_size=100)
    keys = ["small-1"] * 3 + ["large"] * 10 + ["small-2"] * 4 + ["small-3"] * 3 + ["small-4"] * 2
    messages = [message(n, batcher="b", batch_key=key) for n, key in enumerate(keys)]
    plan, _ = plan_of(run, pipeline, publish(run, pipeline, [messages]))
    file = pq.ParquetFile(run.files.full(f"{plan.path}/{plan.data[0]}"))
    rows = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    assert rows == [3, 10, 9]
    assert {file.metadata.row_group(0).column(0).compression} == {"ZSTD"}


def test_more_than_a_thousand_spark_batches_say_so_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(planner_module, "MANY_BATCHES", 3)
    run, pipeline = open_run(tmp_path), pipeline_of(b=Batcher(batch_size=1))
    few, _ = plan_of(run, pipeline, publish(run, pipeline, [stream(3)]))
    assert few.notes == []
    run = open_run(tmp_path, "more")
    plan, _ = plan_of(run, pipeline, publish(run, pipeline, [stream(4)]))
    [note] = plan.notes
    assert "4 Spark batches of 1 message each are more than 3" in note
    assert "merge_keys=True" in note
    assert note in caplog.text
    assert BatchPlan.read(run.files, plan.path)[0].notes == [note]


# --------------------------------------------------------------------------------------------------
# Tries
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handled", [0, 1])
def test_a_plan_stands_even_if_the_options_have_changed(tmp_path: Path, handled: int) -> None:
    # Given a plan in batches of 3, of which a callback may have seen some before it was killed
    run, pipeline = open_run(tmp_path), python()
    generation = publish(run, pipeline, [stream(7)])
    plan, batches = plan_of(run, pipeline, generation)
    for batch in batches[:handled]:
        record_outcome(run, plan, batch)

    # When the batcher is cleared after batch_size was changed
    again, _ = plan_of(run, python(batch_size=5), generation)

    # Then the batches, and their ids, are those that a sink may have seen
    assert again == plan


def test_a_batch_of_other_messages_or_of_another_key_has_another_id(tmp_path: Path) -> None:
    def batch_id(run_id: str, names: str, key: str = "k", batcher: str = "b") -> str:
        run = open_run(tmp_path, run_id)
        options = Batcher(engine="python", batch_timeout=None, batch_size=3)
        pipeline = pipeline_of(None, **{batcher: options})
        given = [
            message(n, message_id=name, batcher=batcher, batch_key=key)
            for n, name in enumerate(names)
        ]
        _, [batch] = plan_of(run, pipeline, publish(run, pipeline, [given]), batcher=batcher)
        return batch.batch_id

    first = batch_id("one", "abc")
    assert batch_id("the same in a later run", "abc") == first
    others = [
        batch_id("one of them", "ab"),
        batch_id("with another", "abd"),
        batch_id("in another order", "acb"),
        batch_id("of another key", "abc", key="l"),
        batch_id("of another batcher", "abc", batcher="c"),
    ]
    assert len({first, *others}) == 6


def test_an_unfinished_try_is_passed_over(tmp_path: Path) -> None:
    run, pipeline = open_run(tmp_path), python()
    generation = publish(run, pipeline, [stream(7)])
    plan, batches = plan_of(run, pipeline, generation)
    folder = plan.path.rpartition("/")[0]
    run.files.write_lines(f"{folder}/99-killed/data-00000.parquet", ["half"])
    record_outcome(run, plan, batches[0])
    assert plan_of(run, pipeline, generation)[0] == plan


def test_a_generation_that_was_given_back_is_left_out_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run, pipeline = open_run(tmp_path), python()
    kept = publish(run, pipeline, [stream(2)])
    void = publish(run, pipeline, [stream(2)], map_index=1)
    record_settled(run, run.generation(void), SettleReport(released=2))
    unpublished = open_generation(run, map_index=2).generation

    plan, _ = plan_of(run, pipeline, kept, void, unpublished)

    assert plan.generations == [kept]
    assert f"generation {void} is left out, for it is settled or given back" in caplog.text
    assert f"generation {unpublished} is left out, for it is not published" in caplog.text


def test_nothing_to_plan_is_a_plan_of_nothing(tmp_path: Path) -> None:
    run, pipeline = open_run(tmp_path), python()
    plan, batches = plan_of(run, pipeline)
    assert (plan.messages, plan.batches, plan.data, batches) == (0, 0, [], [])


def test_a_missing_message_file_is_an_error_and_no_plan(tmp_path: Path) -> None:
    run, pipeline = open_run(tmp_path), python()
    generation = publish(run, pipeline, [stream(2)])
    manifest = run.manifest(generation)
    assert manifest is not None
    more = dataclasses.replace(manifest, batchers={"b": 3})
    run.files.replace(f"{generation}/manifest.json", more.dumps())
    with pytest.raises(StagingError, match="name 3 messages, but their files hold 2"):
        plan_of(run, pipeline, generation)
    assert BatchPlanFiles(run).plans() == []


class BatchPlanFiles:
    def __init__(self, run: StagedRun) -> None:
        self._root = Path(run.files.full(""))

    def plans(self) -> list[Path]:
        return list(self._root.rglob("plan.jsonl"))


# --------------------------------------------------------------------------------------------------
# Any stream
# --------------------------------------------------------------------------------------------------

streams = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c", 1, None]),  # key
            st.booleans(),  # flush
            st.integers(0, 50),  # size
        ),
        min_size=1,
        max_size=6,
    ),
    max_size=12,
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sources=st.lists(streams, min_size=1, max_size=3),
    size=st.integers(1, 7),
    limit=st.one_of(st.none(), st.integers(1, 120)),
    timeout=st.one_of(st.none(), st.floats(0.5, 5)),
    merge=st.booleans(),
)
def test_whatever_comes_is_planned_once_in_order_and_the_same_way_again(
    tmp_path: Path,
    sources: list[list[list[tuple[Any, bool, int]]]],
    size: int,
    limit: int | None,
    timeout: float | None,
    merge: bool,
) -> None:
    # Given generations of chunks, whatever their keys, flushes and sizes
    pipeline = python(batch_size=size, batch_bytes=limit, batch_timeout=timeout, merge_keys=merge)
    generations: list[str] = []
    run = open_run(tmp_path, f"run:{len(list(tmp_path.rglob('generations')))}")
    order: dict[Any, list[str]] = {}
    expected: set[str] = set()
    for index, chunks in enumerate(sources):
        number = 0
        made: list[list[Message]] = []
        for at, chunk in enumerate(chunks):
            made.append([])
            for key, flush, bytes_ in chunk:
                made[-1].append(
                    message(
                        number,
                        message_id=f"{index}-{number}",
                        batcher="b",
                        batch_key=key,
                        batch_mode="flush" if flush else "bulk",
                        size=bytes_,
                        at=float(at),
                    )
                )
                order.setdefault((index, key), []).append(f"{index}-{number}")
                expected.add(f"{index}-{number}")
                number += 1
        generations.append(publish(run, pipeline, made, map_index=index))

    # When they are planned
    plan, batches = plan_of(run, pipeline, *generations)

    # Then every message is in exactly one batch
    with BatchReader(run, plan) as reader:
        found = {batch.batch_id: reader.read(batch) for batch in batches}
    ids_found = [each.message_id for messages in found.values() for each in messages]
    assert len(found) == len(batches) == plan.batches
    assert sorted(ids_found) == sorted(expected)
    assert plan.messages == len(expected)
    # and no batch is larger than allowed
    for batch in batches:
        assert batch.size == len(found[batch.batch_id]) <= size
        assert batch.bytes == sum(each.size for each in found[batch.batch_id])
        assert limit is None or batch.bytes <= limit or batch.size == 1
    # and the messages of a key keep their order, within batches and across them
    for (index, key), wanted in order.items():
        got = [
            each.message_id
            for messages in found.values()
            for each in messages
            if type(each.batch_key) is type(key)
            and each.batch_key == key
            and each.message_id.startswith(f"{index}-")
        ]
        assert got == wanted
    # and the same input makes the same batches, wherever it is planned
    run.store.folder(f"{run.path}/batches").remove_all()
    again, batches_again = plan_of(run, pipeline, *generations)
    assert [batch.batch_id for batch in batches] == [batch.batch_id for batch in batches_again]
    assert again.triggers == plan.triggers


def test_what_another_plan_held_is_marked_when_it_is_batched_anew(tmp_path: Path) -> None:
    # Given a plan of two producers' messages, whose batches may have been handled
    run, pipeline = open_run(tmp_path), python(batch_size=2)
    kept = publish(run, pipeline, [[message(n, batcher="b") for n in range(3)]])
    gone = publish(run, pipeline, [[message(n, batcher="b") for n in range(3, 6)]], map_index=1)
    plan_of(run, pipeline, kept, gone)

    # When the second's process task is cleared, and receives anew
    anew = publish(run, pipeline, [[message(n, batcher="b") for n in range(6, 9)]], map_index=1)
    plan, batches = plan_of(run, pipeline, kept, anew)

    # Then the first's come in other batches, and say so; the new ones do not
    with BatchReader(run, plan) as reader:
        found = [each for batch in batches for each in reader.read(batch)]
    marks = {each.message_id: each.redelivered for each in found}
    assert marks == {f"m-{n}": n < 3 for n in (0, 1, 2, 6, 7, 8)}
    assert sum(batch.redelivered for batch in batches) == 3
    # And so they do however often the plan is made
    assert [b.redelivered for b in plan_of(run, pipeline, kept, anew)[1]] == [
        b.redelivered for b in batches
    ]
