"""How full a subscription is: by Cloud Monitoring, or not known; never 0 for what is not known."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from airflow_broadway.producers.pubsub import inspect
from airflow_broadway.testing import ManualClock
from tests.unit.producers.pubsub.kit import place


class Monitoring:
    """Cloud Monitoring's servicer: the series of each metric, newest first."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.values: dict[str, list[int]] = {}
        self.refuses = False
        self.asked: list[Any] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((self._handler(),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def _handler(self) -> Any:
        from google.cloud.monitoring_v3.types import ListTimeSeriesRequest, ListTimeSeriesResponse

        return grpc.method_handlers_generic_handler(
            "google.monitoring.v3.MetricService",
            {
                "ListTimeSeries": grpc.unary_unary_rpc_method_handler(
                    self._list,
                    request_deserializer=ListTimeSeriesRequest.deserialize,
                    response_serializer=ListTimeSeriesResponse.serialize,
                )
            },
        )

    def _list(self, request: Any, context: grpc.ServicerContext) -> Any:
        from google.cloud.monitoring_v3.types import ListTimeSeriesResponse

        self.asked.append(request)
        if self.refuses:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")
        metric = request.filter.split("subscription/")[1].split('"')[0]
        now = int(self.clock.now().timestamp())
        points = [
            {"interval": {"end_time": {"seconds": now - 60 * n}}, "value": {"int64_value": value}}
            for n, value in enumerate(self.values.get(metric, []))
        ]
        return ListTimeSeriesResponse(time_series=[{"points": points}] if points else [])

    def client(self, *_: Any) -> Any:
        from google.cloud.monitoring_v3 import MetricServiceClient
        from google.cloud.monitoring_v3.services.metric_service.transports import (
            MetricServiceGrpcTransport,
        )

        channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        return MetricServiceClient(transport=MetricServiceGrpcTransport(channel=channel))

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def monitoring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitoring]:
    made = Monitoring(ManualClock())
    # An emulator has no Cloud Monitoring beside it; this one has.
    monkeypatch.setattr(inspect, "open_metrics", made.client)
    yield made
    made.stop()


def test_what_waits_is_what_is_not_acknowledged_and_not_held_by_runs(
    monitoring: Monitoring, tmp_path: Path
) -> None:
    with place(tmp_path) as at:
        at.put("a", "b", "c")
        run = at.begin()
        assert len(run.take()) == 3
        monitoring.values = {
            "num_undelivered_messages": [10, 99],
            "oldest_unacked_message_age": [4711, 1],
        }

        other = at.begin()
        depth = other.producer.depth(other.env)

        assert depth is not None
        assert (depth.ready, depth.leased, depth.oldest_age) == (7, 3, 4711.0)
        at.clock.advance(600.0)  # the lease has lapsed, and nobody has settled
        later = other.producer.depth(other.env)
        assert later is not None
        assert (later.ready, later.leased) == (10, 0)
        for request in monitoring.asked:
            assert request.name == "projects/broadway-tests"
            assert f'subscription_id = "{at.name.split("/")[-1]}"' in request.filter


@pytest.mark.parametrize("why", ["denied", "no value", "half of it", "an emulator"])
def test_what_is_not_known_is_not_0(
    why: str, monitoring: Monitoring, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with place(tmp_path) as at:
        run = at.begin()
        monitoring.refuses = why == "denied"
        if why == "half of it":
            monitoring.values = {"num_undelivered_messages": [10]}
        if why == "an emulator":
            monkeypatch.undo()
        assert run.producer.depth(run.env) is None
