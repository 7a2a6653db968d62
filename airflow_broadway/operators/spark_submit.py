"""Run ``handle_batch`` on Spark: one application for all batches that have no outcome yet."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
)

from airflow_broadway.core.errors import ConnectionMissing, LeaseLapsed, OptionsError
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.ownership import CURE, Ownership, begin_try
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import many, without_outcome
from airflow_broadway.core.version import __version__
from airflow_broadway.operators import _docs
from airflow_broadway.operators._common import (
    AirflowConnections,
    check_engine,
    load_pipeline,
    open_run,
    pipeline_ref,
    references,
    run_info,
    task_name,
)
from airflow_broadway.runs.outcomes import is_settled, outcomes, tell_settled
from airflow_broadway.runs.stand_in import StandIn
from airflow_broadway.submit.environment import (
    check_classic,
    check_java,
    check_master,
    default_conf,
    file_settings,
    find_spark,
    s3_settings,
)
from airflow_broadway.submit.hook import SubmitHook, python_variables
from airflow_broadway.submit.package import check_import, ship

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_broadway.staging.run_folder import StagedRun

__all__ = ["BroadwaySparkSubmitOperator"]


class _Plan(NamedTuple):
    """A plan, and those of its batches that have no outcome."""

    head: BatchPlan
    open: list[PlannedBatch]


class BroadwaySparkSubmitOperator(SparkSubmitOperator):
    """Run ``handle_batch`` of a pipeline on all batches that have no outcome yet.

    One Spark application does it, started with the arguments and the connection of
    :class:`SparkSubmitOperator`; the code of the pipeline goes with it.  Nothing is started when
    nothing is to be done.  Returns a reference: how many batches, and how many of them failed
    whole.

    :param pipeline: As for :class:`BroadwayProcessorOperator`. (templated)
    :param batches: The outputs of the batcher tasks; a skipped task's ``None`` is passed over.
        (templated)
    :param staging: URI of the staging root; ``[broadway] staging`` unless given. (templated)
    :param check_pipeline: Whether to load the pipeline in a process of its own, as the driver will,
        before Spark is started.
    :param kwargs: Anything :class:`SparkSubmitOperator` takes but ``application``,
        ``application_args`` and ``java_class``.
    :raises OptionsError: While the Dag is parsed, if the pipeline is a class of the Dag file, which
        no Spark driver can import.
    """

    template_fields: Sequence[str] = (
        "pipeline",
        "batches",
        "staging",
        *SparkSubmitOperator.template_fields,
    )
    template_fields_renderers = {"pipeline": "json"}  # noqa: RUF012 - as in BaseOperator
    ui_color = "#e8eaf6"

    def __init__(
        self,
        *,
        pipeline: Any,
        batches: Any,
        staging: str | None = None,
        check_pipeline: bool = True,
        **kwargs: Any,
    ) -> None:
        for name in ("application", "application_args", "java_class"):
            if kwargs.get(name):
                raise OptionsError(
                    name, "nothing: the application is airflow-broadway's own", kwargs[name]
                )
        # Batchers without a message skip themselves, and of one that failed the others' batches
        # still are to run.  No rule of Airflow's says "any success" and allows for skips, so this
        # task looks for itself.
        kwargs.setdefault("trigger_rule", "all_done")
        kwargs.setdefault("name", "{{ dag.dag_id }}.{{ ti.task_id }}")
        kwargs.setdefault("doc_md", _docs.SPARK)
        super().__init__(**kwargs)
        self.pipeline = pipeline_ref(pipeline)
        check_engine(self.pipeline)
        self.batches = batches
        self.staging = staging
        self.check_pipeline = check_pipeline

    # -- leases --------------------------------------------------------------------------------

    def _before_submit(self, context: Context, run: StagedRun) -> None:
        """Called right before Spark is started: keeps the leases alive where no sensor does.

        A paused Dag's sensor is not rescheduled, and Spark may work for hours.
        """
        _, plans = self._submitted
        generations = {name for plan in plans for name in plan.head.generations}
        self._guard = StandIn(run, load_pipeline(self.pipeline, context), generations)
        self._guard.start()

    def _after_submit(self, context: Context, run: StagedRun) -> None:
        """Called when the application has ended, however it did: settles what no sensor will."""
        self._guard.finish()

    # ----------------------------------------------------------------------------------------------

    def execute(  # type: ignore[override] # the parent returns nothing
        self, context: Context
    ) -> dict[str, Any]:
        pipeline = load_pipeline(self.pipeline, context)
        run = open_run(context, self.staging, pipeline.name)
        plans = [self._read(run, path) for path in self._paths()]
        if not plans:
            raise AirflowSkipException("No batcher has a batch.")
        total = sum(plan.head.batches for plan in plans)
        left = sum(len(plan.open) for plan in plans)
        if not left:
            self.log.info("%s, each with an outcome: nothing to do.", many(total, "batch"))
            tell_settled(self.log, run, [plan.head for plan in plans])
            return self._reference(run, plans)
        void = self._void(run, plans)
        if len(void) == left:
            return self._nothing_held(run, plans, void)
        self.log.info("%s yet.", without_outcome(left - len(void), total))
        error = self._submit(context, run, pipeline, plans)
        after = [_Plan(plan.head, self._without_outcome(run, plan)) for plan in plans]
        self._check_complete(run, after, total, error)
        return self._reference(run, after)

    def on_kill(self) -> None:
        # Without a hook nothing was started, and the parent would look up its connection.
        if self._hook is not None:
            super().on_kill()

    # -- what there is to do -----------------------------------------------------------------------

    def _paths(self) -> list[str]:
        """The plans that the batcher tasks made."""
        planned = (each.get("plan") for each in references(self.batches))
        return list(dict.fromkeys(str(path) for path in planned if path))

    def _read(self, run: StagedRun, path: str) -> _Plan:
        head, batches = BatchPlan.read(run.files, path)
        run.store.check_root(head.root_id, head.host)
        done = set(run.files.list(paths.outcomes(head.path)))
        return _Plan(head, [each for each in batches if f"{each.batch_id}.json" not in done])

    def _without_outcome(self, run: StagedRun, plan: _Plan) -> list[PlannedBatch]:
        done = set(run.files.list(paths.outcomes(plan.head.path)))
        return [each for each in plan.open if f"{each.batch_id}.json" not in done]

    def _void(self, run: StagedRun, plans: Sequence[_Plan]) -> dict[str, str]:
        """Batches without an outcome whose messages this run no longer holds, and why."""
        fence = Ownership(run.files, clock=run.clock, fresh_for=float("inf"))
        void: dict[str, str] = {}
        for plan in plans:
            for batch in plan.open:
                try:
                    fence.check(batch.sources)
                except LeaseLapsed as error:
                    void[batch.batch_id] = str(error)
        return void

    def _nothing_held(
        self, run: StagedRun, plans: Sequence[_Plan], void: Mapping[str, str]
    ) -> dict[str, Any]:
        """End a task that has batches without an outcome, and holds none of their messages."""
        generations = {name for plan in plans for each in plan.open for name in each.sources}
        if all(is_settled(run, name) for name in generations):
            self.log.info(
                "%s without an outcome; the messages went back to the broker: the run was settled"
                " before they were handled.",
                many(len(void), "batch"),
            )
            tell_settled(self.log, run, [plan.head for plan in plans])
            return self._reference(run, plans)
        raise AirflowFailException(
            f"{many(len(void), 'batch')} without an outcome that cannot get one:"
            f" {next(iter(void.values()))}"
        )

    # -- the application ---------------------------------------------------------------------------

    def _submit(
        self, context: Context, run: StagedRun, pipeline: Pipeline, plans: Sequence[_Plan]
    ) -> Exception | None:
        """Run the application; returns what it ended with, if that was an error."""
        heads = [plan.head for plan in plans if plan.open]
        # A job id of a cluster outlives the clearing of its task: another list of work is not its.
        text = json.dumps([head.path for head in heads])
        self.external_id_key = f"spark_job_id_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self._submitted = (run, plans)
        uri = run.spark_uri()
        with tempfile.TemporaryDirectory(prefix="airflow-broadway-") as folder:
            self._prepare(uri, Path(folder))
            self._before_submit(context, run)
            try:
                self._hook = None
                self._hook_of = lambda: self._make_hook(
                    uri, lambda: self._write_work(context, run, heads)
                )
                super().execute(context)
            except AirflowException as error:
                return error
            finally:
                self._after_submit(context, run)
        return None

    def _prepare(self, uri: str, folder: Path) -> None:
        """Find Spark, ship the code, and complete the arguments.

        :raises BroadwayError: With one sentence on what is missing.
        """
        master, deploy_mode, binary = self._target()
        env = {**os.environ, **{k: str(v) for k, v in (self.env_vars or {}).items()}}
        program = find_spark(binary, env)
        client = deploy_mode != "cluster"
        env = {**program.env, **env}
        conf = dict(self.conf or {})
        elsewhere = file_settings(self.properties_file, env, program.binary)
        check_classic(env, {**elsewhere, **conf})
        if program.bundled and client:
            check_java(env)
        own = [each.strip() for each in (self.py_files or "").split(",") if each.strip()]
        shipment = ship(str(self.pipeline["class"]), folder)
        self.log.info("Shipping the packages %s to Spark.", shipment.packages)
        if self.check_pipeline and all("://" not in each for each in own):
            for warning in check_import(self.pipeline, shipment, py_files=own):
                self.log.warning("%s", warning)
        self.py_files = ",".join([str(shipment.zip), *own])
        self.application = str(shipment.launcher)
        conf |= default_conf(master, conf, elsewhere)
        s3_conf, secret = self._s3(uri, conf)
        self.conf = {**conf, **s3_conf}
        variables = dict(program.env)
        if client:
            variables |= python_variables(conf, env) | secret
        elif secret:
            self.log.warning(
                "In cluster mode no credentials of %s are handed to Spark: it uses its own chain of"
                " providers for %s.",
                self.staging,
                uri,
            )
        self._program, self._variables = program, variables

    def _target(self) -> tuple[str, str, str]:
        """Master, deploy mode and program of the connection.

        :raises ConnectionMissing: If it is not defined: the provider would go on with yarn.
        """
        try:
            AirflowConnections().get(self._conn_id)
        except ConnectionMissing:
            example = json.dumps(
                {"conn_type": "spark", "host": "local[2]", "extra": {"deploy-mode": "client"}}
            )
            raise ConnectionMissing(
                f"the Spark connection {self._conn_id!r} is not defined; add it under Admin →"
                f" Connections, or set AIRFLOW_CONN_{self._conn_id.upper()}={example!r}"
            ) from None
        found = super()._get_hook()._connection
        master = check_master(self._conn_id, str(found["master"]))
        return master, str(found["deploy_mode"] or "client"), str(found["spark_binary"])

    def _s3(self, uri: str, conf: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
        if not uri.startswith("s3a://"):
            return {}, {}
        from airflow_broadway.operators._common import staging_root

        authority = staging_root(self.staging).partition("://")[2].partition("/")[0]
        conn_id = authority.rpartition("@")[0]
        connection = AirflowConnections().get(conn_id) if conn_id else None
        return s3_settings(uri, connection, conf)

    #: Makes the hook; the parent asks for it once it has completed ``conf``.
    _hook_of: Callable[[], SparkSubmitHook] | None = None

    def _get_hook(self) -> SparkSubmitHook:
        return super()._get_hook() if self._hook_of is None else self._hook_of()

    def _make_hook(self, uri: str, prepare: Callable[[], tuple[str, Work]]) -> SubmitHook:
        """Make the hook; ``prepare`` writes the work file, and returns its path and content."""

        def arguments() -> list[str]:
            path, work = prepare()
            given = {
                "--run": uri,
                "--work": path,
                "--sha256": work.digest,
                "--host": socket.gethostname(),
            }
            return [each for pair in given.items() for each in pair]

        return SubmitHook.of(
            super()._get_hook(),
            binary=self._program.binary,
            env=self._variables,
            prepare=arguments,
        )

    def _write_work(
        self, context: Context, run: StagedRun, heads: Sequence[BatchPlan]
    ) -> tuple[str, Work]:
        """Write the work file, which fences earlier tries off; returns its path and content.

        Its number rises over retries and clears alike.
        """
        ti = context["ti"]
        name = task_name(ti)

        def work(number: int) -> Work:
            return Work(
                name=name,
                try_number=number,
                pipeline=self.pipeline,
                run=run_info(context).to_json(),
                plans=[head.path for head in heads],
                package_version=__version__,
            )

        number, path = begin_try(run.files, name, lambda number: work(number).dumps())
        return path, work(number)

    def is_job_succeeded(self, status: str) -> bool:
        # A job of a cluster may have ended well long ago, and its batches have been cleared since.
        if not super().is_job_succeeded(status):
            return False
        run, plans = self._submitted
        return not any(self._without_outcome(run, plan) for plan in plans)

    # -- what came of it ---------------------------------------------------------------------------

    def _check_complete(
        self, run: StagedRun, plans: Sequence[_Plan], total: int, error: Exception | None
    ) -> None:
        left = sum(len(plan.open) for plan in plans)
        if not left:
            if error is not None:
                self.log.warning("Every batch has an outcome, but Spark ended with: %s", error)
            return
        void = self._void(run, plans)
        text = without_outcome(left, total)
        if len(void) == left:
            raise AirflowFailException(f"{text}: {next(iter(void.values()))}") from error
        if void:
            text += f" ({len(void)} of them never will: {CURE})"
        ending = self._hook.ending if isinstance(self._hook, SubmitHook) else ""
        ended = f"  Spark ended with {ending}." if ending else ""
        cause = f".\n{error}" if error else ""
        raise AirflowException(
            f"{text}; the others stand.{ended}  A retry, or clearing this task, runs only"
            f" those{cause}"
        ) from error

    def _reference(self, run: StagedRun, plans: Sequence[_Plan]) -> dict[str, Any]:
        counts = {"batches": 0, "failed": 0, "messages": 0, "failed_messages": 0}
        for plan in plans:
            for outcome in outcomes(run, plan.head):
                counts["batches"] += 1
                counts["failed"] += bool(outcome.error)
                counts["messages"] += outcome.successful + outcome.failed + outcome.missing
                counts["failed_messages"] += outcome.failed
        if counts["failed"]:
            self.log.error(
                "%d of %s failed whole: see the outcomes, and the driver's log.",
                counts["failed"],
                many(counts["batches"], "batch"),
            )
        return {**counts, "plans": [plan.head.path for plan in plans]}
