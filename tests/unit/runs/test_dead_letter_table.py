"""A dead-letter table: a row for each message that is dead-lettered, exactly once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from airflow_broadway import BatchInfo, Message
from airflow_broadway.core.custody.protocol import DeadLettered, Entry
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import OptionsError, PipelineError
from airflow_broadway.core.local.run import run_local
from airflow_broadway.core.model.run_source import RUN, RunSource
from airflow_broadway.core.model.sink import SinkEnv, SinkError
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.operators.run import check_unstaged
from airflow_broadway.producers.sqlite.producer import _Custodian
from airflow_broadway.runs import dead_letter_table
from airflow_broadway.runs import settle as settle_module
from airflow_broadway.runs.dead_letter_table import COLUMNS, check_table, commit_rows_of
from airflow_broadway.runs.tasks import BatchTask, ProcessTask
from airflow_broadway.sinks import DeltaTable, ParquetFolder
from airflow_broadway.sinks.parquet import _Disk
from tests.unit.runs.steps import TEN, PlainSums, Point, Run, Sums, dies, precede
from tests.unit.runs.test_sinks import Folder

DEAD = [5, 7, 10]
ROOT = Path(__file__).parents[3]
SETTLE = "airflow_broadway.producers.sqlite.producer:_Custodian.settle"


class Tabled(Sums):
    """Its dead letters become rows of a folder."""

    name = "Sums"
    dead_letter_table: Any = ParquetFolder(path="/replaced")


class PlainTabled(PlainSums):
    name = "Sums"
    dead_letter_table = ParquetFolder(path="/replaced")


def make(folder: Path, run_id: str = "manual__1", **options: Any) -> Run:
    options.setdefault("pipeline", Tabled)
    table = options.pop("table", {"path": str(folder / "dead")})
    return Run(folder, run_id, dead_letter_table=table, **options)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make(tmp_path, numbers=TEN)


def later(run: Run) -> Run:
    """The run after this one, which is over."""
    return make(run.folder, "manual__2", finished=[run.run_id], create=False)


def rows(run: Run) -> list[dict[str, Any]]:
    """The rows, as a reader sees them who knows nothing of commits."""
    place = run.folder / "dead"
    table = ds.dataset(place).to_table() if place.exists() else None
    found: list[dict[str, Any]] = table.to_pylist() if table else []
    return sorted(found, key=lambda row: int(row["payload"]))


def numbers(run: Run) -> list[int]:
    return [int(row["payload"]) for row in rows(run)]


def test_each_dead_letter_becomes_a_row_with_its_settlement(run: Run) -> None:
    run.batch(run.process())
    assert rows(run) == []

    run.ack()

    assert numbers(run) == run.dead() == DEAD
    [five, seven, _] = rows(run)
    times = [five[name] for name in ("enqueued_at", "received_at", "settled_at")]
    assert times == sorted(times)
    assert all(time.utcoffset().total_seconds() == 0 for time in times)
    [generation] = run.staged.generations()
    [batch_id] = {call.batch_id for call in run.calls()}
    with run.queue() as queue:
        ids = {int(item.body): item.original_id for item in queue.dead_letters(limit=None)}
    assert {name: five[name] for name in COLUMNS.names if not name.endswith("_at")} == {
        "message_id": ids[5],
        "payload": b"5",
        "payload_text": "5",
        "reason": "five",
        "stage": "batch",
        "exception": None,
        "attempt": 1,
        "batcher": "default",
        "batch_id": batch_id,
        "pipeline": "Sums",
        "dag_id": "sums",
        "run_id": "manual__1",
        "generation": generation.generation,
    }
    placed = [seven[name] for name in ("reason", "stage", "batcher", "batch_id")]
    assert placed == ["seven", "process", None, None]


def test_without_dead_letters_the_table_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path, numbers=[1, 2])
    monkeypatch.setattr(ParquetFolder, "open", lambda *_: pytest.fail("it was opened"))
    run.all()
    assert run.depth() == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "point",
    [
        Point("airflow_broadway.runs.settle.begin_settlement", "before"),
        Point("airflow_broadway.runs.dead_letter_table.fix_decision", "before"),
        Point("airflow_broadway.runs.dead_letter_table.fix_decision", "after"),
        Point("airflow_broadway.sinks.parquet:_Disk.create", "before"),
        Point("airflow_broadway.sinks.parquet:_Disk.create", "after"),
        Point("airflow_broadway.sinks.parquet:_Disk.publish", "after"),
        Point("airflow_broadway.runs.dead_letter_table.commit_rows_of", "after"),
        Point(SETTLE, "before"),
        Point(SETTLE, "after"),
    ],
    ids=lambda point: f"{point.moment} {point.function.rpartition('.')[2]}",
)
@pytest.mark.parametrize("retried", [True, False])
def test_a_row_stands_once_where_a_settlement_dies(run: Run, point: Point, retried: bool) -> None:
    run.batch(run.process())
    dies(run.ack, point)

    if retried:
        run.ack()
    else:
        later(run).all()

    assert numbers(run) == run.dead() == DEAD
    assert run.depth() == (0, 0, 0, len(DEAD))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (settle_module, "begin_settlement"),
        (dead_letter_table, "fix_decision"),
        (dead_letter_table._Table, "commit"),
        (_Disk, "create"),
        (_Disk, "publish"),
        (_Custodian, "settle"),
    ],
)
def test_a_row_stands_once_where_two_settle(
    run: Run, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a settlement that is paused while another one is carried out to its end
    run.batch(run.process())
    other = make(run.folder, create=False)
    precede(monkeypatch, lambda *_, **__: other.ack(), owner, name, once=True)

    run.ack()

    assert numbers(run) == run.dead() == DEAD
    assert run.depth() == (0, 0, 0, len(DEAD))


def test_a_repeated_settlement_knows_the_outcomes_of_the_first_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a settlement of a dead run, with an outcome that was recorded just too late for it
    pulled = run.process()
    with monkeypatch.context() as patch:
        step: Callable[..., object] = lambda *_, **__: run.batch(pulled)  # noqa: E731
        precede(patch, step, settle_module, "begin_settlement", once=True)
        dies(run.ack, Point("airflow_broadway.runs.dead_letter_table.fix_decision", "after"))

    # When the next run repeats it, and handles what comes again
    next_run = later(run)
    pulled = next_run.process()
    assert numbers(run) == run.dead() == [7]
    next_run.batch(pulled)
    next_run.ack()

    assert numbers(run) == run.dead() == DEAD
    assert run.depth() == (0, 0, 0, len(DEAD))


def test_a_repeated_settlement_of_a_cleared_task_counts_its_sinks_outcomes_alone(
    tmp_path: Path,
) -> None:
    # Given batches with a sink, and a cleared process task that is killed in their settlement
    class Committed(Tabled, Folder):
        name = "Sums"

    sink = {"default": {"sink": {"path": str(tmp_path / "lake")}}}
    run = make(tmp_path, pipeline=Committed, numbers=TEN, batchers=sink)
    run.batch(run.process())
    dies(
        lambda: run.process(try_number=2),
        Point("airflow_broadway.runs.dead_letter_table.commit_rows_of", "after"),
    )
    assert numbers(run) == [5, 10]

    # When the next try repeats it
    pulled = run.process(try_number=3)
    assert (numbers(run), run.dead()) == ([5, 10], [5, 10])
    run.batch(pulled, try_number=3)
    run.ack()

    # Then the message that had failed in the processor came again, and has its row
    assert numbers(run) == run.dead() == DEAD
    assert run.depth() == (0, 0, 0, len(DEAD))


class AllDead(Tabled):
    """Dead-letters successful messages, too."""

    name = "Sums"
    producer = replace(Sums.producer, on_success="dead_letter")


def test_successful_messages_that_are_dead_lettered_have_one_row_each(tmp_path: Path) -> None:
    run = make(tmp_path, pipeline=AllDead, numbers=TEN)
    run.all()

    assert numbers(run) == run.dead() == [*TEN]
    assert [row["batcher"] for row in rows(run)].count("default") == len(TEN) - 1


def test_table_is_opened_with_the_connections_of_the_task(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    opened = ParquetFolder.open

    def recorded(self: ParquetFolder, env: SinkEnv) -> Any:
        seen.append(env.connections)
        return opened(self, env)

    monkeypatch.setattr(ParquetFolder, "open", recorded)
    run.batch(run.process())
    seen.clear()

    run.ack()

    assert seen == [run.ports.connections]


def test_nothing_is_settled_while_the_table_cannot_be_written(run: Run) -> None:
    run.batch(run.process())
    (run.folder / "dead").write_text("in the way")

    with pytest.raises(SinkError, match=r"the dead-letter table file://.* cannot be written"):
        run.ack()
    assert run.depth() == (0, 0, 10, 0)

    (run.folder / "dead").unlink()
    run.ack()
    assert numbers(run) == run.dead() == DEAD


class AtOnce(Tabled):
    """Settles its failures immediately, before the settlement of the run."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return _at_once(super().handle_message(processor, message, context))

    def handle_batch(self, batcher: str, messages: Any, info: BatchInfo, context: Any) -> Any:
        return [*map(_at_once, super().handle_batch(batcher, messages, info, context))]


def _at_once(message: Message) -> Message:
    return message if message.ok and message.data != 1 else message.ack_immediately()


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_an_immediate_settlement_leaves_dead_letters_to_the_settlement(
    tmp_path: Path, executor: str
) -> None:
    run = make(tmp_path, pipeline=AtOnce, numbers=TEN, processors={"executor": executor})
    run.batch(run.process())
    assert run.depth() == (0, 0, 9, 0)

    run.ack()

    assert numbers(run) == run.dead() == DEAD
    assert run.depth() == (0, 0, 0, len(DEAD))


def test_a_pipeline_without_batchers_writes_its_rows_itself(tmp_path: Path) -> None:
    run = make(tmp_path, pipeline=PlainTabled, numbers=TEN)
    dies(run.process, Point(SETTLE, "before"))
    assert run.depth() == (0, 0, 10, 0)

    later(run).process()

    assert numbers(run) == run.dead() == [7]


class Odd(PlainTabled):
    """Fails every message, by an exception."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        raise LookupError("no \0 \ud800")


def test_any_payload_becomes_a_row(tmp_path: Path) -> None:
    run = make(tmp_path, pipeline=Odd)
    payloads = [b"\xff\xfe", b"a\0b", "ü".encode(), b"", b"x" * 5_000_000]
    with run.queue() as queue:
        queue.send([(payload, {"long": "h" * 100_000}) for payload in payloads])

    logging.disable(logging.CRITICAL)  # a worker of pytest cannot send half a surrogate pair
    run.process()
    logging.disable(logging.NOTSET)

    table = ds.dataset(tmp_path / "dead").to_table()
    texts = dict(zip(table["payload"].to_pylist(), table["payload_text"].to_pylist(), strict=True))
    assert texts == {
        **dict.fromkeys(payloads[:2]),
        **{payload: payload.decode() for payload in payloads[2:]},
    }
    assert {*table["reason"].to_pylist()} == {"LookupError: no \\x00 \\ud800"}
    assert {*table["exception"].to_pylist()} == {"LookupError"}


def test_many_rows_are_several_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_table, "MAX_ROWS", 4)
    run = make(tmp_path, pipeline=PlainTabled, numbers=[7 * n for n in range(10)])
    dies(run.process, Point("airflow_broadway.sinks.parquet:_Disk.publish", "after", 2))

    later(run).process()

    assert numbers(run) == run.dead() == [7 * n for n in range(10)]
    ids = sorted(path.stem for path in (tmp_path / "dead/_commits").iterdir())
    assert [name[-6:] for name in ids] == [".00000", ".00001", ".00002"]
    assert all(re.fullmatch(r"[0-9a-z.-]{1,64}", name) for name in ids)


def test_memory_is_bounded_by_the_bytes_of_payloads(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given dead letters that have their payloads with them, as at a broker that republishes
    record = run.staged.generation(run.process()["generation"])
    monkeypatch.setattr(dead_letter_table, "MAX_BYTES", 4_000)
    drawn, committed, held = 0, 0, []

    def letters() -> Iterator[DeadLettered]:
        nonlocal drawn
        for number in range(100):
            drawn += 1
            verdict = Verdict(Action.DEAD_LETTER, reason="five")
            entry = Entry(f"m{number}", "", verdict, 1, b"%d" % number + b" " * 1_000)
            yield entry, "", ""

    def count(_: Any, commit_id: str, rows: list[Any]) -> None:
        nonlocal committed
        held.append(drawn - committed)
        committed += len(rows)

    precede(monkeypatch, count, dead_letter_table._Table, "commit")
    commit_rows_of(
        run.staged, record, run.pipeline, letters(), run.staged.clock.now(), run.ports.connections
    )

    assert [int(row["payload"]) for row in rows(run)] == [*range(100)]
    assert (len(held), max(held)) == (25, 4)


def test_a_table_of_something_else_is_refused_with_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "orders"
    deltalake.DeltaTable.create(str(path), schema=pa.schema({"id": pa.int64()}))

    class InDelta(Tabled):
        name = "Sums"
        dead_letter_table = DeltaTable(path="/replaced")

    run = make(tmp_path, pipeline=InDelta, table={"path": str(path)})
    with pytest.raises(SinkError, match="its columns must be message_id, payload, payload_text, "):
        check_table(run.staged, run.pipeline, run.ports.connections)


def test_a_time_column_is_refused() -> None:
    class Timed(Tabled):
        dead_letter_table = DeltaTable(path="/lake/dead", time_column="settled_at")

    with pytest.raises(OptionsError, match=r"dead_letter_table\.time_column.*expected no value"):
        Timed()


@pytest.mark.parametrize("dies_first", [False, True])
def test_the_log_tells_of_a_resumed_settlement_only_if_it_is_one(
    run: Run, caplog: pytest.LogCaptureFixture, dies_first: bool
) -> None:
    run.batch(run.process())
    if dies_first:
        dies(run.ack, Point("airflow_broadway.runs.dead_letter_table.fix_decision", "before"))
    caplog.set_level(logging.INFO)

    run.ack()

    assert ("resuming a settlement begun before" in caplog.text) is dies_first
    assert numbers(run) == DEAD


@pytest.mark.parametrize("missing", [None, "batch_id"])
def test_a_table_that_lacks_a_column_is_refused_before_anything_is_received(
    tmp_path: Path, missing: str | None
) -> None:
    path = tmp_path / "delta"
    schema = pa.schema([field for field in COLUMNS if field.name != missing])
    deltalake.DeltaTable.create(str(path), schema=schema)

    class InDelta(Tabled):
        name = "Sums"
        dead_letter_table = DeltaTable(path="/replaced")

    run = make(tmp_path, pipeline=InDelta, table={"path": str(path)}, numbers=TEN)
    task = ProcessTask(run.staged, run.pipeline, run.task(), run.ports, budget=Budget())
    if missing:
        with pytest.raises(SinkError, match=r"the dead-letter table .* has other columns"):
            task.run()
        assert run.depth() == (10, 0, 0, 0)
        return

    run.batch(task.run().reference)
    run.ack()

    found = deltalake.DeltaTable(str(path)).to_pyarrow_table()
    assert sorted(map(str, found["payload_text"].to_pylist())) == ["10", "5", "7"]
    version = deltalake.DeltaTable(str(path)).version()
    check_table(run.staged, run.pipeline, run.ports.connections)  # checked already
    assert deltalake.DeltaTable(str(path)).version() == version


def test_a_run_of_a_past_run_has_rows_with_payloads(run: Run) -> None:
    run.all()
    again = make(run.folder, "again", create=False)
    source = RunSource(kind=RUN, run_id=run.run_id)
    task = ProcessTask(
        again.staged, again.pipeline, again.task(), again.ports, budget=Budget(), source=source
    )
    batch = BatchTask(again.staged, again.pipeline, again.task(), again.ports, batcher="default")
    plan = batch.plan([task.run().reference], label="1")
    assert plan is not None
    batch.handle(plan)

    again.ack()

    found = [(row["run_id"], int(row["payload"])) for row in rows(run)]
    assert sorted(found) == [("again", 5), ("again", 10), *(("manual__1", n) for n in DEAD)]


def test_a_run_in_one_process_refuses_a_table(run: Run) -> None:
    with pytest.raises(PipelineError, match="a dead_letter_table, whose rows need staged messages"):
        run_local(run.pipeline)
    with pytest.raises(OptionsError, match="dead_letter_table"):
        check_unstaged(run.pipeline)
    assert run.depth() == (10, 0, 0, 0)


def test_the_documentation_has_the_columns() -> None:
    page = (ROOT / "docs/dead-letters.md").read_text()
    tables = re.findall(r"CREATE TABLE [\w.]*dead_letters \((.*?)\n\)", page, re.DOTALL)
    kinds = {"text": "string", "bytea": "binary", "integer": "int32", "int": "int32"}
    kinds["timestamptz"] = "timestamp"
    expected = [(f.name, str(f.type).partition("[")[0]) for f in COLUMNS]
    for table in tables:
        words = [line.lower().strip(" ,").split()[:2] for line in table.strip().split("\n")]
        assert [(name, kinds.get(kind, kind)) for name, kind in words] == expected
    assert len(tables) == 2


def test_a_table_is_a_sink() -> None:
    class NoSink(Tabled):
        dead_letter_table: Any = "/lake/dead"

    with pytest.raises(OptionsError, match="'dead_letter_table': expected a sink, such as"):
        NoSink()
    with pytest.raises(OptionsError, match=r"dead_letter_table\.pth"):
        Tabled(dead_letter_table={"pth": "/lake/dead"})
    assert Tabled(dead_letter_table=None).dead_letter_table is None
