"""The wheel has the files of the pages, and Airflow finds the plugin in it."""

from __future__ import annotations

import zipfile
from pathlib import Path

from airflow import plugins_manager
from hatchling.builders.wheel import WheelBuilder

import airflow_broadway
from airflow_broadway.plugin.broadway_plugin import PREFIX

ROOT = Path(airflow_broadway.__file__).parent.parent
PLUGIN = ROOT / "airflow_broadway" / "plugin"


def test_templates_and_static_files_are_in_the_wheel(tmp_path):
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        [entries] = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
        points = file.read(entries).decode()

    files = [p for name in ("templates", "static") for p in (PLUGIN / name).rglob("*.*")]
    assert len(files) > 10
    assert {path.relative_to(ROOT).as_posix() for path in files} <= names
    assert "broadway = airflow_broadway.plugin.broadway_plugin:BroadwayPlugin" in points


def test_airflow_finds_the_plugin():
    apps, _ = plugins_manager.get_fastapi_plugins()
    views, _ = plugins_manager._get_ui_plugins()

    assert PREFIX in [app["url_prefix"] for app in apps]
    ours = [view for view in views if str(view["url_route"]).startswith("broadway")]
    assert {view["destination"] for view in ours} == {"nav", "dag_run"}
    # Relative, as Airflow may live below a path.
    assert not [view for view in ours if view["href"].startswith("/")]
