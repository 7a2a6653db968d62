"""The client of a staging root in a bucket, reopened in another process."""

from __future__ import annotations

import json
import os
import stat
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.adapters.staging import open_store
from airflow_broadway.core.errors import StagingError
from airflow_broadway.staging import client
from airflow_broadway.staging.client import (
    client_options,
    public_options,
    renewed_options,
    usable_options,
)
from airflow_broadway.staging.store import Store
from tests.s3_server import s3_server
from tests.waiting import eventually

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

ROLE = "arn:aws:iam::123456789012:role/lake"


@pytest.fixture
def server():
    with s3_server() as running:
        yield running


@pytest.fixture
def opened(server, monkeypatch):
    """Opens a new root by an Airflow connection with extras, and by no other identity."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    root = server.root().removeprefix("s3://")
    services = {name: {"endpoint_url": server.endpoint} for name in ("s3", "sts")}

    def open_root(login: str = "", password: str = "", **extra: Any) -> Store:
        connection = {
            "conn_type": "aws",
            "login": login,
            "password": password,
            "extra": {"service_config": services, "region_name": "eu-west-1", **extra},
        }
        # Airflow keeps a connection's client as long as the process lives.
        conn_id = f"lake_{uuid.uuid4().hex}"
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(connection))
        return open_store(f"s3://{conn_id}@{root}")

    return open_root


def reopen(store: Store, options: dict[str, Any]) -> Store:
    """Opens the same root as a driver does."""
    return Store.open(store.spark_uri().replace("s3a:", "s3:"), **usable_options(options))


def test_keys_endpoint_and_region_of_a_connection_reach_another_process(opened, server):
    store = opened("AKIA", "hush")
    options = client_options(store.fs)
    assert (options["key"], options["secret"], options["token"]) == ("AKIA", "hush", None)
    assert options["client_kwargs"]["region_name"] == "eu-west-1"
    assert options["endpoint_url"] == server.endpoint
    assert json.loads(json.dumps(options)) == options
    store.folder("f").create("x", "1")
    second = reopen(store, options)
    assert second.folder("f").read("x") == "1"
    assert client_options(second.fs) == options
    # The command line has neither key nor secret
    assert public_options(options) == {
        "endpoint_url": server.endpoint,
        "client_kwargs": {"region_name": "eu-west-1"},
    }


def test_assumed_role_reaches_another_process_instead_of_the_keys_that_assume_it(opened):
    store = opened("AKIA", "hush", role_arn=ROLE)
    options = client_options(store.fs)
    assert options["key"].startswith("ASIA")
    assert options["secret"] != "hush"
    assert options["token"]
    assert datetime.fromisoformat(options["expires"]) > datetime.now(UTC)
    store.folder("f").create("x", "1")
    assert reopen(store, options).folder("f").read("x") == "1"


def test_profile_reaches_another_process(opened, tmp_path, monkeypatch):
    file = tmp_path / "credentials"
    file.write_text("[lake]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = hush\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    options = client_options(opened(profile_name="lake").fs, of_machine=False)
    assert options["key"] == "AKIAPROFILE"


@pytest.mark.parametrize("method", ["iam-role", "container-role"])
def test_identity_of_a_machine_is_not_handed_over(opened, method):
    store = opened("AKIA", "hush")
    store.fs.s3._get_credentials().method = method
    assert "key" not in client_options(store.fs, of_machine=False)
    assert client_options(store.fs)["key"] == "AKIA"


def test_temporary_credentials_are_renewed_for_a_running_driver(opened, tmp_path, monkeypatch):
    # Given an assumed role, whose credentials the worker resolves again
    monkeypatch.setattr(client, "INTERVAL", 0.01)
    store = opened("AKIA", "hush", role_arn=ROLE)
    soon = datetime.now(UTC) + timedelta(seconds=5)
    options = {**client_options(store.fs), "expires": soon.isoformat()}
    store.folder("f").create("x", "1")
    file = tmp_path / "credentials.json"

    # When the driver's own have nearly expired
    with renewed_options(store.fs, options, file) as renewed:
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
        eventually(lambda: json.loads(file.read_text())["expires"] != options["expires"])
        driver = reopen(store, {**renewed, "key": "ASIAOLD"})

        # Then its client uses those of the worker, and so do its executors
        assert driver.folder("f").read("x") == "1"
        assert client_options(driver.fs)["key"] == client_options(store.fs)["key"]
        assert client_options(driver.fs)["key"] != "ASIAOLD"


def test_permanent_keys_are_not_written_to_disk(opened, tmp_path):
    store, file = opened("AKIA", "hush"), tmp_path / "credentials.json"
    with renewed_options(store.fs, client_options(store.fs), file) as renewed:
        assert renewed["key"] == "AKIA"
        assert not file.exists()


def test_store_that_overwrites_is_refused_at_first_use(server, tmp_path):
    # Given a store that ignores If-None-Match
    uri = server.root()
    server.ignored = "HTTP_IF_NONE_MATCH"
    store = server.store(uri)

    # When a root is used for the first time, then it is refused, and not created
    for _ in range(2):
        with pytest.raises(
            StagingError, match=r"overwrites an object despite a condition \(`If-None-Match: \*`\)"
        ):
            store.folder("f").create("x", "1")
    assert store.fs.find(store.root) == []

    # A store that honours it is used
    server.ignored = ""
    assert store.folder("f").create("x", "1")
    assert {Path(path).name for path in store.fs.find(store.root)} == {".broadway-root.json", "x"}
