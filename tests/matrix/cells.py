"""The cells of the matrix: a release of Airflow on a Python, in an environment of its own.

Airflow's constraint files have the newest packages of the day on which it was released.  Their host
is not reachable from everywhere that PyPI is, so uv resolves each environment as of that day.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.airflow_env import ROOT

HOME = ROOT / "build" / "matrix"
UV = "uv==0.13.9"
#: Release of Airflow → the day after it, and the Pythons that it runs on.
RELEASES = {
    "3.1.8": ("2026-03-12", ("3.11", "3.12", "3.13")),
    "3.2.2": ("2026-05-30", ("3.11", "3.12", "3.13", "3.14")),
    "3.3.2": ("2026-09-18", ("3.11", "3.12", "3.13", "3.14")),
}
#: The lowest versions of pyproject.toml, but for Airflow: 3.1.0 breaks with newer packages, by
#: itself.
LOWEST = ("--resolution", "lowest-direct", "--exclude-newer", "2026-03-12", "apache-airflow>=3.1.8")
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Cell:
    """An environment: its Python, what is installed next to the wheel, and uv's options."""

    name: str
    python: str
    options: Sequence[str]

    def make(self, wheel: Path) -> Path:
        """Returns the interpreter of the environment with the wheel; the environment is kept.

        :raises LookupError: If this machine has no such Python.
        :raises subprocess.CalledProcessError: If it cannot be made, e.g. without a network.
        """
        base, folder = find_python(self.python), HOME / self.name
        interpreter, stamp = folder / "bin" / "python", folder / "made"
        made = f"{base} {' '.join(self.options)}\n{(ROOT / 'pyproject.toml').read_text()}"
        if not stamp.exists() or stamp.read_text() != made:
            uv("venv", "--clear", "--python", base, str(folder))
            needed = ("-r", str(ROOT / "pyproject.toml"))
            uv("pip", "install", "--python", str(interpreter), *self.options, *needed)
            stamp.write_text(made)
        again = ("--reinstall", "--no-deps", str(wheel))
        uv("pip", "install", "--python", str(interpreter), *again)
        return interpreter


def cells() -> list[Cell]:
    """Returns all cells; the first needs no other Python than the running one."""
    of_releases = [
        Cell(f"{airflow}-{python}", python, ("--exclude-newer", day, f"apache-airflow=={airflow}"))
        for airflow, (day, pythons) in RELEASES.items()
        for python in sorted(pythons, key=lambda python: python != RUNNING)
    ]
    lowest = Cell("lowest", RUNNING, LOWEST)
    return [*of_releases, lowest, Cell("newest", RUNNING, ("--upgrade",))]


def find_python(version: str) -> str:
    """Returns the path of a Python on PATH, or of pyenv."""
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for path in (shutil.which(f"python{version}"), *map(str, pyenv)):
        program = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
        if path is not None:
            found = subprocess.run(
                [path, "-c", program], capture_output=True, text=True, check=False
            )
            if found.stdout.startswith(f"{version} "):
                return found.stdout.split(maxsplit=1)[1].strip()
    raise LookupError(f"no Python {version} on PATH or in ~/.pyenv")


def uv(*arguments: str) -> None:
    """Runs uv, which is installed for this first."""
    tools = HOME / "tools"
    if not (tools / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(tools)], check=True)
        pip = [str(tools / "bin" / "python"), "-m", "pip", "install", "-q", UV]
        subprocess.run(pip, check=True)
    command = [str(tools / "bin" / "uv"), *arguments, "--quiet", "--no-config"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
