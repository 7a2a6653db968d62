from __future__ import annotations

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.kit.generation_log import GenerationLog, Settled, forget_ended
from airflow_broadway.producers.kit.state_files import Damaged, digest, state_files

REPORT = SettleReport(acked=2, errors=("one",))


@pytest.fixture(params=["disk", "memory"])
def files(request, tmp_path):
    return state_files(f"file://{tmp_path}" if request.param == "disk" else None, "some/queue")


@pytest.fixture
def log(files):
    return GenerationLog(files, "g1")


def test_progress_is_known_to_next_settler(files, log):
    log.note_now({"a": Action.ACK})
    log.note_now({"b": Action.DEAD_LETTER})
    log.note_done({"c": Action.RETRY})

    other = GenerationLog(files, "g1")

    assert other.now() == {"a": Action.ACK, "b": Action.DEAD_LETTER}
    assert other.done() == {"c": Action.RETRY}
    assert GenerationLog(files, "g2").now() == {}


def test_first_plan_stands(files, log):
    assert log.begin({"a": "ack"}) == {"a": "ack"}
    assert GenerationLog(files, "g1").begin({"a": "release"}) == {"a": "ack"}


def test_first_report_stands_unless_replaced(log):
    assert (log.settled(), log.is_settled()) == (None, False)

    assert log.end(REPORT, bundles=["x"]) == Settled(REPORT, {"bundles": ["x"]})

    assert log.is_settled()
    assert log.end(SettleReport(lapsed=2)) == log.settled() == Settled(REPORT, {"bundles": ["x"]})
    log.end(SettleReport(failed=2), replace=True)
    assert log.settled() == Settled(SettleReport(failed=2), {})


def test_report_is_kept_for_retention(files, log):
    log.note_now({"a": Action.ACK})
    log.begin()
    log.end(REPORT)

    log.keep_report("2026-03-14")

    assert log.names() == ["settled.json"]
    forget_ended(files, before="2026-03-14")
    assert log.settled() == Settled(REPORT, {})
    forget_ended(files, before="2026-03-15")
    assert log.settled() is None
    assert files.names("ended") == []


def test_file_removed_during_read_means_settled(log):
    with pytest.raises(StagingError, match=r"now-1\.json .* was deleted: another process"):
        log.now(["now-1.json"])


def test_foreign_file_is_no_note(tmp_path):
    log = GenerationLog(state_files(f"file://{tmp_path}", "q"), "g1")
    log.note_now({"a": Action.ACK})
    (tmp_path / "q" / digest("g1") / "now-2.json").write_text("{")

    with pytest.raises(Damaged):
        log.now()
