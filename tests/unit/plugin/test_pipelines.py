"""The pipelines' page: warnings first, backlogs, and the rights of users."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from airflow.api_fastapi.app import get_auth_manager

from airflow_broadway import Batcher, Broadway
from airflow_broadway.adapters.staging import open_store
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.plugin import depths, standings
from airflow_broadway.plugin.children import Answer, ChildError
from airflow_broadway.plugin.declared import Declared
from airflow_broadway.plugin.pages import pipelines
from airflow_broadway.plugin.standings import LOOKED, PER_PAGE, SHOWN, LatestRun
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.runs.backlog.queues import WatchedQueues
from airflow_broadway.runs.backlog.reports import BacklogReport, PipelineKey, report_backlog
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.testing.clock import ManualClock
from tests.disk_calls import counted
from tests.unit.plugin.dags import add_runs, stored_dags
from tests.unit.plugin.site import Site

NOW = datetime.now(UTC)


class Orders(Broadway):
    producer = SqliteProducer(queue="orders", path="/tmp/orders.db", concurrency=2)
    batchers = {"late": Batcher(engine="python")}

    def handle_message(self, processor: str, message: Any, context: Any) -> Any:
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


class FakeChildren:
    """Answers for brokers."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.error = ""
        self.overrides: dict[str, Any] = {}

    async def ask(self, question: dict[str, Any]) -> Answer:
        self.requests.append(question)
        if self.error:
            raise ChildError(self.error)
        depth: Any = {"ready": 1234, "delayed": 0, "leased": 0, "dead": 7, "oldest_age": 90.0}
        depth |= {"unknown": "", **self.overrides}
        queues = question["queues"]
        answer = [{"reference": queue["key"], **depth} for queue in queues]
        return Answer(answer, datetime.now(UTC))


@pytest.fixture
def children(monkeypatch):
    fake = FakeChildren()
    monkeypatch.setenv("AIRFLOW__BROADWAY__ASK_BROKERS", "True")
    monkeypatch.setattr(pipelines, "DEPTHS", depths.Depths(fake))  # type: ignore[arg-type]
    return fake


class World:
    """Dags with pipelines, their runs and reports."""

    def __init__(self, site: Site, stack: ExitStack) -> None:
        self.site = site
        self._dags = stack.enter_context(stored_dags())

    def dag(self, dag_id: str, runs: Mapping[str, str] | None = None, **arguments: Any) -> None:
        dag = Orders(**arguments.pop("options", {})).dag(dag_id, **arguments)
        self._dags(dag)
        add_runs(dag_id, runs or {})

    def report(self, dag_id: str, run_id: str, *, root: str = "", **fields: Any) -> None:
        began = (NOW - timedelta(minutes=2)).isoformat()
        report = {
            "totals": {"received": 60, "acked": 57, "dead_lettered": 3, "failed": 3, "lapsed": 0}
            | {"settle_failed": 0},
            "generations": [{"started_at": began, "received": 60, "waited": 42.0}],
            "balanced": True,
            "at": NOW.isoformat(),
            **fields,
        }
        store = open_store(root or self.site.staging.as_uri())
        run = StagedRun(store, pipeline="Orders", dag_id=dag_id, run_id=run_id)
        run.files.replace("report.json", json.dumps(report))

    def backlog(self, dag_id: str, *, root: str = "", at: datetime = NOW, **depth: Any) -> None:
        """The report of a pipeline's last run on its queue."""
        counts = {"ready": 5, "delayed": 0, "leased": 0, "dead": 2, "oldest_age": 60.0, **depth}
        store = open_store(root or self.site.staging.as_uri())
        queues = WatchedQueues("Orders", [Orders.producer])
        report_backlog(store, dag_id, queues, QueueDepth(**counts), at=at, by="run r1")

    def page(self, address: str = "/broadway/", role: str = "VIEWER") -> str:
        answer = self.site.browser(role).get(address)
        assert answer.status_code == 200, answer.text
        return str(answer.text)

    def order(self, address: str = "/broadway/") -> list[str]:
        """The Dags in the order of the page."""
        return re.findall(r'target="_top">(\w+)</a></h2>', self.page(address))


@pytest.fixture
def world(site, children, monkeypatch):
    with ExitStack() as stack:
        yield World(site, stack)


# -- rights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/broadway/", "/broadway/pipelines"])
def test_anonymous_sees_no_pipeline(world, path):
    world.dag("secret_dag")

    answer = world.site.browser().get(path)

    assert answer.status_code == 401
    assert "secret_dag" not in answer.text


@pytest.mark.parametrize("right", ["dags", "runs"])
def test_unreadable_dag_is_hidden_and_not_queried(world, children, monkeypatch, right):
    world.dag("seen_dag", {"r1": "success"})
    world.dag("secret_dag", {"r1": "success"})
    manager = type(get_auth_manager())
    if right == "dags":
        dag_ids = manager.get_authorized_dag_ids
        monkeypatch.setattr(
            manager, "get_authorized_dag_ids", lambda *a, **kw: dag_ids(*a, **kw) - {"secret_dag"}
        )
    else:
        allowed = manager.is_authorized_dag
        monkeypatch.setattr(
            manager,
            "is_authorized_dag",
            lambda self, *, details=None, **rest: (
                not (rest.get("access_entity") and details and details.id == "secret_dag")
                and allowed(self, details=details, **rest)
            ),
        )

    for path in ("/broadway/", "/broadway/pipelines", "/broadway/?q=secret", "/broadway/?page=2"):
        assert "secret_dag" not in world.page(path).replace('value="secret"', "")
    assert "seen_dag" in world.page()


# -- content ---------------------------------------------------------------------------------------


def test_pipeline_is_shown_with_stages_runs_and_charts(world, children):
    world.dag("shop", {"r1": "success", "r2": "success", "r3": "running"})
    world.report("shop", "r1")
    world.report("shop", "r2", generations=[])

    text = world.page()

    assert "sqlite → process × 2 → late (Python) → settled" in re.sub(r"<[^>]+>", "", text)
    assert 'href="/broadway/dags/shop/runs/r3"' in text
    assert 'href="/dags/shop" target="_top"' in text
    assert "at work" in text
    assert (
        'aria-label="Messages per minute of the last 2 runs: newest not known, lowest 30, highest'
        ' 30, not known of 1."' in text
    )
    assert "<title>r1: 42 s</title>" in text
    # Each chart with a known value has an axis
    axis = '<span class="axis soft" aria-hidden="true"><span>0 to {}</span>'
    assert axis.format("30") in text
    assert axis.format("42 s") in text
    assert children.requests == []  # only once the page is shown


def test_dag_without_runs_shows_its_pipelines(world):
    world.dag("unborn")

    text = world.page()

    assert "never ran" in text
    assert "<svg" not in text


def test_brokers_are_queried_in_one_child_after_the_page(world, children):
    world.dag("shop_a")
    world.dag("shop_b")
    world.dag("unborn")
    for dag_id in ("shop_a", "shop_b"):
        world.backlog(dag_id)
    first = world.page()
    assert first.count("unknown: no run, trigger or sensor has reported it yet") == 1
    assert first.count("reported by run r1") == 2
    assert 'data-pause="30000" data-now' in first

    text = world.page("/broadway/pipelines?page=1&q=")

    assert "<html" not in text
    assert text.count("1\N{NARROW NO-BREAK SPACE}234") == 2
    assert "1 min 30 s" in text
    assert 'href="/broadway/dags/shop_a/pipelines/Orders/dead-letters"' in text
    [request] = children.requests
    assert (request["ask"], request["seconds"], len(request["queues"])) == ("depth", 15.0, 2)
    # It is kept for the next page, and works without a script.
    assert "reported by run r1" not in world.page()
    assert "1\N{NARROW NO-BREAK SPACE}234" in world.page("/broadway/?ask=true")


def test_report_is_shown_with_its_time_and_no_broker_is_queried(world, children, monkeypatch):
    monkeypatch.delenv("AIRFLOW__BROADWAY__ASK_BROKERS")
    world.dag("shop")
    at = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
    world.backlog("shop", at=at, ready=4321, dead=150, oldest_age=7_200.0)

    for path in ("/broadway/", "/broadway/?ask=true", "/broadway/pipelines"):
        text = world.page(path)
        assert "4\N{NARROW NO-BREAK SPACE}321" in text
        as_of = text.split("<dt>As of</dt>", 1)[1]
        assert '<time datetime="2026-01-31T12:30:00+00:00"' in as_of[:80]
        assert "reported by run r1" in as_of
        assert "150 dead letters lie at the broker (as of 2026-01-31 12:30 UTC)." in text
        assert "had waited for 2.0 h (as of 2026-01-31 12:30 UTC)." in text
        assert "aria-busy" not in text
    assert children.requests == []


def test_damaged_report_hides_no_other_pipeline(world):
    world.dag("damaged")
    world.dag("whole")
    world.backlog("damaged")
    world.backlog("whole")
    [file] = (world.site.staging / "Orders" / "damaged").glob("_*.json")
    file.write_text("nonsense")

    text = world.page(role="USER")

    assert "_backlog.json is damaged" in text
    assert text.count("reported by run r1") == 1


@pytest.mark.parametrize(
    ("error", "overrides", "text"),
    [
        ("the broker did not answer", {}, "unknown: the broker did not"),
        (
            "",
            {"ready": None, "dead": None, "unknown": "no module <shop>"},
            "no module &lt;shop&gt;",
        ),
        ("", {"oldest_age": None}, "unknown: not reported by the broker"),
    ],
)
def test_unknown_figures_have_a_reason_and_are_never_zero(world, children, error, overrides, text):
    world.dag("shop")
    world.backlog("shop")
    children.error, children.overrides = error, overrides

    page = world.page("/broadway/pipelines", "USER")

    assert text in page
    assert not re.search(r"<dt>(Waiting|Oldest|Dead)</dt><dd>(<a[^>]*>)?0", page)
    # The reason may name hosts and files
    if error or "unknown" in overrides:
        page = world.page("/broadway/pipelines", "VIEWER")
        assert text not in page
        assert "unknown: those who may edit the runs of this Dag see why" in page


def test_reported_figure_is_shown_where_options_are_withheld(world, children):
    world.dag("shop")
    world.backlog("shop", ready=4321)
    [file] = (world.site.staging / "Orders" / "shop").glob("_*.json")
    withheld = {"queues": "", "withheld": "an option is a secret"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **withheld}))

    text = world.page("/broadway/pipelines", "USER")

    assert "4\N{NARROW NO-BREAK SPACE}321" in text
    assert "reported by run r1" in text
    assert children.requests == []


def test_pipeline_with_its_own_root_is_read_there(world, children, tmp_path):
    (tmp_path / "own").mkdir()
    own = (tmp_path / "own").as_uri()
    world.dag("own", {"r1": "success"}, staging=own)
    world.dag("templated", {"r1": "success"}, staging="file:///{{ var.value.root }}")
    world.report("own", "r1", root=own)
    world.backlog("own", root=own)
    world.report("templated", "r1")

    text = world.page("/broadway/pipelines")

    assert text.count("<svg") == 4
    assert text.count("Its staging root is a template") == 1
    [request] = children.requests
    assert [queue["staging"] for queue in request["queues"]] == [own]


# -- the order -------------------------------------------------------------------------------------


def test_pipelines_needing_attention_come_first_with_the_reason(world, children):
    world.dag("a_fine", {"r1": "success"})
    world.report("a_fine", "r1")
    world.dag("b_idle")
    world.dag("c_busy", {"r1": "running"})
    world.dag("d_many_dead", {"r1": "success"})
    totals = {"received": 5_000, "acked": 4_000, "dead_lettered": 150, "failed": 150}
    world.report("d_many_dead", "r1", totals={**totals, "lapsed": 0, "settle_failed": 0})
    world.dag("e_failed", {"r1": "success", "r2": "failed"})
    world.report("e_failed", "r1")
    world.dag("f_unbalanced", {"r1": "failed", "r2": "success"})
    world.report("f_unbalanced", "r1", balanced=False)
    world.report("f_unbalanced", "r2")

    order = ["e_failed", "f_unbalanced", "d_many_dead", "c_busy", "a_fine", "b_idle"]
    assert world.order() == order
    text = world.page()
    assert "The last run failed, and was not accounted for." in text
    assert "The run r1 does not balance." in text
    assert "150 messages of the last run became dead letters." in text

    # And by the depths that brokers report, also the next time
    world.backlog("a_fine")
    children.overrides = {"oldest_age": 7_200.0}
    text = world.page("/broadway/pipelines?q=a_fine")
    assert "The oldest message had waited for 2.0 h (as of" in text
    children.overrides = {}
    assert world.order().index("a_fine") < world.order().index("c_busy")


def test_dry_run_is_marked_and_hides_no_earlier_run(world):
    empty = dict.fromkeys(("received", "acked", "dead_lettered", "failed", "lapsed"), 0)
    totals = {**empty, "settle_failed": 0}
    dry: dict[str, Any] = {"totals": totals, "generations": [], "look": {"messages": 5}}
    world.dag("shop", {"r1": "failed", "r2": "success"})
    world.report("shop", "r1")
    world.report("shop", "r2", **dry)
    world.dag("only_dry", {"r1": "success"})
    world.report("only_dry", "r1", **dry)

    text = world.page("/broadway/?q=shop")

    assert "A task of the last run failed." in text
    assert "dry run: nothing was received" in text
    assert 'aria-label="Messages per minute of the last run: newest 30' in text
    assert text.count("<svg") == 4
    assert "<svg" not in world.page("/broadway/?q=only_dry")


def test_damaged_file_hides_no_other_pipeline(world, tmp_path):
    world.dag("damaged", {"r1": "running"})
    world.dag("whole", {"r1": "success"})
    world.report("whole", "r1")
    store = open_store(world.site.staging.as_uri())
    run = StagedRun(store, pipeline="Orders", dag_id="damaged", run_id="r1")
    path = tmp_path / "queue.db"
    SqliteQueue(path, "orders").create()
    lease = (
        SqliteProducer(queue="orders", path=str(path))
        .source(ProducerEnv(generation="0" * 32))
        .lease
    )
    record = run.open_generation(task_id="t", map_index=0, try_number=1, lease=lease)
    run.files.replace(f"{record.generation}/manifest.json", "nonsense")

    text = world.page()

    assert world.order() == ["damaged", "whole"]
    assert "manifest.json is damaged" in text


def test_before_the_first_run_nothing_is_missing(world):
    world.dag("shop")
    world.site.staging.rmdir()

    text = world.page()

    assert "No run has begun yet." in text
    assert world.site.staging.as_uri() not in text
    assert "is-warn" not in text


def test_chart_is_labelled_with_its_range(world):
    world.dag("shop", {"r1": "success", "r2": "success"})
    world.report("shop", "r1")
    world.report("shop", "r2")

    text = re.sub(r"<[^>]+>", " ", world.page())

    assert "0 to 42 s  newest at the right" in text


def test_missing_staging_root_is_explained(world):
    world.dag("shop", {"r1": "success"})
    world.site.staging.rmdir()

    answer = world.site.browser("VIEWER").get("/broadway/")

    assert f"The staging folder {world.site.staging.as_uri()} does not exist" in answer.text
    assert "on the API server: either no run has begun yet" in answer.text
    assert "then set `[broadway] staging`, here and there" in answer.text
    assert "--staging" not in answer.text
    assert "Traceback" not in answer.text


# -- many ------------------------------------------------------------------------------------------


def test_many_dags_and_runs_cost_a_bounded_number_of_reads(world, monkeypatch):
    # Two hundred Dags; the newest runs are read only for the Dags of the page
    declared = [Declared(dag_id=f"dag_{n:03}", name="Orders", path="a:B") for n in range(200)]
    wanted: list[int] = []

    def latest(dag_ids, most):
        wanted.append(len(dag_ids) * most)
        newest = [LatestRun(f"run_{n}", "success") for n in range(1_000, 1_000 - most, -1)]
        return dict.fromkeys(dag_ids, newest)

    monkeypatch.setattr(pipelines, "declared_pipelines", lambda: declared)
    monkeypatch.setattr(pipelines, "readable_dags", lambda _, dag_ids: set(dag_ids))
    monkeypatch.setattr(standings, "latest_runs", latest)
    reads, lists = counted(monkeypatch, "read"), counted(monkeypatch, "list")

    text = world.page("/broadway/?page=2")

    assert f"Page 2 of {200 // PER_PAGE}, 200 pipelines" in text
    assert text.count("<article") == PER_PAGE
    assert wanted == [200 * LOOKED, PER_PAGE * SHOWN]
    assert len(reads) == 200 * (LOOKED + 1) + PER_PAGE * (SHOWN - LOOKED)
    assert len(lists) == 200


def test_only_brokers_of_shown_pipelines_are_queried(world, children, monkeypatch):
    dag_ids = [f"dag_{n:03}" for n in range(2 * PER_PAGE + 5)]
    declared = [Declared(dag_id=dag_id, name="Orders", path="a:B") for dag_id in dag_ids]
    for dag_id in dag_ids:
        world.backlog(dag_id)
    monkeypatch.setattr(pipelines, "declared_pipelines", lambda: declared)
    monkeypatch.setattr(pipelines, "readable_dags", lambda _, dag_ids: set(dag_ids))

    world.page("/broadway/pipelines?page=2")
    world.page("/broadway/?ask=true&q=dag_003")

    assert [len(request["queues"]) for request in children.requests] == [PER_PAGE, 1]


def test_depth_is_cached_for_a_minute(children):
    clock = ManualClock(datetime.now(UTC))
    cache = depths.Depths(children, clock)
    key = PipelineKey("Orders", "d")
    report = BacklogReport(at=NOW, by="run r", depth=None, queues="{}")

    asyncio.run(cache.ask([(None, key, report)]))

    clock.advance(50.0)
    assert cache.recall(None, key) is not None
    clock.advance(20.0)
    assert cache.recall(None, key) is None


def test_unknown_pages_and_names_are_pages(world):
    world.dag("shop")

    assert world.order("/broadway/?page=99") == ["shop"]
    assert "has “&lt;script&gt;” in its name" in world.page("/broadway/?q=<script>")
    assert world.order("/broadway/?q=SHO") == ["shop"]
    assert world.site.browser("VIEWER").get("/broadway/?page=x").status_code < 500
