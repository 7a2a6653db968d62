"""The Python in the documents of the model runs as it stands, file by file, from top to bottom."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FILES = [
    "backfills.md",
    "concepts.md",
    "dead-letters.md",
    "embedded-queue.md",
    "kafka.md",
    "pubsub.md",
    "rabbitmq.md",
    "semantics.md",
    "spark.md",
    "sqs.md",
    "telemetry.md",
    "testing.md",
]
#: A folder that readers have.
THEIRS = "/var/lib/airflow"


@pytest.mark.parametrize("name", FILES)
def test_snippets_run(name, tmp_path, monkeypatch):
    text = (DOCS / name).read_text("utf-8")
    module = ModuleType(f"docs_{name.removesuffix('.md')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run: set[str] = set()
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 1
        source = match[1].replace(THEIRS, str(tmp_path))
        code = compile("\n" * line + source, str(DOCS / name), "exec")
        exec(code, module.__dict__)
        for test in sorted(module.__dict__.keys() - run):
            run.add(test)
            if _is_test(module, test):
                getattr(module, test)()


def _is_test(module: ModuleType, name: str) -> bool:
    code = getattr(getattr(module, name), "__code__", None)
    return name.startswith("test_") and code is not None and code.co_argcount == 0
