"""Apache Iceberg's own REST catalog, on a database in a file."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import pyspark

from scripts.local_airflow import free_port
from tests.server_process import await_start, start_process

#: Its jars, if ``scripts/setup.sh --tables`` has resolved them.
JARS = sorted(Path(__file__).parents[1].glob("build/iceberg/*.jar"))


class RestCatalog:
    """A server with a warehouse in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        port, log = free_port(), folder / "server.log"
        self.url = f"http://127.0.0.1:{port}"
        hadoop = (Path(pyspark.__file__).parent / "jars").glob("*-client-*.jar")
        logging = (Path(pyspark.__file__).parent / "jars").glob("commons-logging-*.jar")
        jars = ":".join(map(str, [*JARS, *hadoop, *logging]))
        java = Path(os.environ.get("JAVA_HOME", "/usr")) / "bin/java"
        self._process = start_process(
            [str(java), "-Xmx256m", "-cp", jars, "org.apache.iceberg.rest.RESTCatalogServer"],
            log,
            env={
                **os.environ,
                "CATALOG_WAREHOUSE": f"file://{folder}/warehouse",
                "CATALOG_URI": f"jdbc:sqlite:{folder}/catalog.db",
                "CATALOG_REST_PORT": str(port),
            },
        )
        await_start(
            self._process, self._answers, log=log, name="the catalog", stop=self.stop, wait=120
        )

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/config", timeout=5):
                return True
        except OSError:
            return False

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
