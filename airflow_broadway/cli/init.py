"""``airflow-broadway init``: creates a pipeline from the templates of this package."""

from __future__ import annotations

import argparse
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

from airflow_broadway.cli.output import CommandError, Result

_TEMPLATES: Final = files("airflow_broadway.cli") / "templates"

#: The message of the README and of the test.
_MESSAGE: Final = '{"id": 1, "item": "tea", "amount": 2.5}'

#: Template, and the file that it becomes.
_FILES: Final = {
    "pipeline.py.txt": "dags/${name}_pipeline.py",
    "dag.py.txt": "dags/${name}_dag.py",
    "test.py.txt": "tests/test_$name.py",
    "pytest.ini.txt": "pytest.ini",
    "connections.env.txt": "connections.env",
    "README.md.txt": "README.md",
}


def init(args: argparse.Namespace) -> Result:
    """Creates the folder of a pipeline.

    :raises CommandError: If the name breaks its rule, or the folder exists or cannot be quoted.
    """
    folder = Path.cwd() / args.name
    if not re.fullmatch(r"[a-z][a-z0-9_]{2,39}", args.name):
        raise CommandError(
            f"{args.name!r} is no name of a pipeline: use 3 to 40 lower-case letters, digits and"
            " underscores, beginning with a letter"
        )
    if not re.fullmatch(r"[\w/ .,+@-]+", str(folder)):
        raise CommandError(
            f"the path {str(folder)!r} has characters that the files would have to quote:"
            " run this in another folder"
        )
    try:
        folder.mkdir()
    except FileExistsError:
        raise CommandError(
            f"{str(folder)!r} exists, and is never overwritten: choose another name or folder"
        ) from None
    values = _values(args.name, folder, args.queue, args.sink)
    written = []
    for template, name in _FILES.items():
        path = folder / Template(name).substitute(values)
        path.parent.mkdir(exist_ok=True)
        # Passwords will be written into the connections.
        path.touch(mode=0o600 if path.suffix == ".env" else 0o666)
        path.write_text(_render((_TEMPLATES / template).read_text("utf-8"), values), "utf-8")
        written.append(str(path))
    lines = [f"Created {path}" for path in written]
    return Result(written, [*lines, f"Next: the commands of {folder / 'README.md'}"])


def _values(name: str, folder: Path, queue: str, sink: str) -> dict[str, str]:
    parts = tomllib.loads((_TEMPLATES / "parts.toml").read_text("utf-8"))
    values = {"name": name, "folder": str(folder), "message": _MESSAGE}
    source, target = (
        {key: _render(text, values) for key, text in parts[kind][choice].items()}
        for kind, choice in (("queue", queue), ("sink", sink))
    )
    extras = ",".join(filter(None, (source["extra"], target["extra"])))
    connections = {"queue": source["connection"], "sink": target["connection"]}
    return values | {
        "class": "".join(word.capitalize() for word in name.split("_")) + "Pipeline",
        "module": source["module"],
        "producer": source["producer"],
        "producer_class": source["producer"].partition("(")[0],
        "sink": target["sink"],
        "sink_class": target["sink"].partition("(")[0],
        "requirement": f"airflow-broadway[{extras}]" if extras else "airflow-broadway",
        "connections": "\n".join(
            f"AIRFLOW_CONN_{name.upper()}_{role.upper()}='{connection}'"
            for role, connection in connections.items()
            if connection
        ),
        "create_queue": source["create"],
        "create_sink": target["create"],
        "send": source["send"],
    }


def _render(text: str, values: dict[str, str]) -> str:
    return Template(text).substitute(values)
