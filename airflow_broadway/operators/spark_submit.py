"""Runs ``handle_batch`` on Spark: one application for all batches without an outcome."""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
)

from airflow_broadway.adapters import task_docs, versions
from airflow_broadway.adapters.connections import AirflowConnections
from airflow_broadway.adapters.host import Host, references
from airflow_broadway.adapters.lineage import LineageMixin, report_execution
from airflow_broadway.adapters.links import ON_SPARK, note_spark
from airflow_broadway.adapters.outlets import emit_outlet_events
from airflow_broadway.adapters.parsing import check_engine, check_submission, pipeline_ref
from airflow_broadway.adapters.spark_provider import (
    SparkConnectHook,
    SparkSubmitHook,
    SparkSubmitOperator,
)
from airflow_broadway.core.errors import ConnectionMissing, OptionsError, StagingError
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.files import AUTO, CLIENTS
from airflow_broadway.core.formats.isolation import MOST_PROCESSES
from airflow_broadway.core.formats.ownership import CURE, highest_try
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.connections import to_variable
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.reference import make_ref
from airflow_broadway.core.text import pluralize, without_outcome
from airflow_broadway.core.version import __version__

if TYPE_CHECKING:
    from airflow.sdk import Context
    from pydantic import JsonValue

    from airflow_broadway.core.pipeline import Pipeline
    from airflow_broadway.runs.spark_batches import Ending, SparkBatches
    from airflow_broadway.staging.run_folder import StagedRun
    from airflow_broadway.staging.store import Store
    from airflow_broadway.submit.hook import SubmitHook
    from airflow_broadway.submit.submission import Chosen

__all__ = ["BroadwaySparkSubmitOperator"]

#: The type of connections to Spark Connect servers.
CONNECT = SparkConnectHook.conn_type
#: Arguments that only spark-submit has.
_SUBMIT_ONLY = [
    parameter
    for name, parameter in inspect.signature(SparkSubmitOperator.__init__).parameters.items()
    if name not in ("self", "kwargs", "application", "application_args", "java_class", "conn_id")
    and name not in ("name", "conf", "py_files", "files", "archives", "env_vars", "durable")
]
#: Settings that a session takes, and that have no effect there.
_SERVER_CONF = re.compile(r"spark\.(hadoop|yarn|kubernetes)\..*|spark\.remote|spark\.api\.mode")


class BroadwaySparkSubmitOperator(LineageMixin, SparkSubmitOperator):
    """Runs ``handle_batch`` of a pipeline on all batches without an outcome.

    It submits one Spark application, with the arguments and the connection of
    :class:`SparkSubmitOperator` and the code of the pipeline.  Nothing is submitted when there is
    no such batch.  Returns a reference: the number of batches, and of those that failed as a whole.

    :param pipeline: As for :class:`BroadwayProcessorOperator`. (templated)
    :param batches: The outputs of the batcher tasks; a skipped task's ``None`` is ignored.
        (templated)
    :param staging: URI of the staging root; by default ``[broadway] staging``. (templated)
    :param check_pipeline: Whether to load the pipeline in a child process, as the driver will,
        before a JVM starts; not with Spark Connect, whose driver has none.
    :param staging_client: How the driver and executors read a staging root that is no ``file://``:
        ``"hadoop"`` by Spark's Hadoop file systems, ``"arrow"`` by fsspec and Arrow, ``"auto"`` by
        Hadoop where it has a file system for the root's scheme, else by Arrow.
    :param remote: The URL of a Spark Connect server, ``sc://host:port``, which runs the batches
        instead of a driver with a JVM; or ``conn_id`` names a connection of the type
        ``spark_connect``.  ``conf`` then has settings of a session, and only ``py_files``,
        ``files``, ``archives`` and ``env_vars`` of the arguments of :class:`SparkSubmitOperator`
        are supported. (templated)
    :param max_applications: Applications that it may start in one run, once one of them has died;
        the count is reset when the task is cleared: see ``docs/poison.md``.
    :param kwargs: Arguments of :class:`SparkSubmitOperator` except ``application``,
        ``application_args`` and ``java_class``.
    :raises OptionsError: While the Dag is parsed, if the pipeline is a class of the Dag file, which
        no Spark driver can import.
    """

    template_fields: Sequence[str] = (
        "pipeline",
        "batches",
        "staging",
        "remote",
        *SparkSubmitOperator.template_fields,
    )
    template_fields_renderers = {"pipeline": "json"}  # noqa: RUF012 - as in BaseOperator
    ui_color = "#e8eaf6"
    operator_extra_links = ON_SPARK

    def __init__(
        self,
        *,
        pipeline: Any,
        batches: Any,
        staging: str | None = None,
        check_pipeline: bool = True,
        staging_client: str = AUTO,
        remote: str | None = None,
        max_applications: int = MOST_PROCESSES,
        **kwargs: Any,
    ) -> None:
        if not isinstance(max_applications, int) or max_applications < 1:
            raise OptionsError("max_applications", "an integer of at least 1", max_applications)
        if staging_client not in CLIENTS:
            raise OptionsError("staging_client", f"one of {', '.join(CLIENTS)}", staging_client)
        check_submission(kwargs)
        if remote is not None and "conn_id" in kwargs:
            raise OptionsError("remote", "no value with conn_id", remote)
        for name in ("application", "application_args", "java_class"):
            if kwargs.get(name):
                raise OptionsError(
                    name, "no value: the application is airflow-broadway's own", kwargs[name]
                )
        # Batchers without a message skip themselves, and the batches of the others must run even if
        # one fails.  No trigger rule of Airflow means "any success, skips allowed", so this task
        # checks itself.
        kwargs.setdefault("trigger_rule", "all_done")
        kwargs.setdefault("name", "{{ dag.dag_id }}.{{ ti.task_id }}")
        kwargs.setdefault("doc_md", task_docs.SPARK)
        super().__init__(**kwargs)
        self.pipeline = pipeline_ref(pipeline, "spark")
        check_engine(self.pipeline)
        self.batches = batches
        self.staging = staging
        self.check_pipeline = check_pipeline
        self.staging_client = staging_client
        self.remote = remote
        if remote is not None and "{{" not in remote:
            self._check_connect(remote)
        self.max_applications = max_applications

    def execute(  # type: ignore[override] # the parent returns nothing
        self, context: Context
    ) -> dict[str, Any]:
        from airflow_broadway.runs.sources.pipelines import source_of
        from airflow_broadway.runs.spark_batches import Ending, SparkBatches

        host = Host(context)
        pipeline = host.load_pipeline(self.pipeline)
        run = host.open_run(self.staging, pipeline)
        batches = SparkBatches(
            run,
            pipeline,
            references(self.batches),
            host.ports,
            name=host.task.file_name,
            most=self.max_applications,
            cleared=host.task.cleared,
        )
        ending = batches.begin()
        if ending is Ending.EMPTY:
            raise AirflowSkipException("No batcher has a batch.")
        if ending is Ending.VOID:
            raise AirflowFailException(
                f"{pluralize(len(batches.void), 'batch')} without an outcome can get none:"
                f" {next(iter(batches.void.values()))}"
            )
        if ending is Ending.OPEN:
            self._chosen = self._choose_options(context)
            self._running = batches
            with batches.leases_kept():
                error = self._submit_all(context, run, batches)
            self._check_complete(batches, batches.end(), error)
        heads = batches.plans.heads
        emit_outlet_events(self, context, run, pipeline, heads)
        reference = batches.plans.reference()
        if reference["failed"]:
            self.log.error(
                "%d of %s failed whole: see the outcomes, and the driver's log.",
                reference["failed"],
                pluralize(reference["batches"], "batch"),
            )
        self._batchers = dict.fromkeys(head.batcher for head in heads)
        report_execution(
            self,
            pipeline,
            host.ports.connections,
            reference,
            lambda: source_of(run, batches.plans.generations),
        )
        return reference

    def probe(self, store: Store, pipeline: Pipeline) -> str:
        """Submits an application without batches, outside a run; its files are removed.

        The driver and an executor read staging, and the driver writes to it.

        :returns: The driver's first line of the log; empty in cluster mode.
        :raises BroadwayError: If Spark cannot be started, or the driver or an executor does not see
            the staging root; includes the last error of its log.
        """
        from airflow_broadway.staging.run_folder import StagedRun
        from airflow_broadway.submit.hook import last_error

        info = RunInfo(dag_id=f"check-{uuid.uuid4().hex}", run_id="check")
        run = StagedRun(store, pipeline=pipeline.name, dag_id=info.dag_id, run_id=info.run_id)
        work = Work(
            name="check",
            try_number=1,
            pipeline=make_ref(self.pipeline),
            run=info.to_json(),
            plans=[],
            package_version=__version__,
        )
        path = paths.of_try(work.name, work.try_number)

        def write_work() -> tuple[str, Work]:
            run.files.create(path, work.dumps())
            return path, work

        self.name = info.dag_id
        self._chosen = self._choose_options({})
        lines: deque[str] = deque()
        try:
            with self._prepared(run, write_work):
                hook = cast("SubmitHook", self._get_hook())
                lines = hook.lines
                hook.submit(self.application)
            if not run.files.exists(paths.of_try(work.name, work.try_number, kind="started")):
                raise StagingError(f"the Spark driver does not write to {store.uri}")
        except AirflowException as error:
            reason = last_error(lines) or error
            raise StagingError(f"the Spark driver of {self.task_id} failed: {reason}") from error
        finally:
            run.dag.remove_all()
        return next((line for line in lines if "airflow-broadway " in line), "")

    def on_kill(self) -> None:
        # Without a hook nothing was started, and the parent would look up its connection.
        if self._hook is not None:
            if self._running is not None:
                self._running.isolation.stopped()
            # The parent kills an application on YARN only through its API.
            self._hook.on_kill()

    #: The batchers of the handled batches, once they are known.
    _batchers: Collection[str] | None = None

    def _writing_batchers(self, pipeline: Pipeline) -> Collection[str]:
        if self._batchers is not None:
            return self._batchers
        return [name for name, batcher in pipeline.batchers.items() if batcher.engine == "spark"]

    #: The batches in process.
    _running: SparkBatches | None = None

    # -- the application ---------------------------------------------------------------------------

    def _submit_all(
        self, context: Context, run: StagedRun, batches: SparkBatches
    ) -> Exception | None:
        """Runs applications, until one does not die of its batches; returns the last one's error,
        if any.
        """
        error = None
        remaining = batches.isolation.choose(over=not self._resumes)
        while remaining:
            error = self._submit(context, run, batches)
            if not batches.isolation.goes_on():
                break
            if error is not None:
                self.log.warning("An application died; another one continues: %s", error)
            remaining = batches.isolation.choose()
        return error

    def _submit(self, context: Context, run: StagedRun, batches: SparkBatches) -> Exception | None:
        """Runs the application; returns its error, if any."""
        self._plans = batches.plans
        self._sink_connections = batches.sink_connections
        host = Host(context)
        name = host.task.file_name
        self._on_started = lambda app, ui: note_spark(self, context, app, ui)
        if self._resumes:
            self._name_job(highest_try(run.files, name))

        def write_work() -> tuple[str, Work]:
            path, work = batches.write_work(name, make_ref(self.pipeline), host.run_info)
            self._name_job(work.try_number)
            return path, work

        with self._prepared(run, write_work):
            try:
                super().execute(context)
            except AirflowException as error:
                return error
        return None

    def _name_job(self, try_number: int) -> None:
        """Names an application in the task's state store, which outlives the clearing of the task.

        :param try_number: Of its work file.
        """
        key = f"{self._plans.key()}_{try_number}"
        self.external_id_key = f"spark_job_id_{key}"
        self._K8S_DRIVER_STATUS_KEY = f"k8s_driver_status_{key}"

    def poll_until_complete(self, external_id: JsonValue, context: Context) -> None:
        if isinstance(self._hook, SparkSubmitHook) and self._hook._is_yarn:
            # So that a resumed one can be killed.
            self._hook._yarn_application_id = str(external_id)
        try:
            super().poll_until_complete(external_id, context)
        except RuntimeError as error:
            # The application may still be running: a retry then resumes it.
            if self.is_job_active(self.get_job_status(external_id, context)):
                raise
            raise AirflowException(str(error)) from error

    @contextmanager
    def _prepared(
        self, run: StagedRun, write_work: Callable[[], tuple[str, Work]]
    ) -> Iterator[None]:
        """Completes the arguments; within the context, the application can be started."""
        from airflow_broadway.spark.job import arguments_of
        from airflow_broadway.staging.client import public_options, renewed_options
        from airflow_broadway.submit.hook import SubmitHook
        from airflow_broadway.submit.submission import prepare

        own = self.application, self.py_files, self.conf
        store = run.store
        options = self._client_options(store)
        with (
            tempfile.TemporaryDirectory(prefix="airflow-broadway-") as folder,
            renewed_options(store.fs, options, Path(folder) / "credentials.json") as options,
        ):
            submission = prepare(
                # The provider has completed ``conf``, and templates are rendered.
                replace(self._chosen, conf=self.conf or {}),
                self.pipeline,
                run.files,
                Path(folder),
                client_options=options,
                secrets=to_variable(AirflowConnections(), self._sink_connections),
                check=self.check_pipeline,
            )
            self.application = submission.application
            self.py_files, self.conf = submission.py_files, submission.conf
            self._hook = None
            self._make_hook = lambda hook: SubmitHook.of(
                hook,
                binary=submission.program.binary,
                deploy_mode=self._chosen.deploy_mode,
                env=submission.variables,
                prepare=lambda: arguments_of(
                    run.spark_uri(),
                    *write_work(),
                    client=self.staging_client,
                    options=public_options(options),
                ),
                on_application=self._on_started,
            )
            try:
                yield
            finally:  # the files are in the folder; another application has its own
                self.application, self.py_files, self.conf = own

    #: What the user chose, and whether a retry resumes an application that is running.
    _chosen: Chosen
    _resumes = False
    #: Ids of the connections of sinks.
    _sink_connections: Sequence[str] = ()
    #: Called with the application's id and the URL of its UI, once they are known.
    _on_started: Callable[[str, str], None] = staticmethod(lambda application_id, ui: None)
    #: Wraps the parent's hook in ours.
    _make_hook: Callable[[SparkSubmitHook], SparkSubmitHook] | None = None

    def _get_hook(self) -> SparkSubmitHook:
        # The parent calls this when it has completed ``conf``.
        from airflow_broadway.submit.hook import ConnectHook

        connect = self._chosen.master.startswith("sc:")
        hook = ConnectHook() if connect else super()._get_hook()
        return hook if self._make_hook is None else self._make_hook(hook)

    def _choose_options(self, context: Context) -> Chosen:
        """Returns the options of the connection and the operator's arguments.

        Decides whether a retry resumes an application that is running on a cluster.

        :raises ConnectionMissing: If the connection is not defined: the provider would use yarn
            instead.
        :raises OptionsError: If the deploy mode is not supported there.
        :raises SparkMissing: If Kubernetes' client is not installed.
        """
        from airflow_broadway.submit.environment import SparkMissing, check_master

        url = self.remote
        try:
            if url is None and self.on_server:
                url = SparkConnectHook(self._conn_id).get_connection_url()
        except ConnectionMissing:
            example = json.dumps(
                {"conn_type": "spark", "host": "local[2]", "extra": {"deploy-mode": "client"}}
            )
            raise ConnectionMissing(
                f"the Spark connection {self._conn_id!r} is not defined; add it under Admin →"
                f" Connections, or set AIRFLOW_CONN_{self._conn_id.upper()}={example!r}"
            ) from None
        if url is not None:
            self._check_connect(url)
            return self._chosen_for(url, "client", sys.executable)
        try:
            hook = super()._get_hook()
        except (RuntimeError, NameError) as error:  # without Kubernetes' client, by its version
            raise SparkMissing(
                f"the connection {self._conn_id!r} gives Kubernetes as the Spark master, for which"
                f" this worker's Python lacks the client ({error}): pip install"
                " 'airflow-broadway[kubernetes]'"
            ) from error
        options = hook._connection
        master, deploy_mode = str(options["master"]), str(options["deploy_mode"] or "client")
        check_master(self._conn_id, master, deploy_mode)
        tracked, durable = versions.tracks_driver(hook), versions.is_durable(self)
        if deploy_mode == "cluster" and durable and not tracked:
            self.durable = False  # the provider refuses it with yarn, and ignores it elsewhere
            option = "yarn_track_via_rm_api" if hook._is_yarn else "track_driver_via_k8s_api"
            self.log.warning(
                "A retry submits another application, which takes over from one that is running:"
                " to resume that one (durable), set %s=True.",
                option,
            )
        self._resumes = tracked and durable and bool(context.get("task_state_store"))
        return self._chosen_for(master, deploy_mode, str(options["spark_binary"]))

    def _chosen_for(self, master: str, deploy_mode: str, binary: str) -> Chosen:
        from airflow_broadway.submit.submission import Chosen

        files = {"files": self.files, "jars": self.jars, "archives": self._archives}
        return Chosen(
            master=master,
            deploy_mode=deploy_mode,
            binary=binary,
            conf=self.conf or {},
            env_vars=self.env_vars or {},
            properties_file=self.properties_file,
            py_files=self.py_files or "",
            files={option: text for option, text in files.items() if text},
        )

    @property
    def on_server(self) -> bool:
        """Whether a Spark Connect server runs the batches.

        :raises ConnectionMissing: If the connection is not defined.
        """
        kind = AirflowConnections().get(self._conn_id).conn_type if self.remote is None else CONNECT
        return kind == CONNECT

    def _check_connect(self, url: str) -> None:
        """Checks the arguments for a Spark Connect server.

        :raises OptionsError: If the URL has another scheme, or an argument is spark-submit's only.
        """
        if not url.startswith("sc://"):
            raise OptionsError("remote", "the URL of a Spark Connect server, sc://host:port", url)
        rule = "no value with Spark Connect: set it where the server is started"
        for parameter in _SUBMIT_ONLY:
            name = parameter.name
            value = getattr(self, name, getattr(self, f"_{name}", None))
            if value not in (None, parameter.default):
                raise OptionsError(name, rule, value)
        for name, value in (self.conf or {}).items():
            if _SERVER_CONF.fullmatch(name):
                raise OptionsError(f"conf.{name}", rule, value)

    @staticmethod
    def _client_options(store: Store) -> dict[str, Any]:
        """Returns the options of a root whose URI names a connection: without one every process
        finds its own credentials.
        """
        from airflow_broadway.staging.client import client_options

        if store.local or "@" not in store.uri.split("/")[2]:
            return {}
        return client_options(store.fs, of_machine=False)

    def is_job_succeeded(self, status: str) -> bool:
        # A cluster's job may have succeeded long ago, and its batches have been cleared since.
        if not super().is_job_succeeded(status):
            return False
        self._plans.look()
        return not self._plans.left

    # -- the result --------------------------------------------------------------------------------

    def _check_complete(
        self, batches: SparkBatches, ending: Ending, error: Exception | None
    ) -> None:
        from airflow_broadway.runs.spark_batches import Ending

        plans, void = batches.plans, batches.void
        if ending is Ending.DONE:
            if error is not None:
                self.log.warning("Every batch has an outcome, but Spark ended with: %s", error)
            return
        text = without_outcome(plans.left, plans.total)
        if ending is Ending.VOID:
            raise AirflowFailException(f"{text}: {next(iter(void.values()))}") from error
        if void:
            text += f" ({len(void)} of them can get none: {CURE})"
        status = getattr(self._hook, "ending", "")  # our hook's status, if there is a hook
        ended = f"  Spark ended with {status}." if status else ""
        cause = f".\n{error}" if error else ""
        raise AirflowException(
            f"{text}; the others are valid.{ended}  A retry, or clearing this task, runs only"
            f" those{cause}"
        ) from error
