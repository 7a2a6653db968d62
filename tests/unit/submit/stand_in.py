"""A stand-in for spark-submit, on PATH: it records what it gets, and acts as the driver."""

from __future__ import annotations

from pathlib import Path

#: Lines that Spark's own program prints, by master and deploy mode.
LINES = {
    ("yarn", "cluster"): "INFO Client: Submitted application application_1700000000000_0001",
    ("k8s", "cluster"): "INFO LoggingPodStatusWatcherImpl: \t pod name: flights-1a2b-driver\n"
    "Exit code: 0",
    ("k8s", "client"): "started",
}

_SCRIPT = """#!/bin/sh
n=$(ls -d {folder}/call-* 2>/dev/null | wc -l)
call={folder}/call-$n
mkdir "$call"
printf '%s\\0' "$@" > "$call/arguments"
env -0 > "$call/environment"
for word in "$@"; do
    for file in $(echo "$word" | tr , ' '); do [ -f "$file" ] && cp "$file" "$call"; done
    [ "$before" = --run ] && run=${{word#file://}}
    before=$word
done
[ -d {folder}/outcomes ] && cp -r {folder}/outcomes "$run"
cat {folder}/lines
exit $(cat {folder}/code)
"""


class StandIn:
    """The program, and its calls so far.

    :param folder: An empty folder; the program is in its ``bin``.  What is in its ``outcomes`` it
        copies to the run's, as a driver would record them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "bin" / "spark-submit"
        program.parent.mkdir(parents=True)
        program.write_text(_SCRIPT.format(folder=folder))
        program.chmod(0o755)
        self.print("")
        self.exit_code = 0

    @property
    def exit_code(self) -> int:
        """The exit code of the stand-in."""
        return int((self.folder / "code").read_text())

    @exit_code.setter
    def exit_code(self, code: int) -> None:
        (self.folder / "code").write_text(str(code))

    def print(self, lines: str) -> None:
        """Sets the lines that it prints."""
        (self.folder / "lines").write_text(f"{lines}\n")

    @property
    def calls(self) -> list[Call]:
        """Its calls, in order."""
        return [Call(path) for path in sorted(self.folder.glob("call-*"))]


class Call:
    """One call: its arguments, its environment, and the files that it could read."""

    def __init__(self, folder: Path) -> None:
        self.arguments = _words(folder / "arguments")
        self.environment = dict(word.split("=", 1) for word in _words(folder / "environment"))
        own = ("arguments", "environment")
        self.files = sorted(path.name for path in folder.iterdir() if path.name not in own)


def _words(path: Path) -> list[str]:
    return path.read_text().split("\0")[:-1]
