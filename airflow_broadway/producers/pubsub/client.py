"""The way to one subscription: Google's gRPC client, opened by the connection, errors translated.

One call here is one request.  The client may be used from several threads.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import BroadwayError, ConnectionMissing
from airflow_broadway.producers.engine.port import Hidden, Refusal
from airflow_broadway.producers.kit.checks import warn_of_plain_http
from airflow_broadway.producers.pubsub.credentials import credentials_of, login_of, project_of
from airflow_broadway.producers.pubsub.errors import shown, translated, words_of
from airflow_broadway.producers.pubsub.options import EMULATOR, PubSubProducer

if TYPE_CHECKING:
    from google.pubsub_v1 import PublisherClient, SubscriberClient

log = logging.getLogger(__name__)

_GLOBAL: Final = "pubsub.googleapis.com:443"
#: A message may be 10 MB, and an answer holds a thousand.  What an exactly-once subscription says
#: of each id is metadata: Google's own channels have as much room.  What is silent for long is
#: dropped by some networks.
_CHANNEL: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_metadata_size", 4 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 30_000),
)


class Client:
    """One subscription, and topics beside it.

    :param channel: Of gRPC.
    :param name: The subscription's full name.
    :param where: The endpoint, for people.
    :param timeout: Seconds that a request other than a pull may take.
    :param login: Called before each request: there is a token when it returns.
    :raises BroadwayError: From every call, in the words of ``errors``.
    """

    def __init__(
        self,
        channel: Any,
        name: str,
        where: str,
        timeout: float,
        login: Callable[[], None] = lambda: None,
    ) -> None:
        from google.pubsub_v1 import PublisherClient, SubscriberClient
        from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
        from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

        self.name = name
        self.where = where
        self.timeout = timeout
        self._login = login
        self._channel = channel
        self._subscriber: SubscriberClient = SubscriberClient(
            transport=SubscriberGrpcTransport(channel=channel)
        )
        self._publisher: PublisherClient = PublisherClient(
            transport=PublisherGrpcTransport(channel=channel)
        )

    @property
    def project(self) -> str:
        """Returns the subscription's project."""
        return self.name.split("/")[1]

    def topic(self, name: str) -> str:
        """Returns a topic's full name."""
        return name if "/" in name else f"projects/{self.project}/topics/{name}"

    def other(self, subscription: str) -> Client:
        """Opens another subscription over the same connection, closed with this one.

        :param subscription: Its id or full name.
        """
        made = copy.copy(self)
        if "/" not in subscription:
            subscription = f"projects/{self.project}/subscriptions/{subscription}"
        made.name = subscription
        return made

    def pull(self, count: int, wait: float) -> Sequence[Any]:
        """Sends one ``Pull`` of at most ``count`` messages, as protobuf has them.

        :param wait: Seconds for which to wait for the first.
        """
        from google.api_core.exceptions import DeadlineExceeded
        from google.pubsub_v1.types import PullResponse

        request = {"subscription": self.name, "max_messages": count}
        with self._requesting("Pull"):
            try:
                answer = self._subscriber.pull(request=request, retry=None, timeout=wait)
            except DeadlineExceeded:  # there was nothing
                return ()
        # Google's wrapper of a message takes longer to read than all the rest.
        messages: Sequence[Any] = PullResponse.pb(answer).received_messages
        return messages

    def remove(self, ack_ids: Sequence[str]) -> Mapping[int, Refusal]:
        """Sends one ``Acknowledge``; an exactly-once subscription may refuse single ids."""
        return self._confirmed("Acknowledge", self._subscriber.acknowledge, ack_ids)

    def hide(self, hidden: Sequence[Hidden]) -> Mapping[int, Refusal]:
        """Sends one ``ModifyAckDeadline``; all entries have one deadline."""
        ack_ids, call = [entry.receipt for entry in hidden], self._subscriber.modify_ack_deadline
        seconds = hidden[0].seconds
        return self._confirmed("ModifyAckDeadline", call, ack_ids, ack_deadline_seconds=seconds)

    def _confirmed(
        self, action: str, call: Callable[..., Any], ack_ids: Sequence[str], **more: int
    ) -> Mapping[int, Refusal]:
        request = {"subscription": self.name, "ack_ids": ack_ids, **more}
        with self._requesting(action):
            try:
                call(request=request, retry=None, timeout=self.timeout)
            except Exception as error:
                words = words_of(error)
                if not words:
                    raise
                return {
                    place: _refusal(words[ack_id])
                    for place, ack_id in enumerate(ack_ids)
                    if ack_id in words
                }
        return {}

    def settings(self) -> Any:
        """Sends one ``GetSubscription``: how it is set up."""
        with self._requesting("GetSubscription"):
            return self._subscriber.get_subscription(
                subscription=self.name, retry=None, timeout=self.timeout
            )

    def publish(self, topic: str, messages: Sequence[Any]) -> Mapping[int, Refusal]:
        """Sends one ``Publish``, of all or none of the messages."""
        request: Any = {"topic": topic, "messages": messages}
        with self._requesting("Publish", topic):
            self._publisher.publish(request=request, retry=None, timeout=self.timeout)
        return {}

    def has_topic(self, topic: str) -> None:
        """Sends one ``GetTopic``.

        :raises BroadwayError: If there is no such topic, or it may not be asked for.
        """
        with self._requesting("GetTopic", topic):
            self._publisher.get_topic(topic=topic, retry=None, timeout=self.timeout)

    @contextmanager
    def _requesting(self, action: str, topic: str = "") -> Iterator[None]:
        """Logs in before a request, which is sent once, and translates its errors."""
        try:
            self._login()
            yield
        except Exception as error:
            raise translated(error, action, topic or self.name, self.where) from shown(error)

    def close(self) -> None:
        """Releases the connection.  Safe to repeat."""
        self._channel.close()


def _refusal(word: str) -> Refusal:
    if word.startswith("TRANSIENT_"):
        return Refusal(word, "Pub/Sub could not do it just now", again=True)
    return Refusal(word, "the ack id is valid no longer", gone=True)


def open_client(producer: PubSubProducer, env: ProducerEnv) -> Client:
    """Opens the producer's subscription.

    :raises ConnectionMissing: If there are no credentials, or nothing says the project.
    """
    emulator = _emulator(producer)
    where, timeout = producer.endpoint or _GLOBAL, producer.request_timeout
    try:
        if emulator is not None:
            name = _full_name(producer, project_of(producer, env))
            import grpc

            channel = grpc.insecure_channel(emulator, options=_CHANNEL)
            return Client(channel, name, emulator, timeout)
        credentials, project = credentials_of(producer, env)
        name = _full_name(producer, project)
        login = login_of(credentials, where, timeout)
        return Client(_secure(where, credentials), name, where, timeout, login)
    except ImportError as error:
        raise ConnectionMissing(
            f"Pub/Sub needs Google's client, and {error.name} is not installed: install"
            " airflow-broadway[pubsub]"
        ) from None
    except BroadwayError:
        raise
    except Exception as error:
        name = producer.subscription
        raise translated(error, "opening a client", name, where) from shown(error)


def open_metrics(producer: PubSubProducer, env: ProducerEnv) -> Any:
    """Opens a client of Cloud Monitoring; ``None``, and a line in the log, at an emulator, or where
    it is not installed.

    :raises ConnectionMissing: If there are no credentials.
    """
    unknown = "The depth of %r is not known: %s."
    if _emulator(producer) is not None:
        log.info(unknown, producer.subscription, "an emulator has no Cloud Monitoring")
        return None
    try:
        from google.cloud.monitoring_v3 import MetricServiceClient
    except ImportError as error:
        why = f"{error.name} is not installed: install airflow-broadway[pubsub]"
        log.info(unknown, producer.subscription, why)
        return None
    return MetricServiceClient(credentials=credentials_of(producer, env)[0])


def _emulator(producer: PubSubProducer) -> str | None:
    """Returns host and port of an emulator, if there is one."""
    if producer.endpoint is None:
        return os.environ.get(EMULATOR) or None
    if not producer.endpoint.startswith("http://"):
        return None
    warn_of_plain_http(producer.endpoint, "The messages of Pub/Sub")
    return producer.endpoint.removeprefix("http://").rstrip("/")


def _full_name(producer: PubSubProducer, project: str | None) -> str:
    if "/" in producer.subscription:
        return producer.subscription
    project_id = producer.project_id or project or os.environ.get("GOOGLE_CLOUD_PROJECT")
    if not project_id:
        raise ConnectionMissing(
            f"nothing says in which project the subscription {producer.subscription!r} is: give the"
            " producer project_id, or its connection a project, or use its full name"
        )
    return f"projects/{project_id}/subscriptions/{producer.subscription}"


def _secure(host: str, credentials: Any) -> Any:
    from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

    return SubscriberGrpcTransport.create_channel(
        host if ":" in host else f"{host}:443", credentials=credentials, options=_CHANNEL
    )
