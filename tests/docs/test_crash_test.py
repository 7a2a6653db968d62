"""The crash test of docs/testing.md finds what the document shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "testing.md"


def block(language: str, start: str) -> str:
    """A block of code of the document, by how it begins."""
    whole = DOCUMENT.read_text("utf-8")
    blocks = re.findall(rf"(?ms)^```{language}\n({re.escape(start)}.*?)^```", whole)
    [text] = blocks
    return str(text)


def run(folder: Path, command: str, *more: str) -> tuple[int, list[str]]:
    program, *words = shlex.split(command)
    assert program == "airflow-broadway"
    ended = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *words, *more],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout.splitlines()


def test_an_appending_sink_is_reported_and_fixed(tmp_path):
    module = tmp_path / "orders.py"
    module.write_text(block("python", "# orders.py\n"))

    # The pipeline as it stands
    code, result = run(tmp_path, block("sh", "airflow-broadway crash-test"), "--jobs", "2")

    assert code == 1
    lines = block("text", "STAGE").splitlines()
    cut = lines.index("  …")
    assert result[:cut] == lines[:cut]
    assert result[-1] == lines[-1]

    # The command that the report gives finds it again
    [*_, again] = [line for line in lines if "--only" in line]
    code, result = run(tmp_path, again)
    assert (code, result[-1]) == (1, "1 case at 1 point: 1 failed.")

    # Mended, it passes there
    module.write_text(module.read_text() + "\n\n" + block("python", "# orders.py, mended\n"))
    code, result = run(tmp_path, again)
    assert (code, result[-1]) == (0, "1 case at 1 point: none failed.")
