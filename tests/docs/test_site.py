"""The site builds without a warning, and loads nothing from another host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from airflow_broadway import BatchInfo, Message
from airflow_broadway.get_provider_info import get_provider_info
from scripts.options_doc import PRODUCERS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOREIGN = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
#: What Material's script would load: a diagram library, and figures of a repository.
ON_DEMAND = ('class="mermaid"', 'data-md-component="source"')


class Loaded(HTMLParser):
    """Collects the addresses that a browser loads by itself for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            return
        for name, value in attrs:
            if name in {"href", "src", "srcset", "poster", "data"} and value:
                self.addresses += [part.strip() for part in value.split(", ")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # Strict, which --quiet would undo: a page in no list, a link to a missing page or heading.
    assert done.returncode == 0, done.stdout
    return folder


def test_every_page_is_built(site):
    sources = {path.relative_to(DOCS) for path in DOCS.rglob("*.md")}

    assert len(sources) > 30
    assert [
        str(path)
        for path in sources
        if not (site / str(path).replace("README.md", "index.md")).with_suffix(".html").exists()
    ] == []


def test_no_page_loads_from_another_host(site):
    pages = list(site.rglob("*.html"))
    foreign: list[str] = []
    for page in pages:
        text = page.read_text("utf-8")
        loaded = Loaded()
        loaded.feed(text)
        assert loaded.addresses
        foreign += [address for address in loaded.addresses if FOREIGN.match(address)]
        foreign += [mark for mark in ON_DEMAND if mark in text]
    assert foreign == []


def test_no_style_loads_from_another_host(site):
    styles = list(site.rglob("*.css"))

    assert len(styles) > 1
    assert [
        address
        for style in styles
        for address in re.findall(r"(?:url\(|@import)\s*['\"]?([^'\")]*)", style.read_text("utf-8"))
        if FOREIGN.match(address)
    ] == []


def test_roles_of_docstrings_are_rendered(site):
    text = (site / "api.html").read_text("utf-8")

    assert re.findall(r":(?:class|meth|func|mod|attr):", text) == []


@pytest.mark.parametrize(("kind", "title"), [(Message, "A message"), (BatchInfo, "A batch")])
def test_tables_name_every_public_field_and_method(kind, title):
    page = (DOCS / "api.md").read_text("utf-8").split(f"## {title}\n")[1].partition("\n## ")[0]
    own = {"count", "index", "replace", "with_acknowledger"}  # for the pipeline itself
    names = {name for name in dir(kind) if not name.startswith("_")} - own

    assert [name for name in sorted(names) if not re.search(rf"`{name}\b", page)] == []


def test_settings_and_connections_are_on_their_page():
    page = (DOCS / "configuration.md").read_text("utf-8")
    info = get_provider_info()
    names = list(info["config"]["broadway"]["options"])
    names += [connection["connection-type"] for connection in info["connection-types"]]

    assert [name for name in names if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize(("place", "kind", "least"), [(i, *p[1:]) for i, p in enumerate(PRODUCERS)])
def test_table_of_brokers_has_the_defaults(place, kind, least):
    rows = {
        cells[0]: cells[1:]
        for line in (DOCS / "brokers.md").read_text("utf-8").splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 6
    }
    producer = kind(**least)

    renewed = "renewed" if kind.renews else "not renewed"
    assert rows["producer"][place] == f"`{kind.__name__}`"
    assert rows["`lease`, the default"][place] == f"{producer.lease:,.0f} s, {renewed}"
    assert rows["`on_failure`, the default"][place] == f'`"{producer.on_failure}"`'
    assert rows["`conn_id`, the default"][place] == f"`{producer.conn_id}`"
    age = rows["reports the age of the oldest message"][place]
    assert (age != "no") == kind.reports_oldest_age
    assert ("itself" in rows["backfills read"][place]) == kind.backfills
