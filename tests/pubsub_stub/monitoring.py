"""Cloud Monitoring's servicer on loopback, with the series of a test."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

import grpc
import pytest
from google.cloud.monitoring_v3 import MetricServiceClient
from google.cloud.monitoring_v3.services.metric_service.transports import MetricServiceGrpcTransport
from google.cloud.monitoring_v3.types import ListTimeSeriesRequest, ListTimeSeriesResponse

from airflow_broadway.core.clock import Clock, SystemClock
from tests.tls import Authority

__all__ = ["Monitoring"]


class Monitoring:
    """A server in this process, with its own port; its points are a minute apart.

    :param authority: Signs its certificate, for a client that logs in; ``None``: it is plain.

    ``values`` has the series of each metric, newest first.
    """

    def __init__(self, clock: Clock | None = None, authority: Authority | None = None) -> None:
        self.clock = clock or SystemClock()
        self.values: dict[str, list[int]] = {}
        self.refuses = False
        self.requests: list[ListTimeSeriesRequest] = []
        #: Of each request.
        self.metadata: list[dict[str, str | bytes]] = []
        self._authority = authority
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((self._handler(),))
        address = "127.0.0.1:0"
        if authority is None:
            self.port = self._server.add_insecure_port(address)
        else:
            certificate, key = authority.sign("monitoring", "127.0.0.1")
            pair = key.read_bytes(), certificate.read_bytes()
            self.port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def holds(self, messages: int, oldest: int) -> None:
        """Sets a subscription's backlog."""
        self.values = {
            "num_undelivered_messages": [messages],
            "oldest_unacked_message_age": [oldest],
        }

    def client(self, *_: object) -> MetricServiceClient:
        """Opens a plain client, without credentials."""
        channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        return MetricServiceClient(transport=MetricServiceGrpcTransport(channel=channel))

    @contextmanager
    def as_googles(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Redirects this process's clients of Google to here, by TLS and with credentials."""
        assert self._authority is not None
        real = MetricServiceGrpcTransport.create_channel
        trusted = grpc.ssl_channel_credentials(self._authority.certificate.read_bytes())

        def create_channel(host: str, **given: Any) -> Any:
            assert host == "monitoring.googleapis.com:443"
            return real(f"127.0.0.1:{self.port}", **{**given, "ssl_credentials": trusted})

        with patch.context() as patched:
            patched.setattr(MetricServiceGrpcTransport, "create_channel", create_channel)
            yield

    def _handler(self) -> grpc.GenericRpcHandler:
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
        self.requests.append(request)
        self.metadata.append({item.key: item.value for item in context.invocation_metadata()})
        if self.refuses:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")
        metric = request.filter.split("subscription/")[1].split('"')[0]
        now = int(self.clock.now().timestamp())
        points = [
            {"interval": {"end_time": {"seconds": now - 60 * n}}, "value": {"int64_value": value}}
            for n, value in enumerate(self.values.get(metric, []))
        ]
        return ListTimeSeriesResponse(time_series=[{"points": points}] if points else [])
