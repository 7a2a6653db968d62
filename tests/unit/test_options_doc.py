import pytest

from airflow_broadway.core.custody.producer import Producer
from scripts.options_doc import PAGE, PRODUCERS, page


def test_options_page_matches_the_declarations():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m scripts.options_doc"


@pytest.mark.parametrize(("title", "cls", "least"), PRODUCERS)
def test_options_tables_have_the_producers_defaults(title, cls, least):
    table = page().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    options = cls(**least)

    assert f"| `on_failure` | one of {', '.join(f'`{action}`' for action in cls.actions)}" in table
    for name in ("on_failure", "lease"):
        if getattr(options, name) != getattr(Producer(), name):
            [row] = [line for line in table.splitlines() if line.startswith(f"| `{name}` |")]
            assert f"| `{getattr(options, name)!r}` |" in row
