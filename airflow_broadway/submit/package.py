"""The code that is shipped to Spark: one zip file of the pipeline's package and our own packages.

It is built when the task runs, from the files that this process imported: the run's version of the
Dag bundle.  The build is reproducible, so equal runs submit equal applications.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from airflow_broadway.core.errors import OptionsError, PipelineError
from airflow_broadway.core.reference import import_class
from airflow_broadway.core.text import pluralize

if TYPE_CHECKING:
    from airflow_broadway.staging.store import Folder

#: The maximum bytes of a pipeline's package, before compression.
MAX_BYTES = 32 * 1024 * 1024
#: The timeout for checking a pipeline, in seconds.
CHECK_TIMEOUT = 120.0

_EXTENSIONS = (".so", ".pyd", ".dylib")
_SKIPPED = ("__pycache__", "node_modules")
#: The folder of this package.
_PACKAGE = Path(__file__).parents[1]
#: The subpackages that run in a Spark driver.
_SUBPACKAGES = ("core", "producers", "sinks", "spark")
#: The modules of ``staging`` that run there where Hadoop has no file system for its root.
_STAGING = ("__init__", "bucket", "client", "disk", "errors", "store")

#: The setting of a place to which spark-submit uploads files for pods.
UPLOAD_PATH = "spark.kubernetes.file.upload.path"

ZIP_NAME = "airflow_broadway_pipeline.zip"
LAUNCHER_NAME = "airflow_broadway_job.py"


class Shipment(NamedTuple):
    """The files for spark-submit.

    :param zip: For ``--py-files``.
    :param launcher: The application's script.
    :param packages: The top-level packages in the zip.
    """

    zip: Path
    launcher: Path
    packages: list[str]


def ship(class_path: str, folder: Path) -> Shipment:
    """Writes the zip file and the launcher for a pipeline into ``folder``.

    A package with compiled extensions cannot be imported from a zip file, so it is left out: the
    driver must have it installed.

    :param class_path: ``"pkg.module:Class"``.
    :raises PipelineError: If the module cannot be imported, or is too large to ship.
    """
    import_class(class_path)
    top = class_path.partition(":")[0].partition(".")[0]
    members = dict(_iter_own_files())
    packages = ["airflow_broadway"]
    if top != "airflow_broadway":
        files = dict(_iter_pipeline_files(class_path))
        if not any(name.endswith(_EXTENSIONS) for name in files):
            _check_size(top, files)
            members.update(files)
            packages.append(top)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / ZIP_NAME
    _write_zip(target, members)
    launcher = folder / LAUNCHER_NAME
    launcher.write_bytes((_PACKAGE / "spark" / "launcher.py").read_bytes())
    return Shipment(target, launcher, packages)


def publish(file: Path, folder: Folder) -> str:
    """Copies a file to a run's folder; returns its URI for a driver in a pod."""
    data = file.read_bytes()
    path = f"code/{sha256(data).hexdigest()[:16]}/{file.name}"
    if not folder.exists(path):
        folder.create_own(path, [data])
    # A shared disk is mounted in each pod: Spark neither uploads nor downloads these.
    return re.sub("^file:", "local:", folder.spark_uri(path))


def check_remote(files: Mapping[str, str]) -> None:
    """Checks that pods can read the user's files.

    :param files: Option → files, comma-separated.
    :raises OptionsError: Naming the option and the ways out.
    """
    for option, names in files.items():
        for name in filter(None, map(str.strip, names.split(","))):
            if "://" not in name:
                raise OptionsError(
                    option,
                    "URIs that pods can read (s3a://…, or local://… for a file in their image), or"
                    f" {UPLOAD_PATH} in conf, to which spark-submit uploads local files",
                    names,
                )


def import_path(py_files: Sequence[str]) -> list[str]:
    """Returns what must be on the import path for local Python files."""
    return [str(Path(file).parent) if file.endswith(".py") else file for file in py_files]


def check_import(
    ref: Mapping[str, object], shipment: Shipment, *, py_files: Sequence[str] = (), python: str = ""
) -> list[str]:
    """Imports a pipeline as the driver will, but without Spark, within a fraction of a second.

    :param ref: The pipeline's reference.
    :param py_files: The user's own files, all local.
    :param python: The Python interpreter; this one by default.
    :returns: Warnings.
    :raises PipelineError: Naming what cannot be imported, and the way out.
    """
    path = [str(shipment.zip), *import_path(py_files)]
    path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    # Not on the command line, which is world-readable: options are rendered and may be secret.
    command = [python or sys.executable, str(shipment.launcher), "--check"]
    try:
        result = subprocess.run(
            command,
            input=json.dumps(ref),
            env=env,
            cwd=shipment.zip.parent,
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [f"loading the pipeline took more than {CHECK_TIMEOUT:g} s; it was not checked"]
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise PipelineError(
            f"Spark could not import the pipeline {ref['class']}: {lines[-1]}\n"
            f"The packages {shipment.packages} were shipped; other imports must be installed in the"
            " driver's Python, or be listed in py_files"
        )
    return result.stdout.strip().splitlines()


# --------------------------------------------------------------------------------------------------


def _iter_own_files() -> Iterator[tuple[str, Path]]:
    # If a pipeline imports Airflow in the driver, Airflow calls every provider's get_provider_info.
    for name in ("__init__.py", "get_provider_info.py", "pipeline.py", "types.py"):
        if (_PACKAGE / name).is_file():
            yield f"airflow_broadway/{name}", _PACKAGE / name
    for name in _STAGING:
        yield f"airflow_broadway/staging/{name}.py", _PACKAGE / "staging" / f"{name}.py"
    for name in _SUBPACKAGES:
        yield from _iter_tree(_PACKAGE / name, f"airflow_broadway/{name}")


def _iter_pipeline_files(class_path: str) -> Iterator[tuple[str, Path]]:
    module_name = class_path.partition(":")[0]
    top_name = module_name.partition(".")[0]
    top = sys.modules.get(top_name) or importlib.import_module(top_name)
    locations = [Path(folder) for folder in getattr(top, "__path__", [])]
    if not locations:
        file = getattr(top, "__file__", None)
        if file is None or not file.endswith(".py"):
            raise PipelineError(
                f"the module {top_name!r} of the pipeline has no source file ({file}), so it cannot"
                " be shipped to Spark: install it there"
            )
        yield f"{top_name}.py", Path(file)
        return
    if getattr(top, "__file__", None) is None:
        # A namespace package: only the portion with the pipeline is shipped.
        own = Path(str(sys.modules[module_name].__file__)).resolve()
        locations = [path for path in locations if own.is_relative_to(path.resolve())]
    for location in locations:
        if not location.is_dir():
            raise PipelineError(
                f"the package {top_name!r} of the pipeline is in {location}, which is no folder,"
                " so it cannot be shipped to Spark: install it there"
            )
        yield from _iter_tree(location, top_name)


def _iter_tree(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Yields all files below a folder, with their names in the zip."""
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and name[0] != ".")
        inside = Path(path).relative_to(folder).as_posix()
        prefix = name if inside == "." else f"{name}/{inside}"
        for file in sorted(files):
            if file[0] != "." and not file.endswith((".pyc", ".pyo")):
                yield f"{prefix}/{file}", Path(path) / file


def _check_size(top: str, members: Mapping[str, Path]) -> None:
    sizes = {name: path.stat().st_size for name, path in members.items()}
    if sum(sizes.values()) <= MAX_BYTES:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    shown = ", ".join(f"{name} ({sizes[name]:,} bytes)" for name in largest)
    raise PipelineError(
        f"the package {top!r} of the pipeline has {sum(sizes.values()):,} bytes in"
        f" {pluralize(len(sizes), 'file')}; at most {MAX_BYTES:,} are shipped to Spark.  The"
        f" largest: {shown}.  Move data out of the package, or the pipeline into a package of its"
        " own"
    )


def _write_zip(target: Path, members: Mapping[str, Path]) -> None:
    folders = {
        "/".join(parts[:depth]) + "/"
        for parts in (name.split("/") for name in members)
        for depth in range(1, len(parts))
    }
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
        # Packages without __init__.py are imported by their folder's entry.
        for name in sorted([*folders, *members]):
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = (0o755 if name.endswith("/") else 0o644) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(info, b"" if name.endswith("/") else members[name].read_bytes())
