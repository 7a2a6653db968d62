"""When a run needs attention, and how that is worded."""

from __future__ import annotations

import pytest

from airflow_broadway.core.custody.report import SettleReport, handled_of
from airflow_broadway.core.custody.run_summary import (
    FEW,
    check_fail_when,
    failures_trouble,
    lines_of,
    settled_line,
    settling_trouble,
)
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.local.run import RunReport
from airflow_broadway.core.text import printable


@pytest.mark.parametrize(
    ("fail_when", "failed", "handled", "fails"),
    [
        ("all", 5, 5, True),
        ("all", 4, 5, False),
        ("all", 0, 0, False),
        ("never", 5, 5, False),
        (3, 2, 100, False),
        (3, 3, 100, True),
        (0.05, 4, 100, False),
        (0.05, 5, 100, True),
        (0.05, 0, 100, False),
    ],
)
def test_fail_when_bounds_the_failures(fail_when, failed, handled, fails):
    totals = {"failed": failed, "acked": handled - failed, "dead_lettered": failed}
    assert bool(failures_trouble(totals, fail_when)) is fails


@pytest.mark.parametrize(
    ("fail_when", "requeued", "dead_lettered", "fails"),
    [
        ("all", 1, 0, False),
        ("all", FEW - 1, 0, False),
        ("all", FEW, 0, True),
        ("all", 0, 1, True),
        ("all", 2, 1, True),
        (0.05, 1, 0, False),
        (0.05, FEW, 0, True),
        (0.05, 1, 1, True),
        (1, 1, 0, True),
    ],
)
def test_few_messages_need_one_dead_letter_to_fail(fail_when, requeued, dead_lettered, fails):
    failed = requeued + dead_lettered
    totals = {"failed": failed, "requeued": requeued, "dead_lettered": dead_lettered}
    assert bool(failures_trouble(totals, fail_when)) is fails


@pytest.mark.parametrize("value", [0, -1, 1.0, 1.5, 0.0, True, "some", None])
def test_invalid_fail_when_is_refused(value):
    with pytest.raises(OptionsError, match=r"a share below 1 such as 0\.05"):
        check_fail_when("ack.fail_when", value)


def test_lapsed_and_refused_settlements_are_reported():
    assert settling_trouble(0, 0, halted=2) == (
        "2 messages hold up their run: mend the cause; the next run begins there, and a backfill is"
        " cleared to try again"
    )
    assert settling_trouble(1, 0, halted=1).endswith(
        "marked as redelivered; 1 message holds up its run: mend the cause; the next run begins"
        " there, and a backfill is cleared to try again"
    )
    assert settling_trouble(0, 0) == ""
    assert settling_trouble(2, 1) == (
        "2 messages had lapsed before they were settled and 1 could not be settled: they are"
        " delivered again, marked as redelivered"
    )


def test_settlement_is_logged_in_words():
    assert settled_line(SettleReport(acked=1_000, dead_lettered=2)) == (
        "Settled 1,002 messages: 1,000 acked, 2 dead-lettered."
    )
    assert settled_line(SettleReport()) == "Settled 0 messages."


def test_released_messages_do_not_count_as_handled():
    totals = {"acked": 1, "requeued": 2, "dead_lettered": 3, "left": 4, "released": 50, "lapsed": 9}
    assert handled_of(totals) == 10


@pytest.mark.parametrize(
    ("failed", "settled", "trouble"),
    [
        (0, SettleReport(acked=5), ""),
        (4, SettleReport(acked=1, dead_lettered=4), ""),
        (5, SettleReport(dead_lettered=5), "every message that was handled"),
        (0, SettleReport(acked=4, lapsed=1), "had lapsed"),
        (0, SettleReport(acked=4, failed=1), "could not be settled"),
        (0, SettleReport(acked=4), "does not balance"),
    ],
)
def test_local_report_names_its_trouble(failed, settled, trouble):
    report = RunReport(
        pipeline="p", generation="g", received=5, received_bytes=0, failed=failed, settled=settled
    )
    assert trouble in report.trouble()
    assert bool(report.trouble()) is bool(trouble)


def test_report_lines_begin_with_figures():
    report = {
        "totals": {"received": 12_345, "failed": 45, "acked": 12_300}
        | {"dead_lettered": 45, "accounted": 12_345},
        "balanced": True,
        "batchers": {"default": {"failed": 5}, "other": {"failed": 0}},
        "reasons": [
            {"count": 40, "stage": "process", "reason": "ValueError: no \x1b[31mnumber\n"},
            {"count": 5, "stage": "batch", "reason": "too late"},
        ],
        "failed_tasks": [],
        "errors": [],
    }
    assert lines_of(report) == [
        "12,345 messages received: 12,300 acked, 45 dead-lettered.",
        "45 failed: 40 before any batch, 5 in batches of default.",
        r"  40  process  ValueError: no \x1b[31mnumber",
        "   5  batch    too late",
    ]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("plain é ✓ 漢", "plain é ✓ 漢"),
        ("a\nb\tc", "a b c"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\u202eb", r"a\u202eb"),
        ("a\u200bb\ud83d", r"a\u200bb\ud83d"),
        ("\x9b31m", r"\x9b31m"),
    ],
)
def test_foreign_text_has_no_terminal_escapes(text, printed):
    assert printable(text) == printed
