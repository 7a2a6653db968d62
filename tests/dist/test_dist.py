"""Wheel and sdist: reproducible, complete, and without other files of the checkout."""

from __future__ import annotations

import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from airflow_broadway import __version__
from scripts.airflow_env import ROOT

PACKAGE = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "airflow_broadway").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}


def build(folder: Path) -> tuple[Path, Path]:
    """Builds the wheel and the sdist."""
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    [sdist] = SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(wheel), Path(sdist)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("dist"))


def test_two_builds_are_the_same_bytes(built, tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    for path in (ROOT / "LICENSE", ROOT / "airflow_broadway" / "py.typed"):
        path.touch()

    again = build(tmp_path)

    assert [path.name for path in again] == [path.name for path in built]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built]


def test_the_wheel_has_the_package_its_types_and_its_licence_and_no_more(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    info = f"airflow_broadway-{__version__}.dist-info"
    own = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}

    assert "airflow_broadway/py.typed" in names
    assert names == PACKAGE | {f"{info}/{name}" for name in own}


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    with tarfile.open(built[1]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    root = tmp_path / f"airflow_broadway-{__version__}"
    files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    [wheel] = WheelBuilder(str(root)).build(directory=str(tmp_path), versions=["standard"])

    others = {"CHANGELOG.md", "LICENSE", "README.md", "PKG-INFO", "pyproject.toml", ".gitignore"}
    assert files <= PACKAGE | others
    assert Path(wheel).read_bytes() == built[0].read_bytes()


def test_an_index_can_show_the_metadata(built):
    with zipfile.ZipFile(built[0]) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        metadata = message_from_string(wheel.read(name).decode())

    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).startswith("# airflow-broadway")
    assert metadata["Requires-Python"] == ">=3.11"


def test_the_changelog_has_a_dated_section_of_the_release():
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()

    assert any(line.startswith(f"## [{__version__}] - 20") for line in lines)
