"""What is told of a run, when, and how often; and that telling harms nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Alerts
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.runs import alerts as module
from airflow_broadway.runs.alerts import Alert, RunAlerts, note_swept
from airflow_broadway.runs.metrics import Metric
from airflow_broadway.runs.ports import Ports
from airflow_broadway.testing import ManualClock
from tests.unit.runs.steps import Point, Run, dies


class Counts:
    """Where metrics go."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Mapping[str, str]]] = []

    def count(self, name: str, count: int, tags: Mapping[str, str]) -> None:
        self.sent += [(name, tags)] * count

    def gauge(self, name: str, value: float, tags: Mapping[str, str]) -> None: ...

    def seconds(self, name: str, seconds: float, tags: Mapping[str, str]) -> None: ...


class Listener:
    """A run's alerts, and who listens to them."""

    def __init__(self, run: Run, *, teller: str = "ack", **bounds: Any) -> None:
        self.told: list[Alert] = []
        self.metrics = Counts()
        self.clock = ManualClock(datetime.now(UTC))
        self.run = run
        self.alerts = RunAlerts(
            run.staged,
            run.pipeline,
            Alerts(**bounds),
            {"0:Channel": self._listen, **self.others()},
            ports=Ports(metrics=self.metrics),
            teller=teller,
            clock=self.clock,
        )

    def _listen(self, alert: Alert) -> None:
        self.told.append(alert)

    def others(self) -> dict[str, Callable[[Alert], object]]:
        return {}

    def look(self, **given: Any) -> list[str]:
        """One look; the kinds told by it."""
        before = len(self.told)
        self.alerts.look(self.run.staged.generations(), **given)
        return [alert.kind for alert in self.told[before:]]


def handled(folder: Path, numbers: range, **given: Any) -> tuple[Run, dict[str, Any]]:
    """A run that is over, and its report."""
    run = Run(folder, **given)
    run.send(numbers)
    run.batch(run.process())
    return run, run.ack()


# ------------------------------------------------------------------------------------------ what


def test_dead_letters_are_told_with_their_number_and_reasons(tmp_path: Path) -> None:
    run, report = handled(tmp_path, range(1, 16))  # 7, 14 and 5, 10, 15 fail

    listener = Listener(run)
    assert listener.look(report=report, last=True) == ["dead_letters"]

    [alert] = listener.told
    assert alert.message == (
        "Sums: 5 messages of run manual__1 became dead letters.  Why messages failed:"
        " 3 × five; 2 × seven."
    )
    assert (alert.pipeline, alert.dag_id, alert.run_id) == ("Sums", "sums", "manual__1")
    assert alert.facts["dead_lettered"] == 5
    assert listener.metrics.sent == [
        ("broadway.alerts", {"pipeline": "Sums", "dag_id": "sums", "alert": "dead_letters"})
    ]


@pytest.mark.parametrize(("bound", "told"), [(5, ["dead_letters"]), (6, []), (None, [])])
def test_dead_letters_are_told_from_the_bound_on(
    tmp_path: Path, bound: int | None, told: list[str]
) -> None:
    run, report = handled(tmp_path, range(1, 16))

    assert Listener(run, dead_letters=bound).look(report=report, last=True) == told


def test_a_run_that_went_well_tells_nothing_and_leaves_no_file(tmp_path: Path) -> None:
    run, report = handled(tmp_path, range(1, 5))
    listener = Listener(run, backlog_age=1.0)

    assert listener.look() == []
    assert listener.look(report=report, last=True) == []
    assert run.staged.files.list("alerts") == []
    assert listener.metrics.sent == []


def test_a_sum_that_does_not_balance_is_told_whatever_the_bounds(tmp_path: Path) -> None:
    run, report = handled(tmp_path, range(1, 5))
    report = {**report, "balanced": False}
    report["generations"][0]["balanced"] = False
    report["totals"]["accounted"] -= 1

    listener = Listener(run, dead_letters=None, lease=None)
    assert listener.look(report=report, last=True) == ["unbalanced"]
    assert "4 received, 3 accounted for" in listener.told[0].message


def test_messages_that_had_lapsed_are_told(tmp_path: Path) -> None:
    run, report = handled(tmp_path, range(1, 5))
    report["totals"]["lapsed"] = 2

    assert Listener(run, lease=None).look(report=report, last=True) == []
    assert Listener(run).look(report=report, last=True) == ["lease"]


def test_a_lease_is_told_once_it_is_short_of_its_share(tmp_path: Path) -> None:
    # Given a run that waits for its outcomes
    run = Run(tmp_path)
    run.send(range(1, 5))
    record = run.staged.generation(run.process()["generation"])
    lease = run.staged.lease(record)
    listener = Listener(run, lease=0.25)

    # When nobody can renew its lease
    listener.clock.advance(lease.seconds * 0.7)
    assert listener.look() == []
    listener.clock.advance(lease.seconds * 0.1)

    # Then it is told before it lapses, once
    assert listener.look() == ["lease"]
    assert "The lease of process[0] lapses in" in listener.told[0].message
    assert listener.told[0].facts["leases"] == [record.generation]
    listener.clock.advance(lease.seconds)
    assert listener.look() == []


def test_a_lease_that_has_lapsed_already_is_told_as_that(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.send(range(1, 5))
    run.process()
    listener = Listener(run)

    listener.clock.advance(10 * 24 * 3600.0)
    assert listener.look() == ["lease"]
    assert "has lapsed" in listener.told[0].message


def test_a_backlog_is_told_from_its_age_on_and_the_broker_is_then_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a message that nobody takes, and a run at work
    run = Run(tmp_path)
    run.send(range(1, 5))
    run.process(max_messages=3)
    asked: list[object] = []
    depth = SqliteQueue.depth

    def old(queue: SqliteQueue) -> Any:
        asked.append(queue)
        return depth(queue)._replace(oldest_age=500.0)

    monkeypatch.setattr(SqliteQueue, "depth", old)

    assert Listener(run, backlog_age=501.0).look() == []
    listener = Listener(run, backlog_age=500.0)
    assert listener.look() == ["backlog_age"]
    assert listener.told[0].message == (
        "Sums: 1 message waits, the oldest since 500 s (backlog_age=500)."
    )
    assert len(asked) == 2
    assert listener.look() == []
    assert len(asked) == 2


def test_a_broker_that_is_away_is_no_alert_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.send(range(1, 5))
    run.process(max_messages=3)

    def away(queue: SqliteQueue) -> Any:
        raise OSError("away")

    monkeypatch.setattr(SqliteQueue, "depth", away)
    assert Listener(run, backlog_age=1.0).look() == []
    assert "Could not ask how old the backlog is: away" in caplog.text


# ------------------------------------------------------------------------------------------ once


def test_looking_again_and_clearing_the_sensor_tells_nothing_twice(tmp_path: Path) -> None:
    run, report = handled(tmp_path, range(1, 16))
    assert Listener(run).look(report=report, last=True) == ["dead_letters"]

    again = Listener(Run(tmp_path))
    assert again.look(report=run.ack(), last=True) == []
    assert again.metrics.sent == []


def test_what_is_new_after_a_clear_is_told(tmp_path: Path) -> None:
    # Given a run that has told of its dead letters
    run, report = handled(tmp_path, range(1, 16))
    listener = Listener(run)
    listener.look(report=report, last=True)

    # When all of it is cleared, and receives another bad message
    run.send([7])
    run.batch(run.process(try_number=2))

    # Then that is told, with the run's number
    assert listener.look(report=run.ack(), last=True) == ["dead_letters"]
    assert listener.told[-1].facts["dead_lettered"] == 6


def test_who_dies_while_telling_tells_at_its_next_try(tmp_path: Path) -> None:
    run, report = handled(tmp_path, range(1, 16))
    dies(
        lambda: Listener(run).look(report=report, last=True),
        Point(
            "airflow_broadway.runs.metrics:Metrics.count",
            when=lambda self, metric, count, **tags: metric == Metric.ALERTS,
        ),
    )

    # Another task of the run leaves it to its teller
    assert Listener(run, teller="other").look(report=report, last=True) == []
    assert Listener(run).look(report=report, last=True) == ["dead_letters"]


# ---------------------------------------------------------------------------------------- harmless


class Failing(Listener):
    """Beside the one that listens, one that fails so many times."""

    times = 99

    def others(self) -> dict[str, Callable[[Alert], object]]:
        self.calls = 0

        def fail(alert: Alert) -> None:
            self.calls += 1
            if self.calls <= self.times:
                raise RuntimeError("https://user:pw@hooks.example is away")

        return {"1:Away": fail}


def test_a_notifier_that_fails_is_called_three_times_and_the_other_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, report = handled(tmp_path, range(1, 16))
    listener = Failing(run)
    began = listener.clock.monotonic()

    assert listener.look(report=report, last=True) == ["dead_letters"]

    assert listener.calls == 3
    assert listener.clock.monotonic() - began == 2 * module.PAUSE
    assert "1:Away could not tell of dead_letters" in caplog.text
    assert "pw" not in caplog.text
    assert len(listener.metrics.sent) == 1
    # and never again
    assert listener.look(report=report, last=True) == []
    assert listener.calls == 3


def test_a_notifier_that_fails_once_is_called_again_at_the_next_look(tmp_path: Path) -> None:
    class Once(Failing):
        times = 1

    run = Run(tmp_path)
    run.send(range(1, 5))
    run.process()
    listener = Once(run)
    listener.clock.advance(10 * 24 * 3600.0)

    assert listener.look() == ["lease"]
    assert listener.look() == []
    assert listener.calls == 2
    listener.look()
    assert listener.calls == 2


def test_a_notifier_that_hangs_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 0.05)
    ended = threading.Event()

    class Hanging(Listener):
        def others(self) -> dict[str, Callable[[Alert], object]]:
            return {"1:Hung": lambda alert: ended.wait(60)}

    run, report = handled(tmp_path, range(1, 16))
    try:
        assert Hanging(run).look(report=report, last=True) == ["dead_letters"]
    finally:
        ended.set()
    assert "1:Hung did not tell of dead_letters" in caplog.text


def test_staging_that_fails_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, report = handled(tmp_path, range(1, 16))
    listener = Listener(run)

    def full(*given: Any) -> bool:
        raise OSError("no space left")

    monkeypatch.setattr(run.staged.files, "create", full)
    assert listener.look(report=report, last=True) == []
    assert "Could not tell of this run: no space left" in caplog.text


# ----------------------------------------------------------------------------------- dead runs


def test_dead_letters_of_a_run_that_died_are_told_by_the_next(tmp_path: Path) -> None:
    # Given a run whose messages have outcomes, and whose sensor was never there
    first = Run(tmp_path, "manual__1")
    first.send(range(1, 16))
    first.batch(first.process())

    # When the next run's process task settles them
    second = Run(tmp_path, "manual__2", finished=["manual__1"])
    note_swept(second.staged, second.sweep())
    second.process()
    report = second.ack()

    # Then that run's sensor tells, of the first run, once
    listener = Listener(second)
    assert listener.look(report=report, last=True) == ["dead_letters"]
    assert listener.told[0].run_id == "manual__1"
    assert listener.look(report=report, last=True) == []


# --------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "given",
    [
        {"notifiers": "slack"},
        {"notifiers": [3]},
        {"dead_letters": 0},
        {"lease": 2},
        {"backlog_age": "{{ params.age }}"},
    ],
)
def test_bounds_are_checked_where_they_stand(given: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match=f"Alerts.{next(iter(given))}"):
        Alerts(**given)


def test_alerts_show_no_secret_of_a_notifier_and_no_address_in_memory() -> None:
    class Slack:
        def __call__(self, context: Any) -> None: ...

        def __repr__(self) -> str:
            return "Slack(token='xoxb-1')"

    assert repr(Alerts(notifiers=[Slack()])) == (
        "Alerts(notifiers=[Slack], dead_letters=1, lease=0.25, backlog_age=None)"
    )
