"""What a batch's outcome holds, what stands beside it, and who wins."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.custody.verdicts import MAX_REASON
from airflow_broadway.core.errors import LeaseLapsed, StagingDamaged
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats import record_batch as recording
from airflow_broadway.core.formats.files import LocalFiles
from airflow_broadway.core.formats.outcome import Outcome, entry_lines
from airflow_broadway.core.formats.ownership import Ownership, OwnershipLost
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.record_batch import BatchRecorder
from airflow_broadway.core.model.batch_info import BatchInfo, Trigger

PLAN = BatchPlan(
    path="batches/b/inputs/1-try",
    pipeline="P",
    batcher="b",
    generations=["g"],
    data=[],
    schema=None,
    as_bytes=False,
    messages=0,
    batches=0,
    triggers={},
    root_id="root",
    host="host",
)
FOLDER = "outcomes/b/inputs"


class Files(LocalFiles):
    """Plain files that know what was asked of them, and may refuse it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.written: list[str] = []
        self.refuses = "nothing"
        self.unheard = "nothing"

    def create(self, path: str, text: str) -> bool:
        if self.refuses in path:
            raise OSError("no room")
        self.written.append(path)
        made = super().create(path, text)
        return False if self.unheard in path else made

    def write_lines(self, path: str, lines: Iterable[str]) -> int:
        self.written.append(path)
        return super().write_lines(path, lines)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def outcome(batch_id: str = "x", **more: Any) -> Outcome:
    return Outcome(batch_id=batch_id, batcher="b", plan=PLAN.path, successful=1, failed=0, **more)


def recorder_of(files: Files, *, fresh: bool = False) -> BatchRecorder:
    return BatchRecorder(
        files, PLAN, Ownership(files, "t", 2), writer="w", try_number=2, fresh=fresh
    )


def stands(recorder: BatchRecorder, made: Outcome) -> bool:
    """Record an outcome; whether it is the one that stands."""
    return recorder.record(made) == made


def held(files: Files) -> list[list[str]]:
    """The ids in each file of copies, in order of writing."""
    names = [path for path in files.written if "gathered-" in path]
    return [[Outcome.loads(line, name).batch_id for line in files.lines(name)] for name in names]


def test_few_exceptions_are_in_the_outcome_alone(files: Files) -> None:
    recorder = recorder_of(files)
    made = outcome(**recorder.keep("x", iter(["one", "two"]))._asdict())
    assert stands(recorder, made)

    assert files.written == [f"{FOLDER}/x.json"]
    found = Outcome.loads(files.read(f"{FOLDER}/x.json"), "x.json")
    assert found == made
    assert found.exceptions == f"{FOLDER}/x.json"
    assert list(entry_lines(files, found.exceptions)) == ["one", "two"]


def test_a_batch_without_exceptions_has_none(files: Files) -> None:
    made = outcome(**recorder_of(files).keep("x", [])._asdict())
    assert (made.lines, made.exceptions, files.written) == (None, None, [])


@pytest.mark.parametrize(("more", "own"), [(0, False), (1, True)])
def test_many_exceptions_have_a_file_of_their_own(files: Files, more: int, own: bool) -> None:
    # Given just as many bytes as an outcome holds, newlines included, or one more
    lines = ["x" * 1023] * (recording.INLINE_BYTES // 1024 - 1) + ["x" * (1023 + more)]
    read = 0

    def streamed() -> Iterator[str]:
        nonlocal read
        for read, line in enumerate(lines, 1):  # noqa: B007 - how far it was asked
            yield line

    made = outcome(**recorder_of(files).keep("x", streamed())._asdict())

    assert read == len(lines)
    assert (made.entries is not None) is own
    if own:
        assert made.lines is None
        assert made.entries_sum is not None
        assert made.entries_sum["lines"] == len(lines)
        assert list(entry_lines(files, str(made.exceptions), made.entries_sum)) == lines
    else:
        assert made.lines == lines


def test_exceptions_that_break_off_may_be_kept_again(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "INLINE_BYTES", 0)
    recorder = recorder_of(files)

    def broken() -> Iterator[str]:
        yield from ("one", "two")
        raise ValueError("a lazy frame")

    with pytest.raises(ValueError, match="a lazy frame"):
        recorder.keep("x", broken())
    kept = recorder.keep("x", ["three"])
    assert list(entry_lines(files, str(kept.entries), kept.entries_sum)) == ["three"]


PLANNED = PlannedBatch(
    batch_id="x",
    rows=[[0, 0]],
    files=[0],
    batch_key=["a", 1],
    keys=1,
    partition=3,
    size=4,
    bytes=9,
    trigger="timeout",
    redelivered=2,
    sources={"g": 4},
)


def lend(files: Files) -> None:
    """Lease the messages of the plan to this run."""
    deadline = datetime.now(UTC) + timedelta(minutes=1)
    lease = Lease(kind="k", generation="g", seconds=60, deadline=deadline)
    files.replace(paths.lease("g"), json.dumps(lease.to_json()))


def test_a_batch_is_described_to_its_callback_and_recorded(files: Files) -> None:
    lend(files)

    batch = recorder_of(files).begin(PLANNED, ("a", 1))
    exceptions = batch.keep(["one"])
    made = batch.record(successful=2, failed=1, missing=1, exceptions=exceptions, error="e" * 9999)

    assert batch.info == BatchInfo(
        batcher="b",
        batch_key=("a", 1),
        partition=3,
        size=4,
        trigger=Trigger.TIMEOUT,
        batch_id="x",
        redelivered=2,
        attempt=2,
    )
    assert Outcome.loads(files.read(f"{FOLDER}/x.json"), "x") == made
    assert (made.successful, made.failed, made.missing, made.lines) == (2, 1, 1, ["one"])
    assert (made.plan, made.batcher, made.writer, made.try_number) == (PLAN.path, "b", "w", 2)
    assert len(made.error.encode()) == MAX_REASON
    assert datetime.fromisoformat(made.started_at).tzinfo is not None


@pytest.mark.parametrize(
    ("taken", "error"), [("work/t-000003.json", OwnershipLost), (paths.intent("g"), LeaseLapsed)]
)
def test_a_batch_of_another_is_neither_begun_nor_recorded(
    files: Files, taken: str, error: type[Exception]
) -> None:
    # Given a batch that is being handled
    lend(files)
    recorder = recorder_of(files, fresh=True)
    batch = recorder.begin(PLANNED, None)

    # When a later try takes the task over, or somebody begins to settle the messages
    files.create(taken, "{}")

    # Then it gets no outcome, and no other try of this task's begins it
    with pytest.raises(error):
        batch.record(successful=4, failed=0, missing=0, exceptions=batch.keep([]))
    with pytest.raises(error):
        recorder_of(files).begin(PLANNED, None)
    assert files.list(FOLDER) == []


def test_the_first_outcome_stands(files: Files) -> None:
    assert stands(recorder_of(files), outcome(writer="first"))
    late = recorder_of(files)
    assert not stands(late, outcome(writer="second"))
    late.finish()
    assert Outcome.loads(files.read(f"{FOLDER}/x.json"), "x").writer == "first"
    assert held(files) == []


def test_an_answer_that_got_lost_is_no_defeat(files: Files) -> None:
    # Given a store whose client tried again, and met what it had written
    files.unheard = "x.json"
    recorder = recorder_of(files)
    assert stands(recorder, outcome())
    assert not stands(recorder, outcome(writer="another"))


def test_copies_are_gathered_by_number_and_by_size(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "GATHERED", 3)
    recorder = recorder_of(files)
    for name in "abcdefg":
        assert stands(recorder, outcome(name))
    assert held(files) == [["a", "b", "c"], ["d", "e", "f"]]
    recorder.finish()  # of one outcome there is no need to have two
    assert len(held(files)) == 2

    monkeypatch.setattr(recording, "GATHERED_BYTES", 1000)
    for name in "hij":
        assert stands(recorder, outcome(name, lines=["x" * 1000]))
    recorder.finish()
    assert held(files)[2:] == [["h"], ["i"], ["j"]]
    assert all(paths.is_gathered(Path(each).name) for each in files.written if "gathered" in each)


def test_copies_that_cannot_be_written_are_done_without(files: Files) -> None:
    files.refuses = "gathered"
    recorder = recorder_of(files)
    assert stands(recorder, outcome("a"))
    assert stands(recorder, outcome("b"))
    recorder.finish()
    assert files.list(FOLDER) == ["a.json", "b.json"]


def test_an_outcome_that_cannot_be_written_is_an_error_and_has_no_copy(files: Files) -> None:
    recorder = recorder_of(files)
    assert stands(recorder, outcome("a"))
    files.refuses = "b.json"
    with pytest.raises(OSError, match="no room"):
        recorder.record(outcome("b"))
    assert stands(recorder, outcome("c"))
    recorder.finish()
    assert held(files) == [["a", "c"]]


def test_many_threads_record_beside_each_other(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "GATHERED", 7)
    recorder = recorder_of(files)
    start = threading.Barrier(4)

    def work(own: int) -> None:
        start.wait(20)
        for n in range(25):
            assert stands(recorder, outcome(f"{own}-{n}"))

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    recorder.finish()

    copies = [each for some in held(files) for each in some]
    assert sorted(copies) == sorted(f"{own}-{n}" for own in range(4) for n in range(25))


def test_an_outcome_that_is_gone_or_was_changed_has_no_lines(files: Files) -> None:
    with pytest.raises(StagingDamaged, match="is missing"):
        list(entry_lines(files, f"{FOLDER}/x.json"))
    recorder_of(files).record(outcome(lines=["one", "two"]))
    path = files.root / FOLDER / "x.json"
    path.write_text(path.read_text().replace('"one", ', ""))
    with pytest.raises(StagingDamaged, match="seal is broken"):
        list(entry_lines(files, f"{FOLDER}/x.json"))
