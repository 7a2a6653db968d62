"""Opens Google's gRPC client by the connection, sends requests, and translates errors.

One call here is one request.  The client is thread-safe.

Credentials are the documented fields of ``google_cloud_platform`` in the connection's extra, with
or without the prefix of old Airflow releases.  The Google provider handles other fields, such as a
key in Secret Manager.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import BroadwayError, ConnectionMissing
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.producers.engine.port import Hidden, Refusal
from airflow_broadway.producers.kit.checks import connection_of, warn_of_plain_http
from airflow_broadway.producers.pubsub.errors import codes_of, shown, translated
from airflow_broadway.producers.pubsub.options import DEFAULT_CONNECTION, EMULATOR, PubSubProducer

if TYPE_CHECKING:
    from google.pubsub_v1 import PublisherClient, SubscriberClient

log = logging.getLogger(__name__)

_GLOBAL: Final = "pubsub.googleapis.com:443"
#: A message may be 10 MB, and a response contains up to a thousand.  The results of an exactly-once
#: subscription are gRPC metadata, with the size limit of Google's own channels.  Some networks drop
#: idle connections, so keepalive is on.
_CHANNEL: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_metadata_size", 4 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 30_000),
)


_PREFIX: Final = "extra__google_cloud_platform__"
_SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
#: Fields that select the key; a connection may have one of them.
_KEYS: Final = ("keyfile_dict", "key_path", "credential_config_file", "key_secret_name")
#: Fields that only the Google provider supports.
_PROVIDERS: Final = ("key_secret_name", "idp_extra_params", "client_secret")


class Client:
    """A client of one subscription and of topics.

    :param channel: The gRPC channel.
    :param name: The subscription's full name.
    :param where: The endpoint, for error messages.
    :param timeout: The timeout of requests other than pulls, in seconds.
    :param login: Called before each request to refresh the access token.
    :raises BroadwayError: From every call, as translated by ``errors``.
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
        """The subscription's project."""
        return self.name.split("/")[1]

    def topic(self, name: str) -> str:
        """Returns a topic's full name."""
        return name if "/" in name else f"projects/{self.project}/topics/{name}"

    def other(self, subscription: str) -> Client:
        """Opens another subscription over the same channel, closed with this one.

        :param subscription: Its id or full name.
        """
        client = copy.copy(self)
        if "/" not in subscription:
            subscription = f"projects/{self.project}/subscriptions/{subscription}"
        client.name = subscription
        return client

    def pull(self, count: int, wait: float) -> Sequence[Any]:
        """Sends one ``Pull`` of at most ``count`` messages; returns protobuf messages.

        :param wait: Seconds to wait for the first message.
        """
        from google.api_core.exceptions import DeadlineExceeded
        from google.pubsub_v1.types import PullResponse

        request = {"subscription": self.name, "max_messages": count}
        with self._requesting("Pull"):
            try:
                response = self._subscriber.pull(request=request, retry=None, timeout=wait)
            except DeadlineExceeded:  # no message arrived in time
                return ()
        # The raw protobuf messages, because proto-plus wrappers are slow.
        messages: Sequence[Any] = PullResponse.pb(response).received_messages
        return messages

    def remove(self, ack_ids: Sequence[str]) -> Mapping[int, Refusal]:
        """Sends one ``Acknowledge``; an exactly-once subscription may reject single ack ids."""
        return self._send_ack_ids("Acknowledge", self._subscriber.acknowledge, ack_ids)

    def hide(self, hidden: Sequence[Hidden]) -> Mapping[int, Refusal]:
        """Sends one ``ModifyAckDeadline``; all entries have one deadline."""
        ack_ids, call = [entry.receipt for entry in hidden], self._subscriber.modify_ack_deadline
        seconds = hidden[0].seconds
        return self._send_ack_ids("ModifyAckDeadline", call, ack_ids, ack_deadline_seconds=seconds)

    def _send_ack_ids(
        self, action: str, call: Callable[..., Any], ack_ids: Sequence[str], **arguments: int
    ) -> Mapping[int, Refusal]:
        request = {"subscription": self.name, "ack_ids": ack_ids, **arguments}
        with self._requesting(action):
            try:
                call(request=request, retry=None, timeout=self.timeout)
            except Exception as error:
                codes = codes_of(error)
                if not codes:
                    raise
                return {
                    index: _refusal(codes[ack_id])
                    for index, ack_id in enumerate(ack_ids)
                    if ack_id in codes
                }
        return {}

    def settings(self) -> Any:
        """Sends one ``GetSubscription``; returns the subscription's settings."""
        with self._requesting("GetSubscription"):
            return self._subscriber.get_subscription(
                subscription=self.name, retry=None, timeout=self.timeout
            )

    def publish(self, topic: str, messages: Sequence[Any]) -> Mapping[int, Refusal]:
        """Sends one ``Publish``, which publishes all messages or none."""
        request: Any = {"topic": topic, "messages": messages}
        with self._requesting("Publish", topic):
            self._publisher.publish(request=request, retry=None, timeout=self.timeout)
        return {}

    def has_topic(self, topic: str) -> None:
        """Sends one ``GetTopic``.

        :raises BroadwayError: If there is no such topic, or GetTopic is denied.
        """
        with self._requesting("GetTopic", topic):
            self._publisher.get_topic(topic=topic, retry=None, timeout=self.timeout)

    @contextmanager
    def _requesting(self, action: str, topic: str = "") -> Iterator[None]:
        """Logs in before a single request, and translates its errors."""
        try:
            self._login()
            yield
        except Exception as error:
            raise translated(error, action, topic or self.name, self.where) from shown(error)

    def close(self) -> None:
        """Releases the connection.  Safe to repeat."""
        self._channel.close()


def _refusal(code: str) -> Refusal:
    if code.startswith("TRANSIENT_"):
        return Refusal(code, "Pub/Sub could not do it just now", again=True)
    return Refusal(code, "the ack id is valid no longer", invalid=True)


def open_client(producer: PubSubProducer, env: ProducerEnv) -> Client:
    """Opens the producer's subscription.

    :raises ConnectionMissing: If there are no credentials, or the project is unknown.
    """
    emulator = _emulator(producer)
    where, timeout = producer.endpoint or _GLOBAL, producer.request_timeout
    try:
        if emulator is not None:
            connection = _connection(producer, env)
            project = None if connection is None else _fields(connection.extra).get("project")
            name = _full_name(producer, project)
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
    """Opens a client of Cloud Monitoring.

    :returns: ``None``, after a log line, for an emulator or if the client is not installed.
    :raises ConnectionMissing: If there are no credentials.
    """
    unknown = "The depth of %r is not known: %s."
    if _emulator(producer) is not None:
        log.info(unknown, producer.subscription, "an emulator has no Cloud Monitoring")
        return None
    try:
        from google.cloud.monitoring_v3 import MetricServiceClient
    except ImportError as error:
        reason = f"{error.name} is not installed: install airflow-broadway[pubsub]"
        log.info(unknown, producer.subscription, reason)
        return None
    return MetricServiceClient(credentials=credentials_of(producer, env)[0])


def _emulator(producer: PubSubProducer) -> str | None:
    """Returns host and port of the emulator; ``None`` for Google's own endpoints."""
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


# -- credentials -----------------------------------------------------------------------------------


def credentials_of(producer: PubSubProducer, env: ProducerEnv) -> tuple[Any, str | None]:
    """Returns the credentials of the connection, else ADC, and the project for short names.

    :raises ConnectionMissing: If there are none, or they cannot be read; it contains no secret.
    """
    connection = _connection(producer, env)
    if connection is None:
        log.info("There is no connection: Application Default Credentials are used.")
    extra = {} if connection is None else _fields(connection.extra)
    scopes = _parse_list(extra.get("scope") or extra.get("scopes")) or [_SCOPE]
    try:
        credentials, project = _credentials(connection, extra, scopes)
        chain = _parse_list(extra.get("impersonation_chain"))
        if chain and not any(extra.get(name) for name in _PROVIDERS):  # the provider does so itself
            credentials = _impersonate(credentials, chain, scopes)
        quota = extra.get("quota_project_id")
        if quota and hasattr(credentials, "with_quota_project"):
            credentials = credentials.with_quota_project(quota)
    except ConnectionMissing:
        raise
    except Exception as error:
        # The error's text may quote the key.
        raise ConnectionMissing(_unusable(connection, error)) from None
    return credentials, extra.get("project") or project or None


def login_of(credentials: Any, where: str, timeout: float) -> Callable[[], None]:
    """Returns a function that refreshes the access token if it is due.

    gRPC would refresh it in a thread of its own, and report a rejection as an outage.

    :param timeout: The timeout of a token request, in seconds.
    :raises GoogleAuthError: From the returned function, if no token can be obtained.
    """
    from google.auth.transport.requests import Request

    request = partial(cast(Any, Request)(), timeout=timeout)
    return lambda: credentials.before_request(request, "POST", where, {})


def _credentials(
    connection: Connection | None, extra: Mapping[str, Any], scopes: list[str]
) -> tuple[Any, str | None]:
    from google import auth

    keys = [name for name in _KEYS if extra.get(name)]
    if len(keys) > 1:
        raise ConnectionMissing(
            f"the connection {_name(connection)} has {' and '.join(keys)}: it needs one of them"
        )
    if connection is not None and any(extra.get(name) for name in _PROVIDERS):
        return _by_provider(connection, extra)
    google_auth = cast(Any, auth)  # its functions are untyped
    loaded: tuple[Any, str | None]
    if not keys:
        loaded = google_auth.default(scopes=scopes)
        return loaded
    value = extra[keys[0]]
    with warnings.catch_warnings():
        # It warns of untrusted configurations; a connection is trusted.
        warnings.simplefilter("ignore", DeprecationWarning)
        if not isinstance(value, Mapping) and value.lstrip()[:1] != "{":
            loaded = google_auth.load_credentials_from_file(value, scopes=scopes)
            return loaded
        info = dict(value if isinstance(value, Mapping) else json.loads(value))
        if "private_key" in info:
            # As the Google provider does: in environment variables \n is two characters.
            info["private_key"] = str(info["private_key"]).replace("\\n", "\n")
        loaded = google_auth.load_credentials_from_dict(info, scopes=scopes)
    return loaded


def _impersonate(credentials: Any, chain: list[str], scopes: list[str]) -> Any:
    from google.auth.impersonated_credentials import Credentials

    *delegates, target = chain
    impersonated: Any = cast(Any, Credentials)(
        source_credentials=credentials,
        target_principal=target,
        delegates=delegates,
        target_scopes=scopes,
    )
    return impersonated


def _by_provider(connection: Connection, extra: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Loads credentials by Airflow's Google provider, which supports all other fields."""
    try:
        from airflow.providers.google.common.hooks.base_google import GoogleBaseHook
    except ImportError:
        field = next(name for name in _PROVIDERS if extra.get(name))
        raise ConnectionMissing(
            f"the connection {_name(connection)} has {field}, which needs"
            " apache-airflow-providers-google: install it, or give the connection a key, a key"
            " file or a credential configuration"
        ) from None
    loaded: tuple[Any, str | None] = GoogleBaseHook(
        gcp_conn_id=connection.conn_id
    ).get_credentials_and_project_id()
    return loaded


def _connection(producer: PubSubProducer, env: ProducerEnv) -> Connection | None:
    return connection_of(
        env,
        producer.conn_id,
        default=DEFAULT_CONNECTION,
        types=("google_cloud_platform", "gcpubsub"),
        service="Pub/Sub",
    )


def _fields(extra: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        name.removeprefix(_PREFIX): value
        for name, value in extra.items()
        if name.startswith(_PREFIX)
    }
    fields.update({name: value for name, value in extra.items() if not name.startswith(_PREFIX)})
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _parse_list(value: Any) -> list[str]:
    """Parses a list, or text with commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [str(part) for part in value] if isinstance(value, Sequence) else []


def _unusable(connection: Connection | None, error: Exception) -> str:
    from google.auth.exceptions import DefaultCredentialsError

    if connection is None or not any(_fields(connection.extra).get(name) for name in _KEYS):
        cause = "" if isinstance(error, DefaultCredentialsError) else f" ({type(error).__name__})"
        return (
            f"there are no Google credentials{cause}: give the connection a key (keyfile_dict), a"
            " key file (key_path) or a credential configuration, or the machine Application Default"
            " Credentials; an emulator is named by PUBSUB_EMULATOR_HOST"
        )
    return (
        f"the credentials of the connection {_name(connection)} cannot be read"
        f" ({type(error).__name__}): keyfile_dict is the JSON of a service account's key, key_path"
        " and credential_config_file are files that every worker has"
    )


def _name(connection: Connection | None) -> str:
    return repr("" if connection is None else connection.conn_id)
