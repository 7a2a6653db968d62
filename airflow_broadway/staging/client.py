"""The client of a staging root, opened again in another process with the same identity.

Airflow resolves the identity of a connection on the worker: keys, a profile, an assumed role.  The
Spark driver and its executors have neither the connection nor the worker's configuration, so they
get the result as options of the client.  Runs in the Spark driver, too.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from airflow_broadway.core.formats.files import note_file

log = logging.getLogger(__name__)

#: Seconds between two looks at temporary credentials; botocore renews them 15 minutes before
#: their end.
INTERVAL = 60.0
#: Credentials that belong to a machine; processes there find them, and renew them themselves.
_OF_MACHINE = ("iam-role", "container-role")
_KEYS = ("key", "secret", "token")


def client_options(fs: Any, *, of_machine: bool = True) -> dict[str, Any]:
    """Returns options with which another process opens the same store, as values of JSON.

    For S3 they include the credentials as of now, and the end of temporary ones (``expires``).

    :param fs: The store's fsspec file system.
    :param of_machine: Whether to include credentials that belong to this machine.
    """
    if not hasattr(fs, "call_s3"):
        return _plain(fs.storage_options)
    from fsspec.asyn import sync

    client = fs.s3
    meta = client.meta
    options: dict[str, Any] = {
        "client_kwargs": {**_plain(fs.client_kwargs), "region_name": meta.region_name},
        "config_kwargs": _plain(fs.config_kwargs)
        | ({"s3": meta.config.s3} if meta.config.s3 else {}),
    }
    endpoint = fs.endpoint_url or options["client_kwargs"].pop("endpoint_url", None)
    if endpoint or "amazonaws.com" not in meta.endpoint_url:
        options["endpoint_url"] = endpoint or meta.endpoint_url
    credentials = client._get_credentials()  # no public method returns those of a client
    if credentials is None:
        return {**options, "anon": True}
    if of_machine or credentials.method not in _OF_MACHINE:
        options |= zip(_KEYS, sync(fs.loop, credentials.get_frozen_credentials)[:3], strict=True)
        expires = getattr(credentials, "_expiry_time", None)
        if expires is not None:
            options["expires"] = expires.isoformat()
    return options


def public_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that may be on a command line: endpoint and region."""
    region = options.get("client_kwargs", {}).get("region_name")
    public = {"endpoint_url": options.get("endpoint_url")}
    public = {name: value for name, value in public.items() if value}
    return {**public, "client_kwargs": {"region_name": region}} if region else public


@contextmanager
def renewed_options(fs: Any, options: Mapping[str, Any], file: Path) -> Iterator[dict[str, Any]]:
    """Keeps temporary credentials up to date in a file while the context lasts.

    :param options: The result of :func:`client_options`.
    :param file: In a private folder.  Credentials that do not expire are never written there.
    :returns: The options, with the file as ``renewed``.
    """
    if "expires" not in options:
        yield dict(options)
        return
    ended = threading.Event()

    def renew() -> None:
        written = dict(options)
        while not ended.wait(INTERVAL):
            try:
                current = client_options(fs)
                if current != written:
                    note_file(str(file), json.dumps(current).encode())
                    written = current
            except Exception as error:  # the next look may succeed
                log.warning("Could not renew the credentials of the staging root: %s", error)

    note_file(str(file), json.dumps(dict(options)).encode())
    thread = threading.Thread(target=renew, name="broadway-credentials", daemon=True)
    thread.start()
    try:
        yield {**options, "renewed": str(file)}
    finally:
        ended.set()
        thread.join()


def usable_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the client for these options."""
    usable = {name: value for name, value in options.items() if name not in ("expires", "renewed")}
    if "renewed" not in options:
        return usable
    from aiobotocore.credentials import AioRefreshableCredentials
    from aiobotocore.session import AioSession

    async def read() -> dict[str, Any]:
        credentials = json.loads(Path(options["renewed"]).read_text(encoding="utf-8"))
        names = dict(zip(("access_key", "secret_key", "token"), _KEYS, strict=True))
        fields = {name: credentials[key] for name, key in names.items()}
        return {**fields, "expiry_time": credentials["expires"]}

    session: Any = AioSession()
    now = {"access_key": usable.pop("key"), "secret_key": usable.pop("secret")}
    session._credentials = AioRefreshableCredentials.create_from_metadata(
        {**now, "token": usable.pop("token"), "expiry_time": options["expires"]},
        refresh_using=read,
        method="airflow-broadway",
    )
    return {**usable, "session": session}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are values of JSON."""
    plain = {}
    for name, value in options.items():
        try:
            plain[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            continue
    return plain
