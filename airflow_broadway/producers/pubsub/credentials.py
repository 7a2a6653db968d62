"""Loads the credentials of a connection: the documented fields of ``google_cloud_platform``.

A field may be in the connection's extra as such, or with the prefix that old releases of Airflow
wrote.  What only the Google provider knows, such as a key in Secret Manager, is left to it.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from airflow_broadway.core.custody.producer import Connection
from airflow_broadway.core.errors import ConnectionMissing
from airflow_broadway.producers.kit.checks import connection_of
from airflow_broadway.producers.pubsub.options import DEFAULT_CONNECTION

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.pubsub.options import PubSubProducer

log = logging.getLogger(__name__)

_PREFIX: Final = "extra__google_cloud_platform__"
_SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
#: Fields that say which key, of which a connection has one.
_KEYS: Final = ("keyfile_dict", "key_path", "credential_config_file", "key_secret_name")
#: Fields that only the Google provider knows how to follow.
_PROVIDERS: Final = ("key_secret_name", "idp_extra_params", "client_secret")


def credentials_of(producer: PubSubProducer, env: ProducerEnv) -> tuple[Any, str | None]:
    """Returns the credentials that the connection describes, else Application Default Credentials;
    and the project that either names, where short names are looked up.

    :raises ConnectionMissing: If there are none, or they cannot be read; no secret is in it.
    """
    connection = _connection(producer, env)
    if connection is None:
        log.info("There is no connection: Application Default Credentials are used.")
    extra = {} if connection is None else _fields(connection.extra)
    scopes = _listed(extra.get("scope") or extra.get("scopes")) or [_SCOPE]
    try:
        credentials, project = _credentials(connection, extra, scopes)
        chain = _listed(extra.get("impersonation_chain"))
        if chain and not any(extra.get(name) for name in _PROVIDERS):  # which impersonates itself
            credentials = _impersonated(credentials, chain, scopes)
        quota = extra.get("quota_project_id")
        if quota and hasattr(credentials, "with_quota_project"):
            credentials = credentials.with_quota_project(quota)
    except ConnectionMissing:
        raise
    except Exception as error:
        # Its text may quote the key.
        raise ConnectionMissing(_unusable(connection, error)) from None
    return credentials, extra.get("project") or project or None


def login_of(credentials: Any, where: str, timeout: float) -> Callable[[], None]:
    """Makes sure that there is a token, asking for one where that is due.

    gRPC would ask for it in a thread of its own, and call what Google refuses an outage.

    :param timeout: Seconds that it may take.
    :raises GoogleAuthError: From what is returned, if there is no token.
    """
    from google.auth.transport.requests import Request

    request = partial(cast(Any, Request)(), timeout=timeout)
    return lambda: credentials.before_request(request, "POST", where, {})


def project_of(producer: PubSubProducer, env: ProducerEnv) -> str | None:
    """Returns the project that the connection names, without asking for credentials."""
    connection = _connection(producer, env)
    return None if connection is None else _fields(connection.extra).get("project") or None


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
    google_auth = cast(Any, auth)  # which has no types of these
    loaded: tuple[Any, str | None]
    if not keys:
        loaded = google_auth.default(scopes=scopes)
        return loaded
    value = extra[keys[0]]
    with warnings.catch_warnings():
        # It warns of configurations from strangers; a connection is the user's own.
        warnings.simplefilter("ignore", DeprecationWarning)
        if not isinstance(value, Mapping) and value.lstrip()[:1] != "{":
            loaded = google_auth.load_credentials_from_file(value, scopes=scopes)
            return loaded
        info = dict(value if isinstance(value, Mapping) else json.loads(value))
        if "private_key" in info:
            # As the Google provider does it: environment variables have \n as two characters.
            info["private_key"] = str(info["private_key"]).replace("\\n", "\n")
        loaded = google_auth.load_credentials_from_dict(info, scopes=scopes)
    return loaded


def _impersonated(credentials: Any, chain: list[str], scopes: list[str]) -> Any:
    from google.auth.impersonated_credentials import Credentials

    *delegates, target = chain
    made: Any = cast(Any, Credentials)(
        source_credentials=credentials,
        target_principal=target,
        delegates=delegates,
        target_scopes=scopes,
    )
    return made


def _by_provider(connection: Connection, extra: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Loads credentials by Airflow's Google provider, which knows the rest of the fields."""
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


def _listed(value: Any) -> list[str]:
    """Reads a list, or text with commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [str(part) for part in value] if isinstance(value, Sequence) else []


def _unusable(connection: Connection | None, error: Exception) -> str:
    from google.auth.exceptions import DefaultCredentialsError

    if connection is None or not any(_fields(connection.extra).get(name) for name in _KEYS):
        why = "" if isinstance(error, DefaultCredentialsError) else f" ({type(error).__name__})"
        return (
            f"there are no Google credentials{why}: give the connection a key (keyfile_dict), a key"
            " file (key_path) or a credential configuration, or the machine Application Default"
            " Credentials; an emulator is named by PUBSUB_EMULATOR_HOST"
        )
    return (
        f"the credentials of the connection {_name(connection)} cannot be read"
        f" ({type(error).__name__}): keyfile_dict is the JSON of a service account's key, key_path"
        " and credential_config_file are files that every worker has"
    )


def _name(connection: Connection | None) -> str:
    return repr("" if connection is None else connection.conn_id)
