"""The campaigns of a broker: its pipelines, and the number of cases of each."""

from __future__ import annotations

import multiprocessing
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

from airflow_broadway.testing.crashes.account import Account, Violation
from airflow_broadway.testing.crashes.campaign import Campaign, Totals, UnsoundPipeline
from airflow_broadway.testing.crashes.case import Case, Result
from airflow_broadway.testing.crashes.points import Fault, Injection
from airflow_broadway.testing.crashes.spark import uses_spark, warm_spark
from airflow_broadway.testing.crashes.subject import Subject
from tests.crashes.checks import check_archive, check_order
from tests.crashes.pipelines import (
    PIPELINES,
    Commits,
    CommitsToIceberg,
    CommitsToPostgres,
    CrashPipeline,
    ReplacesInDelta,
)
from tests.crashes.sinks import has_postgresql, postgresql
from tests.crashes.subjects import SUBJECTS, MakeSubject

NEED_POSTGRESQL = (CommitsToIceberg, CommitsToPostgres)
MESSAGES = [b"%d" % number for number in range(12)]

#: A case on Spark takes seconds.  So faults are injected only into Spark's tasks and the batcher
#: next to it, and only into this share of the requested cases.
_SPARK_TASKS, _SPARK_SHARE = ("spark", "driver", "batch.small"), 0.2


#: Default share of a broker's cases.  A pipeline has about 6,000 cases of 1 to 3 CPU seconds each;
#: with staging in a bucket, 5 s.  All brokers together take half an hour on two CPUs, and nightly
#: campaigns reach every point within two months.
SHARES = {
    "kafka": 0.0015,
    "kafka key": 0.0015,
    "pubsub": 0.0015,
    "pubsub ordered": 0.0015,
    "rabbitmq": 0.0024,
    "sqlite by operators": 0.003,
    "sqlite on s3": 0.001,
    "sqlite rerun": 0.004,
    "sqs": 0.0015,
    "sqs fifo": 0.0015,
    "sqlite backfill": 0.003,
    "sqlite letters": 0.012,
    "kafka letters": 0.004,
    "pubsub letters": 0.006,
    "rabbitmq letters": 0.004,
    "sqs letters": 0.006,
}
#: Subjects with fewer pipelines than the others.
_REFILLED = ["batches", "two batchers", "no batchers", "acks immediately", "holds failed"]
_REPLACED = ["refills", "replaces in delta"]
_ONLY: dict[str, list[str]] = {
    "sqlite backfill": [*_REFILLED, *_REPLACED],
    **{name: ["batches"] for name in SUBJECTS if name.endswith(" letters")},
}
#: Only the first task requeues dead letters.
_LETTER_TASKS = ("process",)


class Plan(NamedTuple):
    """The cases to run for a pipeline.

    :param share: The share of the cases of each family except pairs, 0 to 1.
    :param pairs: The number of cases with two faults.
    :param restarts: The number of broker restarts, which have separate totals.
    :param tasks: The tasks that get the first fault; all if empty.
    """

    pipeline: str
    share: float
    pairs: int
    restarts: int = 0
    tasks: Collection[str] = ()


def pipeline_names(broker: str) -> list[str]:
    """Returns the names of a broker's pipelines; Spark pipelines only run over SQLite."""
    if broker in _ONLY:
        return _ONLY[broker]
    spark = broker in ("sqlite", "sqlite by operators")
    batches = broker == "sqlite rerun"  # only batches can be rerun
    return [
        name
        for name, item in PIPELINES.items()
        if (spark or not uses_spark(item))
        and not (item in NEED_POSTGRESQL and not has_postgresql())
        and not (batches and _has_no_batches(item))
        and name not in _REPLACED
    ]


def _has_no_batches(pipeline: type[CrashPipeline]) -> bool:
    return pipeline.unstaged or not pipeline.batchers


#: Shares and pairs over the embedded queue.  A point has about 19 cases, and every point gets one
#: case before any gets a second one: a share of 0.055 reaches every point.
_EMBEDDED = {
    "batches": (0.055, 20),
    "no batchers": (0.055, 10),
    "commits": (0.05, 20),
    "commits to delta": (0.05, 20),
    "commits to iceberg": (0.02, 10),
    "commits to postgres": (0.05, 20),
}


def default_plans(broker: str) -> list[Plan]:
    """Returns the default plans of a broker, which take minutes."""
    if broker != "sqlite":
        tasks = _LETTER_TASKS if broker.endswith(" letters") else ()
        return [Plan(name, SHARES[broker], 2, tasks=tasks) for name in pipeline_names(broker)]
    default = {True: (0.15, 0), False: (0.012, 6)}
    return [
        Plan(name, *_EMBEDDED.get(name, default[uses_spark(PIPELINES[name])]))
        for name in pipeline_names(broker)
    ]


def memory_folder() -> str | None:
    """Returns a folder in memory; ``None`` if the system has none."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def campaigns(
    broker: str, plans: list[Plan], *, jobs: int, seed: int = 1, only: str = ""
) -> Iterator[tuple[Plan, list[Totals]]]:
    """Runs each plan over a broker and yields its totals; failed cases keep their files.

    With few cases per pipeline, the sequential runs without faults take most of the time, so
    pipelines run concurrently.  Not with restarts, because all pipelines share the broker.

    :param jobs: The number of concurrent processes.
    :param only: Run only this case, as printed in reports.
    """
    concurrent = (
        jobs > 1
        and len(plans) > 1
        and broker != "sqlite"
        and not any(plan.restarts for plan in plans)
    )
    needs_postgresql = any(PIPELINES[plan.pipeline] in NEED_POSTGRESQL for plan in plans)
    with SUBJECTS[broker]() as make, postgresql() if needs_postgresql else nullcontext():
        run_plan = partial(_run_plan, make, jobs=1 if concurrent else jobs, seed=seed, only=only)
        if not concurrent:
            yield from map(run_plan, plans)
            return
        _plan_runners.append(run_plan)  # inherited by the forked workers
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            yield from pool.imap(_run_in_worker, plans)


#: The function that this process's workers call with a plan.
_plan_runners: list[Callable[[Plan], tuple[Plan, list[Totals]]]] = []


def _run_in_worker(plan: Plan) -> tuple[Plan, list[Totals]]:
    return _plan_runners[-1](plan)


def _run_plan(
    make: MakeSubject, plan: Plan, *, jobs: int, seed: int, only: str
) -> tuple[Plan, list[Totals]]:
    """Runs a plan; returns it with its totals, separately for restarts."""
    pipeline = PIPELINES[plan.pipeline]
    folder = Path(tempfile.mkdtemp(prefix="crashes-", dir=memory_folder()))
    campaign = Campaign(partial(configure_subject, make, pipeline), MESSAGES, folder)
    spark = uses_spark(pipeline)
    with warm_spark() if spark else nullcontext():
        try:
            cases = [campaign.parse_case(only)] if only else _cases(campaign, plan, spark, seed)
        except UnsoundPipeline as error:  # continue with the other pipelines
            return plan, [_unsound(error)]
        result = [campaign.run_cases(cases, jobs=jobs)]
        if plan.restarts:
            result.append(campaign.run_cases(_restarts(campaign, plan.restarts, seed)))
    if not any(folder.iterdir()):
        folder.rmdir()
    return plan, result


def _cases(campaign: Campaign, plan: Plan, spark: bool, seed: int) -> list[Case]:
    factor = _SPARK_SHARE if spark else 1.0
    return campaign.cases(
        PIPELINES[plan.pipeline].families,
        share=plan.share * factor,
        pairs=round(plan.pairs * factor),
        seed=seed,
        tasks=_SPARK_TASKS if spark else plan.tasks,
    )


def _restarts(campaign: Campaign, count: int, seed: int) -> list[Case]:
    """Returns cases with broker restarts; they run one at a time, because all share the broker."""
    points = [point for point in campaign.baseline().points[0] if point.traits.changes]
    sample = random.Random(seed).sample(points, min(count, len(points)))
    return [Case((Injection(point, Fault.BROKER_RESTARTS),)) for point in sample]


def _unsound(error: UnsoundPipeline) -> Totals:
    """Returns the totals of a pipeline that fails without faults."""
    account = Account(violations={Violation.OTHER: [str(error)]})
    failure = Result(Case(), account, [], error.log or Path())
    return Totals(parts={("", ""): Counter(other=1)}, failures=[failure])


def configure_subject(make: MakeSubject, pipeline: type[CrashPipeline], folder: Path) -> Subject:
    """Creates a subject, configured by its pipeline's attributes."""
    subject = make(pipeline, folder)
    subject.hold_failed, subject.unstaged = pipeline.hold_failed, pipeline.unstaged
    subject.exclusive = issubclass(pipeline, ReplacesInDelta)
    subject.checks = check_archive, check_order
    if issubclass(pipeline, Commits):
        pipeline.sink_class(subject).attach()
    return subject
