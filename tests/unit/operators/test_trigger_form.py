"""The form of "Trigger" in Airflow's UI: its fields, and what tasks make of them."""

from __future__ import annotations

from typing import Any, cast

import pytest
from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk.definitions.param import ParamsDict
from airflow.sdk.exceptions import ParamValidationError

from airflow_broadway.adapters.host import Host
from airflow_broadway.core.errors import RequestRefused
from airflow_broadway.core.model.run_source import KINDS, RunSource
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.operators.pull import BUDGET_DEFAULTS, budget_of, source_of_run
from airflow_broadway.task_group import make_params
from tests.unit.operators.context import task_context
from tests.unit.runs.steps import Sums


def filled(**fields: Any) -> dict[str, Any]:
    """The params of a task from a form with these values, as Airflow checks them."""
    params = ParamsDict(make_params())
    params.update(fields)
    return dict(params.validate())


def task(**fields: Any) -> tuple[BroadwayProcessorOperator, Any]:
    """A process task, and its context."""
    operator = BroadwayProcessorOperator(task_id="process", pipeline=Sums)
    return operator, {**task_context(), "params": filled(**fields)}


def test_empty_form_is_a_default_run():
    operator, context = task()

    assert source_of_run(operator, Host(context), Sums()) == RunSource()
    assert budget_of(operator, Host(context)) == Budget(**BUDGET_DEFAULTS)
    assert not Host(context).is_dry_run()


def test_each_field_has_title_help_and_section():
    schemas = {name: param.serialize() for name, param in make_params().items()}

    for name, param in schemas.items():
        assert param["schema"]["title"], name
        assert param["schema"]["section"], name
        assert param["description"].endswith("."), name


def test_source_is_chosen_from_a_labelled_list():
    schema = make_params()["source"].serialize()["schema"]

    assert schema["enum"] == [None, *KINDS]
    assert set(schema["values_display"]) == {"null", *KINDS}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"source": "attic"}, "source: 'attic' is not one of"),
        ({"source": ""}, "source: '' is not one of"),
        ({"interval_start": "yesterday"}, "interval_start: 'yesterday' is not a 'date-time'"),
        ({"max_messages": 0}, "max_messages: 0 is less than the minimum of 1"),
        ({"max_messages": "5"}, "max_messages: '5' is not of type"),
        ({"max_seconds": -1}, "max_seconds: -1 is less than the minimum"),
        ({"dry_run": "yes"}, "dry_run: 'yes' is not of type 'boolean'"),
        ({"dry_run": None}, "dry_run: None is not of type 'boolean'"),
    ],
)
def test_invalid_field_is_refused_before_there_is_a_run(fields, why):
    with pytest.raises(ParamValidationError) as raised:
        filled(**fields)

    assert why in " ".join(str(raised.value).split()).replace("Invalid input for param ", "")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"source": "archive"}, "has no archive to read: nothing was received"),
        ({"source": "log"}, "has no log to read an interval of: nothing was received"),
        ({"source": "run"}, "source_run is missing"),
        ({"source_run": "manual__1"}, "source_run is given, and the source of run 'r' is 'live'"),
        (
            {"interval_start": "2026-01-01T00:00:00Z"},
            "interval_start is given, and the source of run 'r' is 'live'",
        ),
    ],
)
def test_inconsistent_fields_are_one_error_without_retry(fields, why):
    operator, context = task(**fields)

    with pytest.raises(AirflowFailException, match=why):
        source_of_run(operator, Host(context), Sums())


@pytest.mark.parametrize("odd", ["true", "no", 1, 0, ["x"]])
def test_dry_run_must_be_a_boolean_without_the_form(odd, tmp_path):
    operator = BroadwayProcessorOperator(
        task_id="process",
        pipeline=Sums(producer={"path": str(tmp_path / "queue.db")}),
        staging=f"file://{tmp_path}/staging",
    )

    with pytest.raises(AirflowFailException, match="dry_run is true or false, and not"):
        operator.execute(cast("Any", {**task_context(), "params": {"dry_run": odd}}))


def test_dry_run_withheld_by_airflow_is_refused():
    _, context = task()
    context["dag_run"].conf = {"dry_run": True}

    with pytest.raises(RequestRefused, match=r"turn .* dag_run_conf_overrides_params on"):
        Host(context).is_dry_run()
