"""Addresses and credentials of brokers.

The password is passed to pika only; it never reaches a ``repr``, a log or an error.
"""

from __future__ import annotations

import math
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import ConnectionMissing
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

#: RabbitMQ's default ``frame_max``.
_FRAME_MAX = 131072
#: The keys of the extra ``tls`` when it is an object.
_TLS = ("ca", "cert", "key", "server_name", "verify")
#: Numeric extras, which are fields of an address: default, minimum and maximum.
_NUMBERS: Mapping[str, tuple[float, float, float]] = {
    "heartbeat": (60, 0, 65535),
    "timeout": (30.0, 0.01, 1e6),
    "blocked_connection_timeout": (300.0, 0.01, 1e6),
    "frame_max": (_FRAME_MAX, 4096, _FRAME_MAX),
    "channel_max": (2047, 16, 65535),
}
#: Extras that may be in the query of a URI.
_URI_EXTRAS = {*_NUMBERS, "auth_mechanism", "management_url"}
#: Types of Airflow connections to RabbitMQ.
_TYPES = ("rabbitmq", "amqp", "amqps", "generic", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A broker's address and credentials.

    :param others: More hosts of the same cluster, with their ports, if the first is unavailable.
    :param heartbeat: Heartbeat timeout in seconds; 0 disables heartbeats.
    :param timeout: Connection timeout in seconds.
    :param blocked_connection_timeout: Seconds after which a blocked connection counts as lost.
    :param frame_max: The maximum frame size in bytes, before negotiation with the broker.
    :param channel_max: The maximum number of channels, before negotiation with the broker.
    :param client_properties: Client properties in addition to the connection's name.
    :param external: Whether to authenticate by the certificate (``EXTERNAL``) instead of ``login``.
    :param tls: ``None`` without TLS; else ``ca``, ``cert``, ``key`` (paths), ``verify``,
        ``server_name``.
    :param management_url: The management API; ``None``: on its default port of ``host``; empty:
        disabled.
    """

    host: str = "localhost"
    port: int = 5672
    login: str = "guest"
    password: str = field(default="guest", repr=False)
    virtual_host: str = "/"
    heartbeat: int = 60
    timeout: float = 30.0
    blocked_connection_timeout: float = 300.0
    others: tuple[tuple[str, int], ...] = ()
    frame_max: int = _FRAME_MAX
    channel_max: int = 2047
    client_properties: Mapping[str, Any] = field(default_factory=dict, repr=False)
    external: bool = False
    tls: Mapping[str, Any] | None = field(default=None, repr=False)
    name: str = "airflow-broadway"
    management_url: str | None = field(default=None, repr=False)

    @property
    def netloc(self) -> str:
        """Host and port, for display."""
        return f"{self.host}:{self.port}"

    def hosts(self) -> Iterator[Address]:
        """Yields one address per host, the primary host first."""
        for host, port in ((self.host, self.port), *self.others):
            yield replace(self, host=host, port=port, others=())

    def parameters(self) -> Any:
        """Returns pika's connection parameters.

        :raises ConnectionMissing: If the files that ``tls`` names cannot be used.
        """
        import pika
        from pika.credentials import ExternalCredentials

        credentials = pika.PlainCredentials(self.login, self.password)
        context = self.ssl_context()
        server_name = (self.tls or {}).get("server_name") or self.host
        return pika.ConnectionParameters(
            host=self.host,
            port=self.port,
            virtual_host=self.virtual_host,
            credentials=ExternalCredentials() if self.external else credentials,
            heartbeat=self.heartbeat,
            blocked_connection_timeout=self.blocked_connection_timeout,
            socket_timeout=self.timeout,
            stack_timeout=self.timeout,
            connection_attempts=1,
            ssl_options=None if context is None else pika.SSLOptions(context, server_name),
            client_properties={"connection_name": self.name, **self.client_properties},
            frame_max=self.frame_max,
            channel_max=self.channel_max,
        )

    def ssl_context(self) -> ssl.SSLContext | None:
        """Returns the SSL context; ``None`` without TLS.

        :raises ConnectionMissing: If the files that ``tls`` names cannot be used.
        """
        tls = self.tls
        if tls is None:
            return None
        try:
            context = ssl.create_default_context(cafile=tls.get("ca") or None)
            if tls.get("cert"):
                context.load_cert_chain(tls["cert"], tls.get("key") or None)
        except (OSError, ssl.SSLError) as error:
            raise ConnectionMissing(
                f"the TLS files for RabbitMQ at {self.netloc} cannot be used: {error}"
            ) from None
        if tls.get("verify") is False:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def address_for(options: RabbitMQOptions, env: ProducerEnv) -> Address:
    """Returns the address of a producer's broker.

    :raises ConnectionMissing: If the connection is missing or incomplete.
    """
    name = options.name or f"airflow-broadway {env.pipeline} {env.owner.get('run_id', '')}".strip()
    if options.uri is not None:
        return address_of_uri(options.uri, name=name)
    return address_of(env.connections.get(str(options.conn_id)), name=name)


def address_of(connection: Connection, *, name: str) -> Address:
    """Returns the address in an Airflow connection.

    Its host may list several, ``"a, b:5673"``; its schema is the virtual host.  The extras are in
    ``docs/rabbitmq.md``; an extra that is ``null`` or empty is ignored.

    :raises ConnectionMissing: If it is a connection to another service, or is incomplete.
    """
    label = f"the connection {connection.conn_id!r}"
    if connection.conn_type not in _TYPES:
        raise ConnectionMissing(
            f"{label} is of type {connection.conn_type!r}; RabbitMQ needs one of type 'rabbitmq'"
        )
    extra = {key: value for key, value in connection.extra.items() if value not in (None, "")}
    tls = _tls_settings(connection, extra, label)
    hosts = _parse_hosts(connection.host, int(connection.port or (5672 if tls is None else 5671)))
    if not hosts:
        raise ConnectionMissing(f"{label} names no host")
    mechanism = str(extra.get("auth_mechanism", "plain")).lower()
    external = mechanism == "external"
    properties = extra.get("client_properties", {})
    url = extra.get("management_url")
    url = "" if url is False or url == "false" else url
    for extra_name, is_valid, rule in (
        ("auth_mechanism", mechanism in ("plain", "external"), "must be plain or external"),
        (
            "auth_mechanism",
            not external or (tls or {}).get("cert"),
            "is external, which needs TLS with a certificate: the extras 'tls_cert' and 'tls_key'",
        ),
        ("client_properties", isinstance(properties, Mapping), "must be an object"),
        (
            "management_url",
            url is None or isinstance(url, str),
            "must be an address, http(s)://host:port, or false",
        ),
    ):
        if not is_valid:
            raise ConnectionMissing(f"{label}: its extra {extra_name!r} {rule}")
    default = "" if external else "guest"
    return Address(
        host=hosts[0][0],
        port=hosts[0][1],
        others=tuple(hosts[1:]),
        login=connection.login or default,
        password=connection.password or default,
        virtual_host=connection.schema or "/",
        client_properties=dict(properties),
        external=external,
        tls=tls,
        name=name,
        management_url=url,
        **{number: _read_number(extra, number, label) for number in _NUMBERS},
    )


def _parse_hosts(text: str, port: int) -> list[tuple[str, int]]:
    """Parses a list of hosts with their ports, such as ``"a, b:5673, [::1]:5674"``."""
    hosts = []
    for part in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"(\[[^\]]*\]|[^:]+):(\d{1,5})", part)
        host, own_port = (match[1], int(match[2])) if match else (part, port)
        if host.strip("[]"):
            hosts.append((host.strip("[]"), own_port))
    return hosts


def _tls_settings(
    connection: Connection, extra: Mapping[str, Any], label: str
) -> Mapping[str, Any] | None:
    """Returns the TLS settings of the extra ``tls``, true or an object, and of ``tls_ca`` etc."""
    tls = extra.get("tls")
    single = {name: extra[f"tls_{name}"] for name in _TLS if f"tls_{name}" in extra}
    if tls is False:
        return None
    if tls is True or (tls is None and (single or connection.conn_type == "amqps")):
        tls = {}
    if tls is not None and not isinstance(tls, Mapping):
        raise ConnectionMissing(f"{label}: its extra 'tls' must be true, false or an object")
    return None if tls is None else {**tls, **single}


def _read_number(extra: Mapping[str, Any], name: str, label: str) -> Any:
    default, low, high = _NUMBERS[name]
    try:
        value = float(extra.get(name, default))
    except (TypeError, ValueError):
        value = math.nan
    if not low <= value <= high:
        raise ConnectionMissing(
            f"{label}: its extra {name!r} must be a number from {low:,g} to {high:,g}"
        )
    return type(default)(value)


def address_of_uri(uri: str, *, name: str) -> Address:
    """Returns the address in an ``amqp://`` or ``amqps://`` URI.

    :raises ConnectionMissing: If the URI is invalid; it may have a password, so the error omits it.
    """
    try:
        parts = urlsplit(uri)
    except ValueError:
        parts = urlsplit("")
    user, _, hosts = parts.netloc.rpartition("@")
    login, _, password = user.partition(":")
    names = [host for host, _ in _parse_hosts(unquote(hosts), 0)]
    if parts.scheme not in ("amqp", "amqps") or not hosts or any(h.count(":") == 1 for h in names):
        raise ConnectionMissing(
            "the address of RabbitMQ must be amqp://user:password@host:port/virtual-host"
        )
    query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    if "connection_timeout" in query:
        query["timeout"] = query.pop("connection_timeout")
    connection = Connection(
        conn_id="of the option 'uri'",
        conn_type=parts.scheme,
        host=unquote(hosts),
        login=unquote(login),
        password=unquote(password),
        schema=unquote(parts.path[1:]),
        extra={key: value for key, value in query.items() if key in _URI_EXTRAS},
    )
    return address_of(connection, name=name)
