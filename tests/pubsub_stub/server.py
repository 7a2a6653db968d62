"""The rules behind gRPC, on loopback: a servicer of Google's own client."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.pubsub_v1.types import pubsub as types

from airflow_broadway.core.clock import Clock
from tests.pubsub_stub.broker import Broker
from tests.pubsub_stub.errors import Refused

__all__ = ["Stub"]

_PULL_WAITS = 90.0
#: Seconds of real time between two polls of a waiting pull, since the clock may be manual.
_LOOK = 0.02
_NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]


class Stub:
    """A server in this process, with its own port.

    :param patience: Seconds of real time for which a pull waits at most, if it finds nothing.

    ``broker`` has its rules, which tests change.
    """

    def __init__(
        self, clock: Clock | None = None, *, late_acks: bool = False, patience: float = _PULL_WAITS
    ) -> None:
        self.broker = Broker(clock, late_acks=late_acks)
        self._patience = patience
        self._ending = False
        self._server = grpc.server(ThreadPoolExecutor(64, "pubsub-stub"), options=_NO_LIMIT)
        self._server.add_generic_rpc_handlers((self._publisher(), self._subscriber()))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def stop(self) -> None:
        """Ends the server."""
        self._ending = True
        with self.broker.changed:
            self.broker.changed.notify_all()
        self._server.stop(None).wait()

    # -- the services --------------------------------------------------------------------------

    def _publisher(self) -> grpc.GenericRpcHandler:
        broker = self.broker

        def publish(request: Any) -> Any:
            return types.PublishResponse.pb()(message_ids=broker.publish(request))

        def detach(request: Any) -> Any:
            broker.detach_subscription(request)
            return types.DetachSubscriptionResponse.pb()()

        calls: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "CreateTopic": (types.Topic, broker.create_topic),
            "GetTopic": (types.GetTopicRequest, broker.get_topic),
            "DeleteTopic": (types.DeleteTopicRequest, broker.delete_topic),
            "Publish": (types.PublishRequest, publish),
            "DetachSubscription": (types.DetachSubscriptionRequest, detach),
        }
        return grpc.method_handlers_generic_handler(
            "google.pubsub.v1.Publisher",
            {name: self._call(name, *kinds) for name, kinds in calls.items()},
        )

    def _subscriber(self) -> grpc.GenericRpcHandler:
        broker = self.broker

        def snapshot(request: Any) -> Any:
            topic = broker.create_snapshot(request)
            return types.Snapshot.pb()(name=request.name, topic=topic)

        def seek(request: Any) -> Any:
            broker.seek(request)
            return types.SeekResponse.pb()()

        calls: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "CreateSubscription": (types.Subscription, broker.create_subscription),
            "GetSubscription": (types.GetSubscriptionRequest, broker.get_subscription),
            "DeleteSubscription": (types.DeleteSubscriptionRequest, broker.delete_subscription),
            "Acknowledge": (types.AcknowledgeRequest, broker.acknowledge),
            "ModifyAckDeadline": (types.ModifyAckDeadlineRequest, broker.modify_ack_deadline),
            "CreateSnapshot": (types.CreateSnapshotRequest, snapshot),
            "Seek": (types.SeekRequest, seek),
        }
        handlers = {name: self._call(name, *kinds) for name, kinds in calls.items()}
        handlers["Pull"] = grpc.unary_unary_rpc_method_handler(
            self._pull,
            request_deserializer=types.PullRequest.pb().FromString,
            response_serializer=types.PullResponse.pb().SerializeToString,
        )
        return grpc.method_handlers_generic_handler("google.pubsub.v1.Subscriber", handlers)

    def _call(self, name: str, request: Any, work: Callable[[Any], Any]) -> grpc.RpcMethodHandler:
        def answer(call: Any, context: grpc.ServicerContext) -> Any:
            try:
                with self.broker.changed:
                    lost = self._asked(name, call)
                    done = work(call)
                    self.broker.changed.notify_all()
                if lost is not None:
                    raise lost
            except Refused as refused:
                context.abort_with_status(refused.status())
            return Empty() if done is None else done

        return grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=request.pb().FromString,
            response_serializer=lambda found: found.SerializeToString(),
        )

    def _asked(self, name: str, request: Any) -> Refused | None:
        """Counts a request, and raises a refusal of the test."""
        self.broker.requests[name] += 1
        given = self.broker.answer(name, request)
        if given is not None and not given.done:
            raise given
        return given

    def _pull(self, request: Any, context: grpc.ServicerContext) -> Any:
        remaining = context.time_remaining()
        # As the emulator: a second before the client's deadline, since an unread answer is lost.
        wait = self._patience if remaining is None else min(self._patience, remaining - 1.0)
        end = time.monotonic() + (0.0 if request.return_immediately else wait)
        try:
            with self.broker.changed:
                lost = self._asked("Pull", request)
                while True:
                    found = self.broker.pull(request)
                    left = end - time.monotonic()
                    if found or left <= 0 or self._ending or not context.is_active():
                        break
                    self.broker.changed.wait(min(left, _LOOK))
                answer = types.PullResponse.pb()(
                    received_messages=self.broker.shown(request.subscription, found)
                )
            if lost is not None:
                raise lost
        except Refused as refused:
            context.abort_with_status(refused.status())
        return answer
