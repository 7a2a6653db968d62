"""Access to a run's folder from the Spark driver; see :class:`core.formats.files.Files`.

Under ``file://`` the driver accesses the folder directly.  Other schemes (``s3a://``, ``hdfs://``,
``gs://`` …) use Hadoop's file systems in the JVM, like Spark's own I/O, and where Hadoop has none
staging's own client: see :mod:`airflow_broadway.spark.arrow`.

``create`` resolves races (the first outcome wins, a later try takes over), so it is atomic: by hard
link on plain files, by rename where a rename refuses an existing target (HDFS), by a conditional
write where the store supports it (S3).
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.files import (
    ARROW,
    AUTO,
    HADOOP,
    TEMPORARY,
    Files,
    LocalFiles,
    check_path,
)

#: Characters per call to the JVM.
CHUNK = 1 << 18

#: Schemes of S3, where creating without overwriting is a check followed by a write.
_S3 = ("s3", "s3a", "s3n")
#: Hadoop's option for stores that refuse to overwrite when a file is closed.
_CONDITIONAL = "fs.option.create.conditional.overwrite"

#: Schemes of file systems whose rename never replaces a file.
_RENAMES = ("hdfs", "viewfs", "webhdfs", "swebhdfs", "ofs", "o3fs", "maprfs")


def choose_client(uri: str, client: str) -> tuple[str, str]:
    """Chooses the client of a store, before a session is opened.

    :param client: One of :data:`airflow_broadway.core.formats.files.CLIENTS`.
    :returns: The client, and the reason for the log.
    :raises StagingError: If ``client`` is Hadoop, which has no file system for the scheme.
    """
    if client == ARROW:
        return client, "as set"
    from pyspark import SparkContext

    SparkContext._ensure_initialized()
    jvm: Any = SparkContext._jvm
    scheme = uri.partition(":")[0]
    conf = jvm.org.apache.spark.deploy.SparkHadoopUtil.get().newConfiguration(
        jvm.org.apache.spark.SparkConf()
    )
    try:
        jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme, conf)
    except Exception as error:
        if not _is_java(error, "ClassNotFoundException", "UnsupportedFileSystemException"):
            raise
        reason = f"Hadoop has no file system for {scheme}"
        if client == AUTO:
            return ARROW, reason
        raise StagingError(
            f"staging_client is {client!r}, but this Spark's {reason}: set packages to one that has"
            f" it (hadoop-aws for s3a), or staging_client to {AUTO!r}"
        ) from error
    return HADOOP, f"Hadoop has a file system for {scheme}"


def set_s3a(spark: Any, uri: str, options: Mapping[str, Any]) -> None:
    """Sets endpoint, region and credentials of one bucket for S3A; its own settings win.

    Not in the application's settings, which are on command lines and in Spark's UI.

    :param options: The result of :func:`airflow_broadway.staging.client.client_options`.
    """
    own, conf = spark.sparkContext.getConf(), spark._jsc.hadoopConfiguration()
    for name, value in s3a_settings(uri, options).items():
        if not own.contains(f"spark.hadoop.{name}"):
            conf.set(name, value)


def s3a_settings(uri: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Returns Hadoop's settings of one bucket; none for other stores."""
    if not uri.startswith("s3a:"):
        return {}
    endpoint = str(options.get("endpoint_url") or "")
    style = options.get("config_kwargs", {}).get("s3", {}).get("addressing_style")
    # Few stores except AWS have a host for each bucket.
    by_path = style == "path" or (endpoint and "amazonaws.com" not in endpoint)
    settings = {
        "endpoint": endpoint,
        "endpoint.region": options.get("client_kwargs", {}).get("region_name"),
        "connection.ssl.enabled": endpoint and str(not endpoint.startswith("http://")).lower(),
        "path.style.access": by_path and "true",
        "access.key": options.get("key"),
        "secret.key": options.get("secret"),
        "session.token": options.get("token"),
    }
    bucket = f"fs.s3a.bucket.{uri.split('/')[2]}"
    return {f"{bucket}.{name}": value for name, value in settings.items() if value}


def check_executor(spark: Any, uri: str, path: str, *, python: bool = True) -> None:
    """Reads a file in an executor, unless executors are the driver itself.

    :param spark: A session; one of Spark Connect reads it on the server, too.
    :param python: Whether to start a Python worker there, of a Spark Connect server's own Python.
    :raises StagingError: Naming the folder, before any batch begins.
    """
    if not is_remote(spark) and re.match(r"local(\[|$)", spark.sparkContext.master):
        return
    try:
        rows = spark.read.text(f"{uri}/{path}").limit(1)
        if python and is_remote(spark):
            rows = rows.mapInArrow(lambda batches: batches, "value string")
        rows.first()
    except Exception as error:
        lines = re.findall(r".*(?:Exception: |Error: |VERSION_MISMATCH).*", str(error))
        raise StagingError(
            f"an executor cannot read {uri}/{path} ({(lines or [str(error)])[-1].strip()}): every"
            " host of the cluster must see the same staging root (set [broadway] staging to one"
            " that they share), and have this driver's minor version of Python"
        ) from error


def is_remote(spark: Any) -> bool:
    """Returns whether a session is one of Spark Connect."""
    return ".connect." in type(spark).__module__


def open_files(uri: str, spark: Any = None) -> Files:
    """Opens the files of a run, by the scheme of its folder.

    :param uri: The run's folder, ``file:///…`` or ``s3a://…``; percent signs are literal, as in
        Hadoop's paths.
    :param spark: The session; optional for ``file://``.
    :raises StagingError: If the scheme needs a JVM and there is none.
    """
    path = local_path(uri)
    if path is not None:
        return LocalFiles(path)
    if getattr(spark, "_jvm", None) is None:  # no session, or one of Spark Connect
        raise StagingError(f"{uri} can only be read within a Spark session that has a JVM")
    return HadoopFiles(spark, uri)


def local_path(uri: str) -> str | None:
    """Returns the path of a ``file:`` URI or a plain path; ``None`` for other schemes."""
    if uri.startswith("file:"):
        return "/" + uri[len("file:") :].lstrip("/")
    return None if "://" in uri else uri


class HadoopFiles:
    """Files below ``uri`` through Hadoop's file systems in Spark's JVM; see :class:`Files`.

    :param renames: Whether ``create`` uses a rename; by default depending on the scheme.
    """

    def __init__(self, spark: Any, uri: str, *, renames: bool | None = None) -> None:
        self._jvm = spark._jvm
        self._root = uri.rstrip("/")
        hadoop = self._jvm.org.apache.hadoop.fs
        path = hadoop.Path(self._root)
        self._fs = path.getFileSystem(spark._jsc.hadoopConfiguration())
        scheme = uri.partition(":")[0].lower()
        self._renames = scheme in _RENAMES if renames is None else renames
        self._conditional = bool(self._fs.hasPathCapability(path, _CONDITIONAL))
        if scheme in _S3 and not self._conditional:
            version = self._jvm.org.apache.hadoop.util.VersionInfo.getVersion()
            raise StagingError(
                f"{uri} is in S3, where this Spark's Hadoop ({version}) cannot create a file only"
                " if there is none, so that two applications could both record an outcome of one"
                " batch: it takes s3a of Hadoop 3.4.2 or newer, with"
                " fs.s3a.create.conditional.enabled not false; or put staging elsewhere"
            )

    def read(self, path: str) -> str:
        stream = self._open(path)
        try:
            text: str = self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8")
        finally:
            stream.close()
        return text

    def exists(self, path: str) -> bool:
        return bool(self._fs.exists(self._path(path)))

    def list(self, folder: str) -> list[str]:
        try:
            statuses = self._fs.listStatus(self._path(folder))
        except Exception as error:
            if _is_java(error, "FileNotFoundException"):
                return []
            raise
        names = (str(status.getPath().getName()) for status in statuses)
        return sorted(name for name in names if name[0] != ".")

    def modified(self, path: str) -> float | None:
        return float(self._fs.getFileStatus(self._path(path)).getModificationTime()) / 1000

    def create(self, path: str, text: str) -> bool:
        target = self._path(path)
        if self._renames:
            if self._fs.exists(target):
                return False
            temporary = self._write_temporary(path, text)
            if self._fs.rename(temporary, target):
                return True
            self._fs.delete(temporary, False)
            return False
        # Visible only once closed, as in object stores; refused if the file exists by then.
        builder = self._fs.createFile(target).overwrite(False).recursive()
        if self._conditional:
            builder = builder.must(_CONDITIONAL, "true")
        try:
            self._write(builder.build(), [text])
        except Exception as error:
            if _is_java(error, "FileAlreadyExistsException", "RemoteFileChangedException"):
                # After a lost answer, the retry finds the file of the first attempt.
                return self.read(path) == text
            raise
        return True

    def replace(self, path: str, text: str) -> None:
        target = self._path(path)
        if not self._renames:
            self._write(self._fs.create(target, True), [text])
            return
        temporary = self._write_temporary(path, text)
        if not self._fs.rename(temporary, target):
            self._fs.delete(target, False)
            if not self._fs.rename(temporary, target):
                raise StagingError(f"{self._root}/{path} cannot be replaced")

    def write_lines(self, path: str, lines: Iterable[str]) -> int:
        count = 0

        def counted() -> Iterator[str]:
            nonlocal count
            for line in lines:
                count += 1
                yield line + "\n"

        self._write(self._fs.create(self._path(path), False), counted())
        return count

    def lines(self, path: str) -> Iterator[str]:
        java = self._jvm.java.io
        reader = java.BufferedReader(java.InputStreamReader(self._open(path), "UTF-8"))
        try:
            while (line := reader.readLine()) is not None:
                yield line
        finally:
            reader.close()

    def _path(self, path: str) -> Any:
        place = f"{self._root}/{check_path(path, self._root)}"
        return self._jvm.org.apache.hadoop.fs.Path(place)

    def _write_temporary(self, path: str, text: str) -> Any:
        folder, slash, _ = path.rpartition("/")
        temporary = self._path(f"{folder}{slash}{TEMPORARY}{uuid.uuid4().hex}")
        self._write(self._fs.create(temporary, False), [text])
        return temporary

    def _open(self, path: str) -> Any:
        try:
            return self._fs.open(self._path(path))
        except Exception as error:
            if _is_java(error, "FileNotFoundException"):
                raise FileNotFoundError(f"{self._root}/{path}") from None
            raise

    def _write(self, stream: Any, texts: Iterable[str]) -> None:
        writer = self._jvm.java.io.OutputStreamWriter(stream, "UTF-8")
        pending: list[str] = []
        size = 0
        try:
            for text in texts:
                pending.append(text)
                size += len(text)
                if size >= CHUNK:
                    writer.write("".join(pending))
                    pending, size = [], 0
            writer.write("".join(pending))
            if self._renames:  # a real file system: close does not sync
                writer.flush()
                stream.hsync()
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            self._abandon(stream)
            raise
        writer.close()

    def _abandon(self, stream: Any) -> None:
        """Aborts a partial write: an object store would publish the file once closed."""
        if self._renames:
            stream.close()  # the temporary file is never read
            return
        # A store without abort drops files that are never closed.
        with suppress(Exception):
            stream.abort()


def _is_java(error: Exception, *names: str) -> bool:
    """Returns whether ``error`` is caused by a Java exception with one of these simple names."""
    java = getattr(error, "java_exception", None)
    while java is not None:
        if str(java.getClass().getSimpleName()) in names:
            return True
        java = java.getCause()
    return False
