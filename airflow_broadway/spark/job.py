"""The entry point of one Spark application, which runs all Spark batches of a run.

::

    spark-submit … launcher.py --run file:///data/broadway/flights/… --work work/<task>-<try>.json
        --sha256 <the work file's>

It runs every planned batch without an outcome: all batchers concurrently, with ``concurrency``
batches each.  It exits with 0 if every batch has an outcome, even a failed one.  The log names
batches without an outcome; a later try runs only these.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.errors import (
    BroadwayError,
    OptionsError,
    PipelineError,
    StagingError,
)
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.files import ARROW, AUTO, CLIENTS, HADOOP, Files
from airflow_broadway.core.formats.work import Work, digest_of
from airflow_broadway.core.log_context import log_plainly
from airflow_broadway.core.reference import load_ref
from airflow_broadway.core.version import __version__
from airflow_broadway.spark.connect import VARIABLE, ConnectSessions, Server
from airflow_broadway.spark.files import (
    check_executor,
    choose_client,
    local_path,
    open_files,
    set_s3a,
)
from airflow_broadway.spark.session import REFUSED, ClassicSessions, open_session

if TYPE_CHECKING:
    from airflow_broadway.spark.arrow import ArrowFiles

log = logging.getLogger("airflow_broadway.spark")

#: The oldest supported release of Spark.
MIN_SPARK = (3, 5)
#: The maximum number of batches whose earlier sessions on a Spark Connect server are released: the
#: first ones, because a try has few in hand.
MOST_ENDED = 100
#: The variable with the options of staging's client, as JSON: they may include credentials.
CLIENT_VARIABLE = "AIRFLOW_BROADWAY_STAGING_CLIENT"
_IMPORTS_AIRFLOW = (
    "The pipeline's module imports Airflow: that costs the driver seconds, and fails where it is"
    " not installed."
)


def arguments_of(
    run_uri: str,
    path: str,
    work: Work,
    *,
    client: str = AUTO,
    options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Returns the arguments with which :func:`main` runs a work file.

    :param run_uri: The run's folder, as a URI for Spark.
    :param path: The work file, relative to the folder.
    :param client: One of :data:`airflow_broadway.core.formats.files.CLIENTS`.
    :param options: Options of staging's client without secrets.
    """
    arguments = {
        **({} if client == AUTO else {"--client": client}),
        **({"--client-options": json.dumps(options)} if options else {}),
        "--run": run_uri,
        "--work": path,
        "--sha256": work.digest,
        "--host": platform.node(),
    }
    return [word for argument in arguments.items() for word in argument]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the application; returns its exit code."""
    parser = argparse.ArgumentParser(prog="airflow-broadway-spark", description=__doc__)
    parser.add_argument("--run", help="URI of the run's folder")
    parser.add_argument("--work", help="path of the work file in the run's folder")
    parser.add_argument("--sha256", help="the work file's digest, without which nothing is loaded")
    parser.add_argument("--host", default="?", help="the host that wrote the work file")
    parser.add_argument("--client", default=AUTO, choices=CLIENTS, help="what reads the folder")
    parser.add_argument("--client-options", default="{}", help="its endpoint and region, as JSON")
    parser.add_argument(
        "--check",
        action="store_true",
        help="only load the pipeline whose reference (JSON) is on standard input; needs no Spark",
    )
    args = parser.parse_args(argv)
    if args.check:
        return _check(sys.stdin.read())
    log_plainly("%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    try:
        return _run(args)
    except (BroadwayError, OSError) as error:
        log.error("%s", error)
        return REFUSED


def _check(reference: str) -> int:
    """Loads a pipeline, for the operator's check before it starts a JVM; prints errors."""
    try:
        load_ref(json.loads(reference))
    except BroadwayError as error:
        print(error, file=sys.stderr)  # noqa: T201 - read by the operator
        return REFUSED
    if "airflow" in sys.modules:
        print(_IMPORTS_AIRFLOW)  # noqa: T201
    return 0


def _run(args: argparse.Namespace) -> int:
    versions, uri = _check_versions(), str(args.run)
    options: dict[str, Any] = json.loads(os.environ.get(CLIENT_VARIABLE) or args.client_options)
    if VARIABLE in os.environ:
        return _run_on_server(args, versions, options)
    files: Files | None = None
    arrow: ArrowFiles | None = None
    if local_path(uri) is not None:
        log.info("%s", versions)
        files = open_files(uri)
    else:
        try:
            client, reason = choose_client(uri, args.client)
        except StagingError:
            log.info("%s", versions)
            raise
        log.info("%s; staging in %s is read through %s: %s", versions, uri, client, reason)
        if client == ARROW:
            files = arrow = _open_arrow(uri, options)
    from airflow_broadway.spark.application import run_work  # loads pyspark

    if files is not None:  # fails early, before a session is started
        _read_work(files, args)
    spark = open_session()
    try:
        context = spark.sparkContext
        ui = context.uiWebUrl or ""
        log.info("Spark application %s; its UI: %s", context.applicationId, ui)
        if arrow is not None:
            arrow.check_executor(spark, args.work)
        if files is None:
            set_s3a(spark, uri, options)
            files = open_files(uri, spark)
        if arrow is None:
            check_executor(spark, uri, args.work)
        sessions = ClassicSessions(spark)
        return run_work(sessions, uri, files, _read_work(files, args), arrow=arrow)
    finally:
        with suppress(Exception):
            spark.stop()


def _run_on_server(args: argparse.Namespace, versions: str, options: Mapping[str, Any]) -> int:
    """Runs the application as a client of a Spark Connect server."""
    server, uri = Server.loads(os.environ[VARIABLE]), str(args.run)
    log.info("%s; Spark Connect server %s", versions, server.address)
    files: Files
    arrow: ArrowFiles | None = None
    if local_path(uri) is not None:
        files = open_files(uri)
    else:
        files = opened = _open_arrow(uri, options)
        arrow = None if args.client == HADOOP else opened
    work = _read_work(files, args)
    _check_load(work.pipeline)
    from airflow_broadway.spark.application import open_batches, run_work  # loads pyspark

    sessions = ConnectSessions(server, _tries(files, uri, work))
    try:
        log.info("Spark application %s; its UI: ", sessions.application_id)
        sessions.end_earlier(islice(open_batches(files, work), MOST_ENDED))
        if arrow is not None:
            arrow.check_executor(sessions.main, args.work)
        else:
            check = partial(check_executor, sessions.main, uri, args.work)
            check(python=False)
            sessions.check_daily(check)
        return run_work(sessions, uri, files, work, arrow=arrow)
    finally:
        with suppress(Exception):
            sessions.close()


def _check_load(reference: Mapping[str, Any]) -> None:
    """Loads a pipeline before the server is contacted: a driver that cannot must not end the jobs
    of an earlier one.

    :raises BroadwayError: With the reason, and the way out.
    """
    try:
        load_ref(reference)
    except OptionsError:
        raise
    except Exception as error:
        log.info("The pipeline cannot be loaded:", exc_info=True)
        text = str(error) if isinstance(error, PipelineError) else repr(error)
        reason = " ".join(text.split())  # the task's error has one line of the log
        raise PipelineError(
            f"the pipeline {reference['class']} cannot be loaded: {reason}; what it imports must be"
            " installed in the driver's Python, or be listed in py_files"
        ) from error
    if "airflow" in sys.modules:
        log.warning(_IMPORTS_AIRFLOW)


def _tries(files: Files, uri: str, work: Work) -> dict[int, str]:
    """Returns the tries of a work, each with text that no other work has."""
    tries: dict[int, str] = {}
    for number in range(1, work.try_number + 1):
        with suppress(FileNotFoundError):
            digest = digest_of(files.read(paths.of_try(work.name, number)))
            tries[number] = f"{uri}/{work.name}/{number}/{digest}"
    return tries


def _open_arrow(uri: str, options: Mapping[str, Any]) -> ArrowFiles:
    """Opens the run's folder through staging's client.

    :raises StagingError: If the driver's Python lacks it.
    """
    try:
        from airflow_broadway.spark.arrow import ArrowFiles

        return ArrowFiles(uri, options)
    except (ImportError, StagingError) as error:
        raise StagingError(
            f"the Spark driver cannot open {uri} through Arrow ({error}): its Python"
            f" ({sys.executable}) needs pyarrow, pandas, and fsspec with the client of the store"
            " (s3fs for S3); or give Spark a Hadoop file system for it"
        ) from error


def _check_versions() -> str:
    """Returns the first line of the log.

    :raises PipelineError: If there is no Spark, or one too old.
    """
    try:
        import pyspark
    except ImportError as error:
        raise PipelineError(
            f"pyspark cannot be imported by {sys.executable}: {error}; start this with spark-submit"
        ) from error
    text = (
        f"airflow-broadway {__version__} on Python {platform.python_version()}"
        f" ({sys.executable}), Spark {pyspark.__version__}, host {platform.node()}"
    )
    numbers = tuple(int(part) for part in pyspark.__version__.split(".")[:2] if part.isdigit())
    if numbers < MIN_SPARK:
        wanted = ".".join(map(str, MIN_SPARK))
        raise PipelineError(f"{text}: Spark {wanted} or newer is needed")
    return text


def _read_work(files: Files, args: argparse.Namespace) -> Work:
    path: str = args.work
    try:
        text = files.read(path)
    except FileNotFoundError as error:
        cause = f" ({error})" if "bucket" in str(error).partition(args.run)[0] else ""
        raise StagingError(
            f"{args.run}/{path}, written on host {args.host!r}, is not there for the Spark driver"
            f" on host {platform.node()!r}{cause}: every task and the driver must see"
            " the same staging root; set [broadway] staging to one that they share"
        ) from None
    # Before importing anything that it names: the staging folder may be writable by others.
    if digest_of(text) != args.sha256:
        raise StagingError(
            f"{args.run}/{path} is not what the task wrote (its SHA-256 is {digest_of(text)}, and"
            f" the command line has {args.sha256}): it was changed, and nothing was run"
        )
    work = Work.loads(text, path)
    if work.package_version and work.package_version != __version__:
        raise PipelineError(
            f"the task was planned by airflow-broadway {work.package_version}, but the driver has"
            f" {__version__}: another copy precedes the shipped one on sys.path"
        )
    return work
