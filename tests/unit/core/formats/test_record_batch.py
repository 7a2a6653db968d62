"""Outcomes of batches: content, files, and the first of two."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
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
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.formats.record_batch import BatchRecorder
from airflow_broadway.core.model.batch_info import BatchInfo, Trigger
from tests.unit.planned import planned_batch

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
    """Local files that record writes, and may refuse them or lose their response."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.written: list[str] = []
        self.refuses = "nothing"
        self.unheard = "nothing"

    def create(self, path: str, text: str) -> bool:
        if self.refuses in path:
            raise OSError("no room")
        self.written.append(path)
        created = super().create(path, text)
        return created and self.unheard not in path

    def write_lines(self, path: str, lines: Iterable[str]) -> int:
        self.written.append(path)
        return super().write_lines(path, lines)


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def outcome(batch_id: str = "x", **more: Any) -> Outcome:
    return Outcome(batch_id=batch_id, batcher="b", plan=PLAN.path, successful=1, failed=0, **more)


def recorder_of(files: Files, *, fresh: bool = False) -> BatchRecorder:
    return BatchRecorder(
        files, PLAN, Ownership(files, "t", 2), writer="w", try_number=2, fresh=fresh
    )


def stands(recorder: BatchRecorder, outcome: Outcome) -> bool:
    """Records an outcome; returns whether it is the one that stands."""
    return recorder.record(outcome) == outcome


def gathered(files: Files) -> list[list[str]]:
    """The ids in each file of copies, in order of writing."""
    names = [path for path in files.written if "gathered-" in path]
    return [[Outcome.loads(line, name).batch_id for line in files.lines(name)] for name in names]


def test_few_exceptions_are_in_the_outcome(files):
    recorder = recorder_of(files)
    new_outcome = outcome(**recorder.keep("x", iter(["one", "two"]))._asdict())
    assert stands(recorder, new_outcome)

    assert files.written == [f"{FOLDER}/x.json"]
    parsed = Outcome.loads(files.read(f"{FOLDER}/x.json"), "x.json")
    assert parsed == new_outcome
    assert parsed.exceptions == f"{FOLDER}/x.json"
    assert list(entry_lines(files, parsed.exceptions)) == ["one", "two"]


def test_batch_without_exceptions_has_none(files):
    new_outcome = outcome(**recorder_of(files).keep("x", [])._asdict())
    assert (new_outcome.lines, new_outcome.exceptions, files.written) == (None, None, [])


@pytest.mark.parametrize(("more", "own"), [(0, False), (1, True)])
def test_many_exceptions_have_their_own_file(files, more, own):
    # Given just as many bytes as an outcome holds, newlines included, or one more
    lines = ["x" * 1023] * (recording.INLINE_BYTES // 1024 - 1) + ["x" * (1023 + more)]
    read = 0

    def streamed():
        nonlocal read
        for read, line in enumerate(lines, 1):  # noqa: B007 - the number of lines read
            yield line

    new_outcome = outcome(**recorder_of(files).keep("x", streamed())._asdict())

    assert read == len(lines)
    assert (new_outcome.entries is not None) is own
    if own:
        assert new_outcome.lines is None
        assert new_outcome.entries_sum is not None
        assert new_outcome.entries_sum["lines"] == len(lines)
        path, entries_sum = str(new_outcome.exceptions), new_outcome.entries_sum
        assert list(entry_lines(files, path, entries_sum)) == lines
    else:
        assert new_outcome.lines == lines


def test_interrupted_exceptions_may_be_kept_again(files, monkeypatch):
    monkeypatch.setattr(recording, "INLINE_BYTES", 0)
    recorder = recorder_of(files)

    def broken():
        yield from ("one", "two")
        raise ValueError("a lazy frame")

    with pytest.raises(ValueError, match="a lazy frame"):
        recorder.keep("x", broken())
    kept = recorder.keep("x", ["three"])
    assert list(entry_lines(files, str(kept.entries), kept.entries_sum)) == ["three"]


PLANNED = planned_batch(
    "x", batch_key=["a", 1], partition=3, size=4, trigger="timeout", redelivered=2, sources={"g": 4}
)


def lend(files: Files) -> None:
    """Lease the messages of the plan to this run."""
    deadline = datetime.now(UTC) + timedelta(minutes=1)
    lease = Lease(kind="k", generation="g", seconds=60, deadline=deadline)
    files.replace(paths.lease("g"), json.dumps(lease.to_json()))


def test_batch_info_and_outcome_are_recorded(files):
    lend(files)

    batch = recorder_of(files).begin(PLANNED, ("a", 1))
    exceptions = batch.keep(["one"])
    counts: dict[str, Any] = {"successful": 2, "failed": 1, "missing": 1}
    recorded = batch.record(**counts, exceptions=exceptions, error="e" * 9999)

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
    assert Outcome.loads(files.read(f"{FOLDER}/x.json"), "x") == recorded
    assert (recorded.successful, recorded.failed, recorded.missing) == (2, 1, 1)
    assert (recorded.lines, recorded.plan, recorded.batcher) == (["one"], PLAN.path, "b")
    assert (recorded.writer, recorded.try_number) == ("w", 2)
    assert len(recorded.error.encode()) == MAX_REASON
    assert datetime.fromisoformat(recorded.started_at).tzinfo is not None


@pytest.mark.parametrize(
    ("taken", "error"), [("work/t-000003.json", OwnershipLost), (paths.intent("g"), LeaseLapsed)]
)
def test_batch_taken_over_is_neither_begun_committed_nor_recorded(files, taken, error):
    # Given a batch that is being handled
    lend(files)
    batch = recorder_of(files, fresh=True).begin(PLANNED, None)

    # When a later try takes the task over, or the messages are about to be settled
    files.create(taken, "{}")

    # Then it commits nothing and gets no outcome, and no other try of this task's begins it
    counts: dict[str, Any] = {"successful": 4, "failed": 0, "missing": 0}
    for step in (batch.begin_commit, batch.record):
        with pytest.raises(error):
            step(exceptions=batch.keep([]), **counts)
    with pytest.raises(error):
        recorder_of(files).begin(PLANNED, None)
    assert files.list(FOLDER) == []


def test_the_first_outcome_stands(files):
    assert stands(recorder_of(files), outcome(writer="first"))
    late = recorder_of(files)
    assert not stands(late, outcome(writer="second"))
    late.finish()
    assert Outcome.loads(files.read(f"{FOLDER}/x.json"), "x").writer == "first"
    assert gathered(files) == []


def test_lost_response_of_own_write_is_recognized(files):
    # Given a store whose client retried, and found its own write
    files.unheard = "x.json"
    recorder = recorder_of(files)
    assert stands(recorder, outcome())
    assert not stands(recorder, outcome(writer="another"))


def test_copies_are_gathered_by_count_and_size(files, monkeypatch):
    monkeypatch.setattr(recording, "GATHERED", 3)
    recorder = recorder_of(files)
    for name in "abcdefg":
        assert stands(recorder, outcome(name))
    assert gathered(files) == [["a", "b", "c"], ["d", "e", "f"]]
    recorder.finish()  # of one outcome there is no need to have two
    assert len(gathered(files)) == 2

    monkeypatch.setattr(recording, "GATHERED_BYTES", 1000)
    for name in "hij":
        assert stands(recorder, outcome(name, lines=["x" * 1000]))
    recorder.finish()
    assert gathered(files)[2:] == [["h"], ["i"], ["j"]]
    assert all(paths.is_gathered(Path(path).name) for path in files.written if "gathered" in path)


def test_unwritable_copies_are_skipped(files):
    files.refuses = "gathered"
    recorder = recorder_of(files)
    assert stands(recorder, outcome("a"))
    assert stands(recorder, outcome("b"))
    recorder.finish()
    assert files.list(FOLDER) == ["a.json", "b.json"]


def test_unwritable_outcome_raises_and_has_no_copy(files):
    recorder = recorder_of(files)
    assert stands(recorder, outcome("a"))
    files.refuses = "b.json"
    with pytest.raises(OSError, match="no room"):
        recorder.record(outcome("b"))
    assert stands(recorder, outcome("c"))
    recorder.finish()
    assert gathered(files) == [["a", "c"]]


def test_threads_record_concurrently(files, monkeypatch):
    monkeypatch.setattr(recording, "GATHERED", 7)
    recorder = recorder_of(files)
    start = threading.Barrier(4)

    def work(own):
        start.wait(20)
        for n in range(25):
            assert stands(recorder, outcome(f"{own}-{n}"))

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    recorder.finish()

    copies = [name for names in gathered(files) for name in names]
    assert sorted(copies) == sorted(f"{own}-{n}" for own in range(4) for n in range(25))


def test_missing_or_changed_outcome_has_no_lines(files):
    with pytest.raises(StagingDamaged, match="is missing"):
        list(entry_lines(files, f"{FOLDER}/x.json"))
    recorder_of(files).record(outcome(lines=["one", "two"]))
    path = files.root / FOLDER / "x.json"
    path.write_text(path.read_text().replace('"one", ', ""))
    with pytest.raises(StagingDamaged, match="seal is broken"):
        list(entry_lines(files, f"{FOLDER}/x.json"))
