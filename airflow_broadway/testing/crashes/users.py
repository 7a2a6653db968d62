"""Crash tests of a user's pipeline and sink, over the embedded queue.

A crash test forks a process for each task.  A fork has only the forking thread, so locks held by
other threads would stay locked in it: a process with threads must not fork, and
:func:`crash_test` runs the crash test in another process.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from airflow_broadway.core.errors import BroadwayError, OptionsError
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import class_path, import_class, make_ref
from airflow_broadway.testing.crashes.boundaries import Sockets
from airflow_broadway.testing.crashes.campaign import Campaign, Family, Totals, UnsoundPipeline
from airflow_broadway.testing.crashes.case import Case, Result
from airflow_broadway.testing.crashes.interceptor import Boundary
from airflow_broadway.testing.crashes.report import report
from airflow_broadway.testing.crashes.sink import Prepare, Sink, count_rows, prepare
from airflow_broadway.testing.crashes.spark import uses_spark, warm_spark
from airflow_broadway.testing.crashes.subject import Embedded


class CrashTestError(BroadwayError):
    """A crash test cannot be run; the text gives the reason."""


class UserSubject(Embedded):
    """A user's pipeline over the embedded queue, run deterministically.

    Concurrency and batch timeouts would make runs differ, so the pipeline runs with a concurrency
    of 1, and batches close by size only.
    """

    def __init__(
        self, pipeline: type[Pipeline], sink: Sink | None, prepare: Prepare | None, folder: Path
    ) -> None:
        super().__init__(pipeline, folder)
        self._sink = sink
        self._prepare = prepare

    def overrides(self) -> Mapping[str, Any]:
        batcher = {"concurrency": 1, "batch_timeout": None}
        return {
            **super().overrides(),
            "processors": {"concurrency": 1, "executor": "threads"},
            "batchers": dict.fromkeys(self.pipeline.batchers, batcher),
        }

    def boundaries(self) -> list[Boundary]:
        return [*super().boundaries(), Sockets()]

    def prepare(self) -> None:
        if self._prepare is not None:
            prepare(self._prepare, self.work, self.folder / "log.txt")

    def rows(self, ids: Sequence[str]) -> Counter[str] | None:
        if self._sink is None:
            return None
        return count_rows(self._sink, self.work, self.folder / "log.txt", ids)


@dataclass(frozen=True, kw_only=True)
class CrashTest:
    """A crash test of a pipeline and its sink.

    :param messages: The bodies.
    :param sink: Returns the rows of the sink; ``None``: only messages are accounted for.
    :param prepare: Empties a sink outside the case's folder.
    :param share: The share of the cases of each family except pairs, 0 to 1; all cases at the
        callbacks, and at the calls that these make, are run.
    :param pairs: The number of cases with two faults.
    :param only: Only these cases, as printed in reports.
    :param keep: Whether to keep the files of failed cases.
    :raises CrashTestError: If the test cannot be run.
    """

    pipeline: type[Pipeline]
    messages: Sequence[bytes]
    sink: Sink | None = None
    prepare: Prepare | None = None
    families: Sequence[Family] = (Family.CRASHES, Family.ZOMBIES, Family.FAULTS, Family.PAIRS)
    share: float = 1.0
    pairs: int = 0
    seed: int = 1
    jobs: int = 1
    only: Sequence[str] = field(default=())
    keep: bool = False

    def __post_init__(self) -> None:
        if sys.platform != "linux":
            raise CrashTestError(
                "a crash test needs Linux: tasks are forks that are killed, and their file accesses"
                f" are traced through /proc; this is {sys.platform}"
            )
        _check(self.pipeline)
        if not self.messages:
            raise CrashTestError("there is no message to send")
        if self.prepare is not None and self.jobs > 1:
            raise CrashTestError(
                "cases share the sink that is emptied before each of them, so they must run one"
                " after another: omit --jobs"
            )

    def run(
        self,
        *,
        on_cases: Callable[[int], None] = lambda count: None,
        on_result: Callable[[Result], None] = lambda result: None,
    ) -> Totals:
        """Runs the cases; returns their totals.

        :param on_cases: Called once, with the number of cases.
        :raises UnsoundPipeline: If the pipeline does not balance without faults.
        :raises CrashTestError: If there is no such case.
        """
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        folder = Path(tempfile.mkdtemp(prefix="crash-test-", dir=memory))
        try:
            make = partial(UserSubject, self.pipeline, self.sink, self.prepare)
            campaign = Campaign(make, self.messages, folder)
            with warm_spark() if uses_spark(self.pipeline) else nullcontext():
                cases = self._cases(campaign)
                on_cases(len(cases))
                return campaign.run_cases(cases, jobs=self.jobs, on_result=on_result)
        finally:
            if not self.keep:
                shutil.rmtree(folder, ignore_errors=True)

    def _cases(self, campaign: Campaign) -> list[Case]:
        if not self.only:
            return campaign.cases(
                self.families,
                share=self.share,
                pairs=self.pairs,
                seed=self.seed,
                all_callbacks=True,
            )
        try:
            return [campaign.parse_case(text) for text in self.only]
        except ValueError as error:
            raise CrashTestError(str(error)) from None


def pipeline_of(reference: str) -> type[Pipeline]:
    """Imports the pipeline class ``module:Class``.

    :raises CrashTestError: If it cannot be imported, or is no pipeline.
    """
    try:
        return import_class(str(make_ref(reference)["class"]))
    except OptionsError:
        raise CrashTestError(
            f"a pipeline is named as module:Class, such as orders:Orders; got: {reference!r}"
        ) from None
    except BroadwayError as error:
        raise CrashTestError(str(error)) from None
    except Exception as error:  # raised by the module itself
        raise CrashTestError(
            f"the module of {reference!r} fails when it is imported:"
            f" {type(error).__name__}: {error}"
        ) from error


def function_of(reference: str) -> Callable[[Path], Any]:
    """Imports the function ``module:function``.

    :raises CrashTestError: If it cannot be imported, or is no function.
    """
    if ":" not in reference:
        raise CrashTestError(
            f"a function is named as module:function, such as orders:rows; got: {reference!r}"
        )
    try:
        function = resolve_name(reference)
    except Exception as error:  # raised by the module itself
        raise CrashTestError(
            f"{reference!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise CrashTestError(f"{reference!r} is no function: {function!r:.200}")
    typed: Callable[[Path], Any] = function
    return typed


def _check(pipeline: type[Pipeline]) -> None:
    name = pipeline.__name__
    if pipeline.producer is None:
        raise CrashTestError(
            f"{name} has no producer: add one to the class; the test replaces it by the embedded"
            " queue"
        )
    if uses_spark(pipeline) and find_spec("pyspark") is None:
        raise CrashTestError(f"{name} has a Spark batcher, and pyspark is not installed here")
    try:
        pipeline()
    except BroadwayError as error:
        raise CrashTestError(f"{name} cannot be built: {error}") from None


def crash_test(
    pipeline: type[Pipeline] | str,
    messages: Iterable[bytes | str],
    *,
    sink: Callable[..., Any] | str | None = None,
    prepare: Callable[..., Any] | str | None = None,
    share: float = 0.0,
    **options: Any,
) -> Totals:
    """Runs a :class:`CrashTest` in another process, which imports the pipeline and its functions.

    :param messages: The bodies.
    :param sink: Called with a case's folder; returns the rows of the sink.
    :param prepare: Called with a case's folder; empties a sink elsewhere.
    :param share: The share of the cases at the package's own calls, 0 to 1; all cases at the
        callbacks, and at the calls that these make, are run.
    :param options: Other options of :class:`CrashTest`.
    :raises AssertionError: If a case failed; with the report.
    :raises CrashTestError: If it cannot be run.
    """
    kwargs = {
        **options,
        "pipeline": pipeline if isinstance(pipeline, str) else class_path(pipeline),
        "messages": [body.encode() if isinstance(body, str) else body for body in messages],
        "sink": _name(sink),
        "prepare": _name(prepare),
        "share": share,
    }
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        try:
            totals = process.submit(_run, kwargs).result()
        except BrokenProcessPool as error:
            raise CrashTestError(f"the process of the crash test died: {error}") from None
    if not totals.passed:
        lines = report(totals, lambda case: f"broadway_crash_test(..., only=[{str(case)!r}])")
        raise AssertionError("\n".join(["the crash test failed", *lines]))
    return totals


def _name(function: Callable[..., Any] | str | None) -> str | None:
    if function is None or isinstance(function, str):
        return function
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in name:
        raise CrashTestError(
            f"{name} cannot be imported by another process: define it at the top of its module"
        )
    return name


def _run(kwargs: dict[str, Any]) -> Totals:
    for name in ("sink", "prepare"):
        if kwargs[name]:
            kwargs[name] = function_of(kwargs[name])
    try:
        return CrashTest(**{**kwargs, "pipeline": pipeline_of(kwargs["pipeline"])}).run()
    except UnsoundPipeline as error:
        raise CrashTestError("\n".join([str(error), *error.tail])) from None
