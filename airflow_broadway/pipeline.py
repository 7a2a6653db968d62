"""``Broadway``, the class that users subclass: a pipeline that creates its own Airflow tasks.

A pipeline's module imports it wherever a part of the pipeline runs, in a Spark driver too.  So it
needs Python 3.10 and the standard library, and loads Airflow only in the methods that need it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.pipeline import Pipeline

if TYPE_CHECKING:
    from airflow_broadway.core.local.run import RunReport

__all__ = ["Broadway"]


class _of_class_or_instance:  # noqa: N801 - a decorator
    """A method that can be called on the class, too, with an instance without overrides:
    ``Flights.dag("flights")`` is ``Flights().dag("flights")``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type[Any]) -> Callable[..., Any]:
        return functools.partial(self._function, owner() if instance is None else instance)


class Broadway(Pipeline):
    """A pipeline; subclass it, declare its options, write its callbacks.

    :param overrides: Options that replace the declared ones, each a JSON value; nested options take
        nested mappings: ``Flights(producer={"queue": "test"}, batchers={"delayed": {"batch_size":
        10}})``.  Airflow templates in them are rendered by the operators.
    :raises OptionsError: Naming the path of the option, the value, the rule or the valid names.
    """

    @_of_class_or_instance
    def task_group(self, group_id: str = "broadway", **kwargs: Any) -> Any:
        """Creates the pipeline's tasks: see :func:`airflow_broadway.task_group.make_task_group`."""
        from airflow_broadway.task_group import make_task_group

        return make_task_group(self, group_id, **kwargs)

    @_of_class_or_instance
    def dag(self, dag_id: str, **kwargs: Any) -> Any:
        """Creates a Dag of the pipeline: see :func:`airflow_broadway.task_group.make_dag`."""
        from airflow_broadway.task_group import make_dag

        return make_dag(self, dag_id, **kwargs)

    @staticmethod
    def params() -> dict[str, Any]:
        """Returns the source, budgets and dry run as Airflow params, for "Trigger" in the UI."""
        from airflow_broadway.task_group import make_params

        return make_params()

    def run_local(self, messages: Iterable[Any] | None = None, **options: Any) -> RunReport:
        """Runs it in this process, to its end, without Airflow and Spark.

        :param messages: Messages, or their data, instead of the producer's.
        :param options: Those of :func:`airflow_broadway.core.local.run.run_local`: budgets,
            ``connections``, ``clock`` and others.
        """
        from airflow_broadway.core.local.run import run_local

        if any(batcher.sink is not None for batcher in self.batchers.values()):
            from airflow_broadway.runs.sinks import LocalCommits  # loads pyarrow

            options.setdefault("open_sinks", LocalCommits)
        return run_local(self, messages, **options)
