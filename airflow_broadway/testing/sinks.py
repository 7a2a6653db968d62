"""The sink contract as a test suite for sinks.

A sink's test inherits the suite and provides its table::

    class TestMySink(SinkContract):
        @pytest.fixture
        def subject(self, tmp_path):
            return SinkSubject(MySink(path=str(tmp_path)), read=lambda: read_my_ids(tmp_path))

pytest must be installed.
"""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import pytest

from airflow_broadway.core.model.batch_info import BatchInfo, Trigger
from airflow_broadway.core.model.sink import Commit, CommitRefused, Sink, SinkClient, SinkEnv


def commit_of(commit_id: str, attempt: int = 1) -> Commit:
    """Returns a batch's commit."""
    batch = BatchInfo("default", None, None, 1, Trigger.SIZE, commit_id)
    return Commit(commit_id=commit_id, attempt=attempt, batch=batch, pipeline="contract")


def rows_of(*message_ids: str) -> Any:
    """Returns rows as a ``pyarrow.Table``: ``message_id string, n long``."""
    import pyarrow as pa

    return pa.table({"message_id": list(message_ids), "n": [1] * len(message_ids)})


@dataclass(frozen=True)
class SinkSubject:
    """A sink with an empty table of the columns ``message_id`` (text) and ``n`` (64-bit integer).

    :param read: Reads ``message_id`` of all rows of the table, by other means than the sink.
    """

    sink: Sink
    read: Callable[[], Sequence[str]]
    env: SinkEnv = field(default_factory=SinkEnv)

    def open(self) -> SinkClient:
        """Opens the sink as another process would."""
        return self.sink.open(self.env)


class SinkContract(ABC):
    """The contract of every sink that supports Python batchers."""

    #: Races of a commit against its tombstone, and of two attempts.
    races: ClassVar[int] = 20
    #: Commits that are ruled out together.
    many: ClassVar[int] = 50

    @pytest.fixture
    @abstractmethod
    def subject(self) -> Any:
        """Returns a subject with a table of its own."""

    def test_a_commit_lands_once_with_its_attempt(self, subject: SinkSubject) -> None:
        with closing(subject.open()) as client:
            client.commit(rows_of("a", "b"), commit_of("b1.0", 3))
            client.commit(rows_of("a", "b"), commit_of("b1.0", 3))
        with closing(subject.open()) as client:
            assert client.landed(["b1.0", "b2.0"]) == {"b1.0": 3}
            assert client.landed([]) == {}
        assert sorted(subject.read()) == ["a", "b"]

    def test_a_batch_without_rows_lands(self, subject: SinkSubject) -> None:
        with closing(subject.open()) as client:
            client.commit(rows_of().cast(rows_of("a").schema), commit_of("b1.0"))
            assert client.landed(["b1.0"]) == {"b1.0": 1}
        assert list(subject.read()) == []

    @pytest.mark.parametrize("opened", ["before", "after"])
    def test_another_attempt_is_refused(self, subject: SinkSubject, opened: str) -> None:
        with closing(subject.open()) as first, closing(subject.open()) as other:
            first.commit(rows_of("a"), commit_of("b1.0", 1))
            with closing(other if opened == "before" else subject.open()) as late:
                for attempt in (2, 3):
                    with pytest.raises(CommitRefused):
                        late.commit(rows_of("a"), commit_of("b1.0", attempt))
        assert list(subject.read()) == ["a"]

    @pytest.mark.parametrize("opened", ["before", "after"])
    def test_a_commit_that_was_ruled_out_is_refused(
        self, subject: SinkSubject, opened: str
    ) -> None:
        with closing(subject.open()) as early, closing(subject.open()) as settlement:
            assert settlement.rule_out(["b1.0"]) == {}
            with closing(early if opened == "before" else subject.open()) as late:
                with pytest.raises(CommitRefused):
                    late.commit(rows_of("a"), commit_of("b1.0"))
                assert late.landed(["b1.0"]) == {}
                late.commit(rows_of("a"), commit_of("b1.1"))
        assert list(subject.read()) == ["a"]

    def test_many_commits_are_ruled_out_together(self, subject: SinkSubject) -> None:
        ids = [f"b{number}.0" for number in range(self.many)]
        with closing(subject.open()) as client:
            client.commit(rows_of("a"), commit_of(ids[2], 2))
            for _ in range(2):
                assert client.rule_out(ids) == {ids[2]: 2}
            assert client.rule_out([]) == {}
            assert client.landed(ids) == {ids[2]: 2}
            with pytest.raises(CommitRefused):
                client.commit(rows_of("b"), commit_of(ids[3]))
        assert list(subject.read()) == ["a"]

    def test_either_a_commit_or_its_tombstone_lands(self, subject: SinkSubject) -> None:
        landed = 0
        with closing(subject.open()) as driver, closing(subject.open()) as settlement:
            within = _seconds_of_commit(driver)
            for number in range(self.races):
                commit = commit_of(f"b{number}.0")
                refused, reported = _race(
                    partial(driver.commit, rows_of(commit.commit_id), commit),
                    partial(settlement.rule_out, [commit.commit_id]),
                    within,
                )
                assert bool(reported) is not refused
                landed += not refused
            ids = [f"b{number}.0" for number in range(self.races)]
            committed = settlement.landed(ids)
        assert Counter(subject.read()) == dict.fromkeys([*committed, *_WARM], 1)
        assert len(committed) == landed
        print(f"{landed} of {self.races} commits landed")  # noqa: T201 # a figure of long runs

    def test_one_of_two_attempts_lands(self, subject: SinkSubject) -> None:
        with closing(subject.open()) as one, closing(subject.open()) as other:
            for number in range(self.races):
                first, second = commit_of(f"b{number}.0", 1), commit_of(f"b{number}.0", 2)
                rows = rows_of(f"m{number}")
                refused, also_refused = _race(
                    partial(one.commit, rows, first), partial(_refuses, other, rows, second), 0.02
                )
                assert refused is not also_refused
                assert one.landed([first.commit_id]) == {first.commit_id: 2 if refused else 1}
        assert Counter(subject.read()) == {f"m{number}": 1 for number in range(self.races)}


def _refuses(client: SinkClient, rows: Any, commit: Commit) -> bool:
    try:
        client.commit(rows, commit)
    except CommitRefused:
        return True
    return False


#: The commits that are timed.
_WARM = ("w1.0", "w2.0", "w3.0")


def _seconds_of_commit(client: SinkClient) -> float:
    """Commits some rows, and returns the duration of the last commit in seconds."""
    began = 0.0
    for name in _WARM:
        began = time.monotonic()
        client.commit(rows_of(name), commit_of(name))
    return time.monotonic() - began


def _race(commit: Callable[[], None], rival: Callable[[], Any], within: float) -> tuple[bool, Any]:
    """Runs both together; returns whether the commit was refused, and the rival's result.

    :param within: The rival begins at a random moment of so many seconds.
    """
    results: list[Any] = []
    errors: list[Exception] = []
    barrier, delay = threading.Barrier(2), random.uniform(0, within)

    def run() -> None:
        barrier.wait()
        time.sleep(delay)
        try:
            results.append(rival())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    barrier.wait()
    try:
        commit()
        refused = False
    except CommitRefused:
        refused = True
    finally:
        thread.join()
    if errors:
        raise errors[0]
    return refused, results[0]
