"""A run's report as Markdown."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from airflow_broadway.core.custody.run_summary import markdown_of, plain
from tests.unit.runs.steps import Run


def report_of(folder: Path) -> tuple[Run, dict[str, Any]]:
    run = Run(folder)
    run.send(range(1, 11))
    run.batch(run.process())
    return run, run.ack()


def test_markdown_report_is_written_next_to_its_json(tmp_path: Path) -> None:
    run, report = report_of(tmp_path)

    text = run.staged.files.read("report.md")

    assert text == markdown_of(json.loads(run.staged.files.read("report.json")))
    assert text == markdown_of(copy.deepcopy(report))
    assert text.startswith("# Sums\n\nRun manual\\_\\_1 of the Dag sums, accounted for at ")
    assert "\n- 10 messages received\\: 7 acked, 3 dead\\-lettered\\.\n" in text
    assert "\n## Reasons\n\n| Messages | Stage | Reason |\n| --: | --- | --- |\n" in text
    assert "\n| 2 | batch | five |\n" in text
    assert " | process\\[0\\] | 1 | 10 | empty |\n" in text


def test_an_empty_run_has_none(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.process()
    run.ack()

    assert not run.staged.files.exists("report.md")


def test_text_of_others_is_no_mark_no_link_and_no_html(tmp_path: Path) -> None:
    _, report = report_of(tmp_path)
    evil = "<script>alert(1)</script> | [x](javascript:y) `z` \n# Head\n![i](http://a/b) \u202e"
    report["reasons"] = [{"count": 1, "stage": evil, "reason": evil}]
    report["errors"] = [evil]

    text = markdown_of(report)

    assert "<script" not in text
    assert "](" not in text
    assert "\n# Head" not in text
    assert "\u202e" not in text
    assert "http://" not in text
    assert plain("a|b") == "a\\|b"
