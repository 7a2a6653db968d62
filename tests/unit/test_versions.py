"""Which Airflow: one module knows the differences, and Airflow 2 is refused in one sentence."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import airflow_broadway
from airflow_broadway.adapters.versions import is_durable, parse_folder, tracks_driver

PACKAGE = Path(airflow_broadway.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "versions.py")

ASKS_VERSION = re.compile(
    r"AIRFLOW_V_|version_compat|airflow\.__version__|airflow\.version|version\(.apache.airflow"
)
#: Not versions of Airflow: providers that a connection may need, of an extra.
OPTIONAL = tuple(f"airflow.providers.{name}" for name in ("amazon", "common.messaging", "google"))


def conditional_imports(tree: ast.Module) -> list[str]:
    """Modules of Airflow whose absence is caught."""
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
    caught = [
        inner
        for node in tries
        if any("ImportError" in ast.unparse(handler.type or node) for handler in node.handlers)
        for statement in node.body
        for inner in ast.walk(statement)
    ]
    return [
        name
        for node in caught
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
        )
        if name.split(".")[0] == "airflow" and not name.startswith(OPTIONAL)
    ]


def test_no_other_module_asks_which_airflow_it_is():
    asking = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        if ASKS_VERSION.search(text := path.read_text()) or conditional_imports(ast.parse(text))
    }

    assert not asking


def test_a_caught_import_of_airflow_is_seen():
    tree = ast.parse("try:\n from airflow.sdk import X\nexcept ImportError:\n pass")

    assert conditional_imports(tree) == ["airflow.sdk"]


@pytest.mark.parametrize("version", ["2.11.2", "1.10.15"])
def test_airflow_2_is_refused_in_a_sentence_that_has_the_way_out(version):
    program = (
        "import sys, types; airflow = types.ModuleType('airflow');"
        f"airflow.__version__ = {version!r}; sys.modules['airflow'] = airflow;"
        "import airflow_broadway"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"ImportError: airflow-broadway needs Apache Airflow 3.1 or newer, and this is {version}:"
        " upgrade Airflow (pip install 'apache-airflow>=3.1'), or uninstall airflow-broadway"
    )


def test_a_provider_of_spark_that_lacks_tracking_never_tracks():
    assert not tracks_driver(SimpleNamespace())
    assert not is_durable(SimpleNamespace())


@pytest.mark.parametrize("which", ["driver_via_k8s_api", "yarn_application_via_rm_api"])
def test_one_way_of_tracking_suffices(which):
    hook = SimpleNamespace(**{f"_should_track_{which}": lambda: True})

    assert tracks_driver(hook)
    assert is_durable(SimpleNamespace(durable=True))


def test_dag_folder_is_parsed_where_airflow_3_1_has_the_parser(monkeypatch):
    parser = SimpleNamespace(DagBag=lambda path: f"Dags of {path}")
    monkeypatch.setitem(sys.modules, "airflow.dag_processing.dagbag", None)
    monkeypatch.setitem(sys.modules, "airflow.models.dagbag", parser)

    assert parse_folder("/dags") == "Dags of /dags"
