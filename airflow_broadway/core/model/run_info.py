"""Information on the current run, for callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from airflow_broadway.core.model.run_source import RunSource

_TIMESTAMPS = ("logical_date", "data_interval_start", "data_interval_end")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The Airflow run of a pipeline; equal on worker and Spark driver.

    :param logical_date: Aware UTC; ``None`` where the run has none, like the next two.
    :param params: The run's params, JSON.
    :param try_number: The try number of the task that runs the callback; from 1.
    :param source: The source of the run's messages; ``source.is_backfill`` is whether they are of a
        past interval, and ``source.interval`` is that interval.
    """

    dag_id: str = "local"
    run_id: str = "local"
    logical_date: datetime | None = None
    data_interval_start: datetime | None = None
    data_interval_end: datetime | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    try_number: int = 1
    source: RunSource = field(default_factory=RunSource)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON value that :meth:`from_json` reads back."""
        value = asdict(self)
        for name in _TIMESTAMPS:
            timestamp = value[name]
            value[name] = None if timestamp is None else timestamp.isoformat()
        return {**value, "source": self.source.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunInfo:
        """Reads what :meth:`to_json` wrote."""
        fields = dict(value)
        for name in _TIMESTAMPS:
            text = fields.get(name)
            fields[name] = None if text is None else datetime.fromisoformat(text)
        fields["source"] = RunSource.from_json(fields.get("source") or {})
        return cls(**fields)
