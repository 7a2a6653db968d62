import pytest

from airflow_broadway.core.custody.producer import Producer
from scripts.options_doc import PAGE, PRODUCERS, page


def test_options_page_matches_the_declarations():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m scripts.options_doc"


@pytest.mark.parametrize(("title", "cls", "least"), PRODUCERS)
def test_options_tables_have_the_producers_defaults(title, cls, least):
    table = page().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    options = cls(**least)

    actions = ", ".join(f"`{action}`" for action in cls.actions)
    defaults = f"`{options.on_success!r}`, `{options.on_failure!r}`"
    assert f"| `on_success`, `on_failure` | {actions} | {defaults} |" in table
    if options.lease != Producer().lease:
        [row] = [line for line in table.splitlines() if line.startswith("| `lease` |")]
        assert f"| `{options.lease!r}` |" in row
