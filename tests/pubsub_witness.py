"""A proxy for Pub/Sub that records the requests of clients."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

import grpc
from google.pubsub_v1.types import pubsub as types

from tests.pubsub_server import PubSubServer
from tests.tls import Authority

__all__ = ["RecordedRequest", "Witness"]

_NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class RecordedRequest(NamedTuple):
    """One request, e.g. of ``"Pull"``, as protobuf, and its metadata."""

    call: str
    request: Any
    metadata: dict[str, str | bytes]


class Witness(PubSubServer):
    """A recording proxy for a server.

    ``requests`` are those that it forwarded, in the order of their arrival.

    :param authority: Signs its certificate; ``None``: it is plain.
    """

    kind: ClassVar[str] = "witness"

    def __init__(self, server: PubSubServer, authority: Authority | None = None) -> None:
        self.requests: list[RecordedRequest] = []
        self._behind = grpc.insecure_channel(server.host, options=_NO_LIMIT)
        self._server = grpc.server(ThreadPoolExecutor(16, "pubsub-witness"), options=_NO_LIMIT)
        self._server.add_generic_rpc_handlers((_Through(self._behind, self._keep),))
        address = "127.0.0.1:0"
        if authority is None:
            self._port = self._server.add_insecure_port(address)
        else:
            certificate, key = authority.sign("pubsub", "127.0.0.1")
            pair = key.read_bytes(), certificate.read_bytes()
            self._port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        self._server.start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._port}"

    def stop(self) -> None:
        self._server.stop(None).wait()
        self._behind.close()

    def _keep(self, call: str, request: bytes, context: grpc.ServicerContext) -> None:
        read = getattr(types, f"{call}Request").pb().FromString(request)
        metadata = {item.key: item.value for item in context.invocation_metadata()}
        self.requests.append(RecordedRequest(call, read, metadata))


class _Through(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Forwards bytes in both directions."""

    def __init__(
        self, behind: grpc.Channel, keep: Callable[[str, bytes, grpc.ServicerContext], None]
    ) -> None:
        self._behind = behind
        self._keep = keep

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        call = self._behind.unary_unary(method)

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            self._keep(method.rpartition("/")[2], request, context)
            try:
                found: bytes = call(request, timeout=context.time_remaining())
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            return found

        return grpc.unary_unary_rpc_method_handler(answer)
