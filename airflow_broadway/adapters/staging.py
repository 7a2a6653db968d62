"""Opens the staging root, by Airflow's configuration and with its object storage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from airflow.providers.common.compat.sdk import ObjectStoragePath, conf

from airflow_broadway.adapters.connections import AirflowConnections
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.layout import SHARED

if TYPE_CHECKING:
    from airflow_broadway.staging.store import Store


#: URI scheme → this package's extra that installs its client.
_EXTRAS: Final = {"s3": "s3", "s3a": "s3"}
#: The way out in the error for a missing folder.
_ADVICE: Final = (
    ": the first run of a pipeline creates it; if runs use another one, pass --staging, or set"
    " `[broadway] staging`"
)


def staging_root(staging: str | None) -> str:
    """Returns the staging root's URI: ``staging`` if set, else ``[broadway] staging``, else a
    folder of AIRFLOW_HOME.
    """
    if staging:
        return staging
    home = os.environ.get("AIRFLOW_HOME", os.path.expanduser("~/airflow"))
    return str(conf.get("broadway", "staging", fallback=f"file://{home}/broadway"))


def env_outside_run(pipeline: str, staging: str | None) -> ProducerEnv:
    """Returns the environment of a pipeline's producer outside a run.

    :param pipeline: The pipeline's name.
    :param staging: URI of the staging root, where producers keep notes between runs.
    """
    root = staging_root(staging).rstrip("/")
    return ProducerEnv(
        pipeline=pipeline,
        generation="",
        connections=AirflowConnections(),
        staging=f"{root}/{pipeline}",
        shared=f"{root}/{SHARED}",
    )


def open_store(staging: str | None) -> Store:
    """Opens the staging root with Airflow's object storage: ``s3://conn_id@bucket/…`` names the
    connection.

    :raises StagingError: If it is not a URI, or no provider of Airflow has a file system for it.
    """
    from airflow_broadway.staging.store import Store

    uri = staging_root(staging)
    if "://" not in uri:
        raise StagingError(
            f"the staging root {uri!r} is not a URI; set [broadway] staging to one such as"
            " 'file:///data/broadway' or 's3://aws_default@bucket/broadway'"
        )
    if uri.startswith("file:///"):
        return Store.open(uri)  # Airflow would load the file systems of all providers
    try:
        path = ObjectStoragePath(uri)
        return Store(path.fs, path.path, uri)
    except ImportError as error:
        extra = _EXTRAS.get(uri.partition("://")[0])
        cure = f"install airflow-broadway[{extra}]" if extra else "install fsspec's client for it"
        raise StagingError(
            f"the staging root {uri!r} cannot be opened, since its client is not installed: {cure}"
        ) from error
    except ValueError as error:
        raise StagingError(
            f"the staging root {uri!r} cannot be opened: {error}; install airflow-broadway[s3] for"
            " s3://, or Airflow's provider for another store, or use 'file:///data/broadway'"
        ) from error


def open_existing_store(staging: str | None, *, advice: str = _ADVICE) -> Store:
    """Opens the staging root for reading, without creating it.

    :param advice: The way out, appended to "does not exist"; it depends on the caller.
    :raises StagingError: If it cannot be opened, or its folder does not exist.
    """
    store = open_store(staging)
    if store.local and not Path(store.root).is_dir():
        raise StagingError(f"the staging folder {store.uri} does not exist{advice}")
    return store
