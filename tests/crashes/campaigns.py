"""The campaigns of a broker: which pipelines are struck, how often, and by what."""

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
from airflow_broadway.testing.crashes.campaign import Campaign, Sums, UnsoundPipeline
from airflow_broadway.testing.crashes.case import Case, Result
from airflow_broadway.testing.crashes.points import Fault, Strike
from airflow_broadway.testing.crashes.spark import uses_spark, warm_spark
from airflow_broadway.testing.crashes.subject import Subject
from tests.crashes.checks import check_archive, check_order
from tests.crashes.pipelines import (
    PIPELINES,
    Commits,
    CommitsToIceberg,
    CommitsToPostgres,
    ReplacesInDelta,
    Struck,
)
from tests.crashes.subjects import SUBJECTS, MakeSubject
from tests.crashes.subjects_sinks import has_postgresql, postgresql

NEED_POSTGRESQL = (CommitsToIceberg, CommitsToPostgres)
MESSAGES = [b"%d" % number for number in range(12)]

#: A case on Spark takes seconds.  So only its own tasks are struck, and those of the batcher next
#: it, for the others are as with batches in Python; and of what is asked for only this share.
_SPARK_TASKS, _SPARK_SHARE = ("spark", "driver", "batch.small"), 0.2


#: The share of a broker's cases that is struck by default.  A pipeline has 6,000 cases, of 1 to 3 s
#: of a processor each, in a bucket 5 s.  So all brokers together have half an hour of two
#: processors, and every point has had its turn within two months of nights.
SHARES = {
    "kafka": 0.0015,
    "kafka key": 0.0015,
    "pubsub": 0.0015,
    "pubsub ordered": 0.0015,
    "rabbitmq": 0.0024,
    "sqlite by operators": 0.003,
    "sqlite on s3": 0.001,
    "sqlite past run": 0.004,
    "sqs": 0.0015,
    "sqs fifo": 0.0015,
    "sqlite backfill": 0.003,
    "sqlite letters": 0.012,
    "kafka letters": 0.004,
    "pubsub letters": 0.006,
    "rabbitmq letters": 0.004,
    "sqs letters": 0.006,
}
#: The pipelines of subjects for which some stand for all.
_REFILLED = ["batches", "two batchers", "no batchers", "at once", "holds failed"]
_REPLACED = ["refills", "replaces in delta"]
_ONLY: dict[str, list[str]] = {
    "sqlite backfill": [*_REFILLED, *_REPLACED],
    **{name: ["batches"] for name in SUBJECTS if name.endswith(" letters")},
}
#: Letters are sent back by the first task of a run; the others are as in any.
_LETTER_TASKS = ("process",)


class Plan(NamedTuple):
    """How much of a pipeline is struck.

    :param share: Of the cases of each family but pairs, 0 to 1.
    :param pairs: How many pairs.
    :param restarts: How many points at which the broker restarts; they are summed up by themselves.
    :param tasks: Only these are struck first; all unless given.
    """

    pipeline: str
    share: float
    pairs: int
    restarts: int = 0
    tasks: Collection[str] = ()


def pipelines_of(broker: str) -> list[str]:
    """The pipelines that are struck over a broker: those on Spark, which never see it, over one."""
    if broker in _ONLY:
        return _ONLY[broker]
    spark = broker in ("sqlite", "sqlite by operators")
    batches = broker == "sqlite past run"  # a past run is its batches
    return [
        name
        for name, item in PIPELINES.items()
        if (spark or not uses_spark(item))
        and not (item in NEED_POSTGRESQL and not has_postgresql())
        and not (batches and _has_no_batches(item))
        and name not in _REPLACED
    ]


def _has_no_batches(pipeline: type[Struck]) -> bool:
    return pipeline.unstaged or not pipeline.batchers


#: Over the embedded queue: shares and pairs.  A point has some nineteen cases, and one of each
#: point comes before a second one of any: at 0.055 every point is struck every time.
_EMBEDDED = {
    "batches": (0.055, 20),
    "no batchers": (0.055, 10),
    "commits": (0.05, 20),
    "commits to delta": (0.05, 20),
    "commits to iceberg": (0.02, 10),
    "commits to postgres": (0.05, 20),
}


def plans_of(broker: str) -> list[Plan]:
    """The default plans of a broker, which take minutes."""
    if broker != "sqlite":
        tasks = _LETTER_TASKS if broker.endswith(" letters") else ()
        return [Plan(name, SHARES[broker], 2, tasks=tasks) for name in pipelines_of(broker)]
    few = {True: (0.15, 0), False: (0.012, 6)}
    return [
        Plan(name, *_EMBEDDED.get(name, few[uses_spark(PIPELINES[name])]))
        for name in pipelines_of(broker)
    ]


def in_memory() -> str | None:
    """A folder whose files need no disk, where the system has one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def campaigns(
    broker: str, plans: list[Plan], *, jobs: int, seed: int = 1, only: str = ""
) -> Iterator[tuple[Plan, list[Sums]]]:
    """Strikes each plan's pipeline over a broker; what failed keeps its files.

    Where few cases of each pipeline are struck, most of the time goes into the runs without a
    strike, one after another: so pipelines are struck in parallel.  A broker that restarts
    does so for all.

    :param jobs: Processes at work at once.
    :param only: Just this case, as reports write it.
    """
    beside = (
        jobs > 1
        and len(plans) > 1
        and broker != "sqlite"
        and not any(plan.restarts for plan in plans)
    )
    tables = any(PIPELINES[plan.pipeline] in NEED_POSTGRESQL for plan in plans)
    with SUBJECTS[broker]() as make, postgresql() if tables else nullcontext():
        strike = partial(_struck, make, jobs=1 if beside else jobs, seed=seed, only=only)
        if not beside:
            yield from map(strike, plans)
            return
        _at_work.append(strike)  # the workers are forks, and have it
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            yield from pool.imap(_strike, plans)


#: What the workers of this process do with a plan.
_at_work: list[Callable[[Plan], tuple[Plan, list[Sums]]]] = []


def _strike(plan: Plan) -> tuple[Plan, list[Sums]]:
    return _at_work[-1](plan)


def _struck(
    make: MakeSubject, plan: Plan, *, jobs: int, seed: int, only: str
) -> tuple[Plan, list[Sums]]:
    """Runs a plan; returns it with its results, those of restarts apart."""
    pipeline = PIPELINES[plan.pipeline]
    folder = Path(tempfile.mkdtemp(prefix="crashes-", dir=in_memory()))
    campaign = Campaign(partial(made, make, pipeline), MESSAGES, folder)
    spark = uses_spark(pipeline)
    with warm_spark() if spark else nullcontext():
        try:
            cases = [campaign.named(only)] if only else _cases(campaign, plan, spark, seed)
        except UnsoundPipeline as error:  # the others are struck all the same
            return plan, [_unsound(error)]
        result = [campaign.strike(cases, jobs=jobs)]
        if plan.restarts:
            result.append(campaign.strike(_restarts(campaign, plan.restarts, seed)))
    if not any(folder.iterdir()):
        folder.rmdir()
    return plan, result


def _cases(campaign: Campaign, plan: Plan, spark: bool, seed: int) -> list[Case]:
    part = _SPARK_SHARE if spark else 1.0
    return campaign.cases(
        PIPELINES[plan.pipeline].families,
        share=plan.share * part,
        pairs=round(plan.pairs * part),
        seed=seed,
        tasks=_SPARK_TASKS if spark else plan.tasks,
    )


def _restarts(campaign: Campaign, count: int, seed: int) -> list[Case]:
    """Cases in which the broker restarts; all cases share it, so they run one at a time."""
    points = [point for point in campaign.baseline().points[0] if point.traits.changes]
    sample = random.Random(seed).sample(points, min(count, len(points)))
    return [Case((Strike(point, Fault.BROKER_RESTARTS),)) for point in sample]


def _unsound(error: UnsoundPipeline) -> Sums:
    """The report of a pipeline that cannot be struck."""
    account = Account(wrong={Violation.OTHER: [str(error)]})
    failure = Result(Case(), account, [], error.log or Path())
    return Sums(parts={("", ""): Counter(other=1)}, failures=[failure])


def made(make: MakeSubject, pipeline: type[Struck], folder: Path) -> Subject:
    """A subject with the set-up of its pipeline."""
    subject = make(pipeline, folder)
    subject.hold_failed, subject.unstaged = pipeline.hold_failed, pipeline.unstaged
    subject.exclusive = issubclass(pipeline, ReplacesInDelta)
    subject.checks = check_archive, check_order
    if issubclass(pipeline, Commits):
        pipeline.place(subject).give()
    return subject
