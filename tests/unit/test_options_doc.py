from typing import Any

import pytest

from airflow_broadway.core.custody.producer import Producer
from scripts.options_doc import PAGE, PRODUCERS, page


def test_the_page_of_options_is_what_the_declarations_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m scripts.options_doc"


@pytest.mark.parametrize(("title", "cls", "least"), PRODUCERS)
def test_each_producers_own_defaults_stand_in_its_table(
    title: str, cls: type[Any], least: dict[str, Any]
) -> None:
    table = page().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    made = cls(**least)

    assert f"| `on_failure` | one of {', '.join(f'`{each}`' for each in cls.actions)}" in table
    for name in ("on_failure", "lease"):
        if getattr(made, name) != getattr(Producer(), name):
            assert f"| `{getattr(made, name)!r}` |" in next(
                line for line in table.splitlines() if line.startswith(f"| `{name}` |")
            )
