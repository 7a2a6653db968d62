"""What a batch's outcome holds, what stands beside it, and who wins."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats import record_batch as recording
from airflow_broadway.core.formats.files import LocalFiles
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.formats.record_batch import Recorder, entry_lines

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


def held(files: Files) -> list[list[str]]:
    """The ids in each file of copies, in order of writing."""
    names = [path for path in files.written if "gathered-" in path]
    return [[Outcome.loads(line, name).batch_id for line in files.lines(name)] for name in names]


def test_few_exceptions_are_in_the_outcome_alone(files: Files) -> None:
    recorder = Recorder(files, PLAN, "w")
    made = outcome(**recorder.keep("x", iter(["one", "two"]))._asdict())
    assert recorder.record(made)

    assert files.written == [f"{FOLDER}/x.json"]
    found = Outcome.loads(files.read(f"{FOLDER}/x.json"), "x.json")
    assert found == made
    assert found.exceptions == f"{FOLDER}/x.json"
    assert list(entry_lines(files, found.exceptions)) == ["one", "two"]


def test_a_batch_without_exceptions_has_none(files: Files) -> None:
    made = outcome(**Recorder(files, PLAN, "w").keep("x", [])._asdict())
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

    made = outcome(**Recorder(files, PLAN, "w").keep("x", streamed())._asdict())

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
    recorder = Recorder(files, PLAN, "w")

    def broken() -> Iterator[str]:
        yield from ("one", "two")
        raise ValueError("a lazy frame")

    with pytest.raises(ValueError, match="a lazy frame"):
        recorder.keep("x", broken())
    kept = recorder.keep("x", ["three"])
    assert list(entry_lines(files, str(kept.entries), kept.entries_sum)) == ["three"]


def test_the_first_outcome_stands(files: Files) -> None:
    assert Recorder(files, PLAN, "w").record(outcome(writer="first"))
    late = Recorder(files, PLAN, "v")
    assert not late.record(outcome(writer="second"))
    late.finish()
    assert Outcome.loads(files.read(f"{FOLDER}/x.json"), "x").writer == "first"
    assert held(files) == []


def test_an_answer_that_got_lost_is_no_defeat(files: Files) -> None:
    # Given a store whose client tried again, and met what it had written
    files.unheard = "x.json"
    recorder = Recorder(files, PLAN, "w")
    assert recorder.record(outcome())
    assert not recorder.record(outcome(writer="another"))


def test_copies_are_gathered_by_number_and_by_size(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "GATHERED", 3)
    recorder = Recorder(files, PLAN, "w")
    for name in "abcdefg":
        assert recorder.record(outcome(name))
    assert held(files) == [["a", "b", "c"], ["d", "e", "f"]]
    recorder.finish()  # of one outcome there is no need to have two
    assert len(held(files)) == 2

    monkeypatch.setattr(recording, "GATHERED_BYTES", 1000)
    for name in "hij":
        assert recorder.record(outcome(name, lines=["x" * 1000]))
    recorder.finish()
    assert held(files)[2:] == [["h"], ["i"], ["j"]]
    assert all(paths.is_gathered(Path(each).name) for each in files.written if "gathered" in each)


def test_copies_that_cannot_be_written_are_done_without(files: Files) -> None:
    files.refuses = "gathered"
    recorder = Recorder(files, PLAN, "w")
    assert recorder.record(outcome("a"))
    assert recorder.record(outcome("b"))
    recorder.finish()
    assert files.list(FOLDER) == ["a.json", "b.json"]


def test_an_outcome_that_cannot_be_written_is_an_error_and_has_no_copy(files: Files) -> None:
    recorder = Recorder(files, PLAN, "w")
    assert recorder.record(outcome("a"))
    files.refuses = "b.json"
    with pytest.raises(OSError, match="no room"):
        recorder.record(outcome("b"))
    assert recorder.record(outcome("c"))
    recorder.finish()
    assert held(files) == [["a", "c"]]


def test_many_threads_record_beside_each_other(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "GATHERED", 7)
    recorder = Recorder(files, PLAN, "w")
    start = threading.Barrier(4)

    def work(own: int) -> None:
        start.wait(20)
        for n in range(25):
            assert recorder.record(outcome(f"{own}-{n}"))

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    recorder.finish()

    copies = [each for some in held(files) for each in some]
    assert sorted(copies) == sorted(f"{own}-{n}" for own in range(4) for n in range(25))


def test_an_outcome_that_is_gone_or_was_changed_has_no_lines(files: Files) -> None:
    with pytest.raises(StagingDamaged, match="is not there"):
        list(entry_lines(files, f"{FOLDER}/x.json"))
    Recorder(files, PLAN, "w").record(outcome(lines=["one", "two"]))
    path = files.root / FOLDER / "x.json"
    path.write_text(path.read_text().replace('"one", ', ""))
    with pytest.raises(StagingDamaged, match="seal is broken"):
        list(entry_lines(files, f"{FOLDER}/x.json"))
