"""``CONTRIBUTING.md`` draws the tree as it is; ``docs/architecture.md`` names what exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import airflow_broadway

PACKAGE = Path(airflow_broadway.__file__).parent
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text("utf-8")
#: The most modules of a folder that fit one listing.
MOST = 22


def drawn() -> dict[str, set[str]]:
    """Folder → its modules, as the document has them: ``folder/   name · name``."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    [tree] = re.findall(r"^## Modules\n+```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    folders: dict[str, set[str]] = {}
    folder = ""
    for line in tree.splitlines():
        match = re.fullmatch(r"(?:(\S+/))?\s+(.*)", line)
        assert match, line
        folder = match[1] or folder
        folders.setdefault(folder, set()).update(match[2].split(" · "))
    return folders


def real() -> dict[str, set[str]]:
    folders: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py":
            folder = path.parent.relative_to(PACKAGE.parent).as_posix()
            name = folder.removeprefix("airflow_broadway/") + "/"
            folders.setdefault(name, set()).add(path.stem)
    return folders


def test_the_tree_matches_the_folders():
    assert drawn() == real()


def test_folders_stay_small():
    assert {folder for folder, modules in real().items() if len(modules) > MOST} == set()


NAMES = sorted(
    set(
        re.findall(
            r"`((?:adapters|cli|core|hooks|operators|plugin|producers|runs|sensors|spark|staging|submit|testing"
            r"|triggers)(?:\.\w+)+)(?:\(\))?`",
            TEXT,
        )
    )
)


@pytest.mark.parametrize("name", NAMES)
def test_named_files_and_objects_exist(name):
    parts = ["airflow_broadway", *name.split(".")]
    for end in range(len(parts), 0, -1):
        try:
            target = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("airflow_broadway"):
                raise
            continue
        for part in parts[end:]:
            target = getattr(target, part)
        return


def test_the_document_names_functions():
    assert len(NAMES) > 40
