"""A run's page: active, settled and dead runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import pytest
from airflow.models.log import Log
from airflow.utils.session import create_session
from sqlalchemy import delete, select
from sqlalchemy.exc import OperationalError

from airflow_broadway.core.formats.live import LiveCounts
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.run_source import RunSource
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.plugin import access
from airflow_broadway.plugin.declared import Instance, Link, PipelineTasks, RunTasks, StageTask
from airflow_broadway.plugin.pages import message as message_page
from airflow_broadway.plugin.pages import run as run_page
from airflow_broadway.runs.sources.dry_run import DryRun
from airflow_broadway.staging.run_folder import StagedRun
from tests.unit.plugin.site import Site
from tests.unit.runs.steps import PlainSums, Point, Run, dies

BEFORE_PUBLISHING = Point("airflow_broadway.staging.run_folder:StagedRun.publish", "before")
PAGE = "/broadway/dags/sums/runs/manual__1"


def text_of(html: str) -> str:
    """A page's text, its tags gone, on one line."""
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def shown(site: Site, path: str = PAGE, role: str = "VIEWER") -> str:
    answer = site.browser(role).get(path)
    assert answer.status_code == 200, answer.text
    return text_of(answer.text)


@pytest.fixture
def run(site):
    """A run whose files are in the staging root of the site."""
    return Run(site.staging.parent, numbers=range(100))


@pytest.fixture
def settled(run):
    """The same, settled."""
    run.all()
    return run


def airflow(
    monkeypatch: pytest.MonkeyPatch, state: str | None, **states: str | list[str]
) -> RunTasks:
    """Makes Airflow know the run, and its tasks in these states."""
    kinds = {"process": "process", "batch_default": "batch", "handle": "spark", "ack": "ack"}
    tasks = []
    for name, task_states in states.items():
        task_states = [task_states] if isinstance(task_states, str) else task_states
        fields: dict[str, Any] = {"try_number": 1, "started_at": None, "ended_at": None}
        instances = [
            Instance(map_index=index if name == "process" else -1, state=state, **fields)
            for index, state in enumerate(task_states)
        ]
        names: Any = {"task_id": name.replace("_", "."), "kind": kinds.get(name, "run")}
        downstream = frozenset({"ack", "handle"})
        tasks.append(StageTask(**names, downstream=downstream, instances=instances))
    about = {"broker": "sqlite", "batchers": {"default": "python"}}
    reference = {"class": "m:Sums", "about": about}
    pipeline = PipelineTasks.of("d", {"pipeline": reference, "staging": None}, tasks=tasks)
    known = RunTasks(state=state, pipelines=[pipeline] if tasks else [])
    for module in (run_page, message_page):
        monkeypatch.setattr(module, "tasks_of_run", lambda dag_id, run_id: known)
    return known


def test_finished_tasks_are_done_without_airflows_word(site, run, monkeypatch):
    run.all()
    airflow(monkeypatch, "success", process=["success"], batch_default="success", ack="success")

    text = re.sub(r"<[^>]+>", " ", shown(site))

    assert "done" in text
    assert "success " not in text


def test_settled_run_shows_totals_reasons_and_balance(site, settled):
    text = shown(site)

    assert "100 received = equals 68 acked + 32 dead-lettered balanced" in text
    assert "17 batch five dead-lettered" in text
    assert "15 process seven dead-lettered" in text
    assert "9 of 9 done" in text
    assert "not settled" not in text


def test_active_run_refreshes_and_shows_leases(site, run, monkeypatch):
    airflow(monkeypatch, "running", process=["success"], batch_default="running", ack="deferred")
    run.process()

    answer = site.browser("VIEWER").get(PAGE)
    text = text_of(answer.text)

    assert "100 received = equals 0 acked + 100 still held not settled yet" in text
    assert "published; waits for outcomes" in text
    assert re.search(r"(14 min 5\d|15 min 0) s left", text)
    assert f'data-live="{PAGE}/live"' in answer.text
    assert '<noscript><meta http-equiv="refresh"' in answer.text


def test_live_part_is_a_fragment_and_ends_with_the_run(site, run, monkeypatch):
    run.batch(run.process())
    airflow(monkeypatch, "running", process=["success"], batch_default="success")

    going = site.browser("VIEWER").get(f"{PAGE}/live?pipeline=Sums&sort=messages")
    run.ack()
    airflow(monkeypatch, "success", process=["success"], batch_default="success")
    over = site.browser("VIEWER").get(f"{PAGE}/live")

    assert "<html" not in going.text
    assert "data-over" not in going.text
    assert 'aria-sort="ascending"><a href=' in going.text
    assert "data-over" in over.text
    assert "balanced" in over.text


def test_run_without_generations_is_drawn_by_its_tasks(site, monkeypatch):
    airflow(monkeypatch, "running", process=["none"], batch_default="none", ack="running")

    text = shown(site)

    assert "nothing received yet" in text
    assert "embedded queue" in text
    assert "default" in text
    assert "batch.default not begun" in text


def test_dag_without_pipelines_says_so(site, monkeypatch):
    airflow(monkeypatch, "success")

    assert "This Dag run has no pipeline of Broadway's." in shown(site)


def test_dry_run_shows_its_findings_and_no_totals(site, run, monkeypatch):
    airflow(monkeypatch, "success", process=["success"], batch_default="skipped", ack="success")
    options: Any = {"index": 0, "budget": Budget(max_messages=30), "source": RunSource()}
    DryRun(run.staged, run.pipeline, run.task(), run.ports, **options).run(report=True)

    text = shown(site)

    assert "Sums dry run" in text
    assert "Dry run: it only looked." in text
    assert "The queue: 100 ready" in text
    assert "A run now would take 30 messages at most" in text
    assert "balanced" not in text
    assert "not settled" not in text


@pytest.mark.parametrize("below", ["", "/live", "/message", "/message?q=m-1", "/report"])
def test_unknown_run_is_404(site, run, below):
    run.process()

    answer = site.browser("VIEWER").get(f"/broadway/dags/sums/runs/manual__2{below}")

    assert answer.status_code == 404
    text = "Neither Airflow nor the staging folder has a run manual__2 of the Dag sums."
    assert text in text_of(answer.text)


def test_run_without_files_is_explained(site, monkeypatch):
    airflow(monkeypatch, "success", process=["success"], batch_default="skipped", ack="success")

    text = shown(site)

    assert "It received nothing, or its files were deleted" in text


def test_task_that_died_before_publishing_is_marked(site, run, monkeypatch):
    dies(run.process, BEFORE_PUBLISHING)
    airflow(monkeypatch, "failed", process=["failed"], batch_default="upstream_failed")

    text = shown(site)

    assert "died before it published anything" in text
    assert "The run is over, and some of its messages are not settled" in text
    assert "cannot begin" in text
    assert "0 received" in text


def counts(run: Run, *, received: int, failed: int, staged: int) -> None:
    """Write the counts of a task that receives."""
    [record] = run.staged.generations()
    now = datetime.now(UTC)
    counts: dict[str, Any] = {"received": received, "received_bytes": 9 * received}
    counts |= {"failed": failed, "batchers": {"default": staged}}
    live = LiveCounts(at=now, deadline=now + timedelta(minutes=30), **counts)
    run.staged.files.replace(f"{record.generation}/live.json", live.dumps())


def test_live_counts_are_shown_before_publishing(site, run, monkeypatch):
    dies(run.process, BEFORE_PUBLISHING)
    counts(run, received=4200, failed=7, staged=4000)
    airflow(monkeypatch, "running", process=["running"], batch_default="none", ack="deferred")

    text = shown(site)

    assert "receives" in text
    assert "Besides, 4 200 messages are being received" in text.replace("\u202f", " ")
    assert re.search(r"(29 min 5\d|30 min 0) s left", text)


def test_lapsed_lease_is_prominent(site, run):
    run.process()
    [record] = run.staged.generations()
    lease = run.staged.lease(record).to_json()
    past = (datetime.now(UTC) - timedelta(minutes=3)).isoformat()
    run.staged.files.replace(
        f"{record.generation}/lease.json", json.dumps({**lease, "deadline": past})
    )

    text = shown(site)

    assert "Sums needs a look" in text
    assert re.search(r"lapsed 3 min \d s ago", text)


def test_several_pipelines_have_separate_sections(site, run):
    run.all()
    run.staged = StagedRun(run.staged.store, pipeline="Others", dag_id="sums", run_id="manual__1")
    run.send(range(5))
    run.process()

    text = shown(site)

    assert "Sums balanced" in text
    assert "Others not settled" in text


def test_unbatched_pipeline_is_shown_whole(site):
    run = Run(site.staging.parent, pipeline=PlainSums, numbers=range(50))
    run.process()
    run.ack()

    text = shown(site)

    assert "50 received = equals 42 acked + 8 dead-lettered balanced" in text


def test_batches_are_sorted_and_filtered_by_links(site, settled):
    browser = site.browser("VIEWER")

    html = browser.get(f"{PAGE}?sort=messages&desc=0&pipeline=Sums").text
    rows = re.findall(r'<td class="num">(\d+)</td>\s*<td>(\w+)</td>', html.split("Closed by")[1])
    none = text_of(browser.get(f"{PAGE}?state=open&pipeline=Sums").text)
    beyond = browser.get(f"{PAGE}?page=99&sort=nonsense&state=nonsense&batcher=nonsense")

    assert [int(size) for size, _ in rows][:2] == [5, 10]
    assert 'aria-sort="ascending"' in html
    assert "Batches 0" in none
    assert beyond.status_code == 200
    assert browser.get(f"{PAGE}?page=x").status_code == 422


def test_links_lead_to_task_logs(site, settled, monkeypatch):
    known = airflow(monkeypatch, "success", process=["success"], batch_default="success")

    [process] = known.pipelines[0].of_kind("process")
    links = [
        Link("Spark history", "https://history.test/app", -1),
        Link("Evil", "javascript:alert(1)", -1),
    ]
    [batch] = known.pipelines[0].of_kind("batch")
    pipeline = replace(known.pipelines[0], tasks=[process, replace(batch, links=links)])
    monkeypatch.setattr(run_page, "tasks_of_run", lambda *_: replace(known, pipelines=[pipeline]))

    html = site.browser("VIEWER").get(PAGE).text

    # One in the table of stages, and one at each of nine batches
    assert html.count('href="https://history.test/app"') == 10
    assert "javascript:" not in html
    assert 'href="/dags/sums/runs/manual__1/tasks/process/mapped/0?try_number=1"' in html
    assert 'href="/dags/sums/runs/manual__1/tasks/batch.default?try_number=1"' in html


def test_foreign_text_is_escaped(site):
    run = Run(site.staging.parent, numbers=range(20))
    run.all()
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    report = json.loads(run.staged.files.read("report.json"))
    report["failed_tasks"] = [evil]
    run.staged.files.replace("report.json", json.dumps(report))

    html = site.browser("VIEWER").get(PAGE).text
    page = site.browser("USER").get(f"{PAGE}/message", params={"q": evil}).text

    for text in (html, page):
        assert "<script>alert" not in text
        assert "<img" not in text
        assert "&lt;script&gt;" in text


@pytest.mark.parametrize("dag_id", ["..", "../..", "%2e%2e", "a%2fb", "..%2f..%2fetc"])
def test_no_path_outside_the_staging_root_is_read(site, dag_id, tmp_path):
    (tmp_path / "report.json").write_text('{"secret": 1}')

    answer = site.browser("VIEWER").get(f"/broadway/dags/{dag_id}/runs/..%2f..")

    assert answer.status_code == 404
    assert "secret" not in answer.text


def test_damaged_files_are_one_sentence(site, run):
    run.process()
    [record] = run.staged.generations()
    run.staged.files.replace(f"generations/{record.generation}.json", "{")

    answer = site.browser("VIEWER").get(PAGE)

    assert answer.status_code == 503
    assert "is damaged" in answer.text


# -- where is my message ---------------------------------------------------------------------------


def ids(run: Run) -> Mapping[int, str]:
    return {call.number: call.message_id for call in run.calls()}


def test_successful_message_shows_its_history(site, settled):
    text = shown(site, f"{PAGE}/message?q={ids(settled)[11]}", "USER")

    assert "received by process[0]" in text
    assert "handled, and staged for the batcher default" in text
    assert re.search(r"in batch \w+: succeeded", text)
    assert "settled: ack" in text
    assert "Data that handle_message returned, 2 B, as JSON 11" in text


def test_failed_message_shows_reason_and_settlement(site, settled):
    text = shown(site, f"{PAGE}/message?q={ids(settled)[5]}", "USER")

    assert re.search(r"in batch \w+: failed \S+ \S+ five settled", text)
    assert "settled: dead_letter" in text


def test_settlement_time_of_a_message_is_a_timestamp(site, settled):
    answer = site.browser("VIEWER").get(f"{PAGE}/message?q={ids(settled)[11]}")

    assert re.search(r'settled: ack <span class="soft"><time datetime="[^"]+"[^>]*>', answer.text)
    assert "settled at" not in answer.text


def test_viewer_finds_by_id_without_payload_or_text_search(site, settled):
    by_id = shown(site, f"{PAGE}/message?q={ids(settled)[11]}")
    by_text = shown(site, f"{PAGE}/message?q=11")

    assert "received by process[0]" in by_id
    assert "as JSON" not in by_id
    assert "Messages with this text" not in by_text
    assert "This run has not received it" in by_text


def test_editor_finds_messages_by_text(site, settled):
    text = shown(site, f"{PAGE}/message?q=83", "USER")

    assert "Messages with this text" in text
    assert ids(settled)[83] in text


def test_message_is_found_in_other_runs(site, settled):
    other = Run(site.staging.parent, "manual__2")
    other.send(range(3))
    other.process()

    here = shown(site, f"/broadway/dags/sums/runs/manual__2/message?q={ids(settled)[11]}")
    all_runs = f"/broadway/dags/sums/runs/manual__2/message?q={ids(settled)[11]}&everywhere=1"

    assert "This run has not received it" in here
    assert "run manual__1" in shown(site, all_runs)


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("text", [False, True])
def test_missing_or_linked_message_file_is_one_sentence(site, run, tmp_path, planted, text):
    # Given a run of which the file with a message's data is gone, or is a link to a file elsewhere
    run.all()
    for file in site.staging.rglob("*.parquet"):
        if planted:
            shutil.copy(file, tmp_path / file.name)
            file.unlink()
            file.symlink_to(tmp_path / file.name)
        else:
            file.unlink()
    q = "83" if text else ids(run)[83]

    answer = site.browser("USER").get(f"{PAGE}/message?q={q}")

    assert answer.status_code == 503
    link, gone = "by a symbolic link: remove the link", "was deleted from the staging folder"
    assert (link if planted else gone) in text_of(answer.text)
    assert site.browser("VIEWER").get(f"{PAGE}/message?q={q}").status_code != 500


def entries() -> list[tuple[str, str, str | None, Any]]:
    with create_session() as session:
        logs = session.scalars(select(Log).where(Log.dag_id == "sums")).all()
        return [(e.event, str(e.owner), e.run_id, json.loads(e.extra or "")) for e in logs]


def test_payload_access_is_audited_before_it_is_shown(site, run, monkeypatch):
    with create_session() as session:
        session.execute(delete(Log).where(Log.dag_id == "sums"))
    run.all()
    by_id = ids(run)[11]
    seen: list[int] = []
    find = message_page._search

    def search(*args, **kwargs):
        seen.append(len(entries()))
        return find(*args, **kwargs)

    monkeypatch.setattr(message_page, "_search", search)

    # A viewer sees no payload, and an empty box asks for none
    shown(site, f"{PAGE}/message?q={by_id}")
    shown(site, f"{PAGE}/message", "USER")
    assert (entries(), seen) == ([], [0, 0])

    shown(site, f"{PAGE}/message?q={by_id}", "USER")
    shown(site, f"{PAGE}/message?q=83&everywhere=1", "USER")

    assert seen == [0, 0, 1, 2]
    assert entries() == [
        ("broadway_message_show", "user", "manual__1", {"q": by_id, "everywhere": False}),
        ("broadway_message_show", "user", "manual__1", {"q": "83", "everywhere": True}),
    ]


def test_no_payload_is_shown_without_audit_log(site, settled, monkeypatch):
    locked = OperationalError("insert", {}, Exception("database is locked"))
    monkeypatch.setattr(access, "create_session", mock.Mock(side_effect=locked))
    answer = site.browser("USER").get(f"{PAGE}/message?q={ids(settled)[11]}")

    assert answer.status_code == 503
    assert "audit log cannot be written" in answer.text
    assert "as JSON" not in answer.text


# -- a page that does not contradict itself --------------------------------------------------------


class Numbered(PlainSums):
    """Fails all messages, with their numbers as reasons."""

    name = "Sums"

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.failed(f"no order {int(message.data)} in shop 7")


def test_failures_while_receiving_are_shown(site, run, monkeypatch):
    dies(run.process, BEFORE_PUBLISHING)
    counts(run, received=100, failed=29, staged=71)
    airflow(monkeypatch, "running", process=["running"], batch_default="none", ack="deferred")

    answer = site.browser("VIEWER").get(PAGE)
    text = text_of(answer.text)

    assert "None has." not in text
    assert "29 have failed in tasks that still receive" in text
    # and nothing is green before anything has succeeded
    assert "is-good" not in answer.text


def test_run_without_success_is_not_green(site, monkeypatch):
    run = Run(site.staging.parent, pipeline=Numbered, numbers=range(30))
    run.process()
    run.ack()
    airflow(monkeypatch, "success", process=["success", "success"], ack="success")

    answer = site.browser("VIEWER").get(PAGE)
    text = text_of(answer.text)

    assert "Sums needs a look" in text
    assert '<span class="state is-good">balanced' not in answer.text
    assert '<g class="stage is-good">' not in answer.text
    assert "all failed" in text
    assert 'is-good"><b>0</b>' not in answer.text
    # Airflow's own states are words, too
    assert "done all 2" in text
    assert "2 success" not in text


def test_reasons_differing_in_numbers_are_one(site):
    run = Run(site.staging.parent, pipeline=Numbered, numbers=range(30))
    run.process()
    report = run.ack()

    assert "30 process no order … in shop … dead-lettered" in shown(site)
    [reason] = report["reasons"]
    assert (reason["count"], reason["stage"]) == (30, "process")
    assert (reason["reason"], reason["classes"]) == ("no order … in shop …", {"dead_lettered": 30})


def test_batch_with_different_failures_refers_to_the_reasons(site):
    Run(site.staging.parent, numbers=range(5, 100, 5)).all()

    text = shown(site)

    assert "failed by message: see “Why messages failed”" in text


def test_dead_generation_is_marked_dead(site, run, monkeypatch):
    dies(run.process, BEFORE_PUBLISHING)
    airflow(monkeypatch, "running", process=["failed"], batch_default="none", ack="deferred")
    assert "Sums receives" not in shown(site)

    run.batch(run.process(try_number=2))
    run.ack()

    text = shown(site)
    assert re.search(r"dead(; 100 messages released| before it published anything)", text)
    assert text.count(" settled ") == 1


def test_unstaged_text_leads_to_the_dead_letters(site, settled):
    answer = site.browser("USER").get(f"{PAGE}/message?q=nowhere")

    assert 'href="/broadway/dags/sums/pipelines/Sums/dead-letters">Sums</a>' in answer.text
