"""Home, settings and connections of a checkout's local Airflow.

``make demo``, ``make test``, ``make up`` and the fault tests all use them.  Standard library only:
``scripts/env.sh`` runs ``python -m scripts.airflow_env`` before every target.

Every setting is an environment variable, which overrides a generated ``airflow.cfg``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The checkout.
ROOT = Path(__file__).resolve().parent.parent

#: The queue file of the demo's flights; ``make demo`` replaces it.
FLIGHTS_QUEUE = ROOT / "build" / "demo" / "queue.db"

#: The preferred port of ``make up``.
DEFAULT_PORT = 8080

#: Airflow's settings that are the same for every home, as ``section.key``.
SETTINGS: Mapping[str, str] = {
    "core.executor": "LocalExecutor",
    "core.parallelism": "4",
    "core.load_examples": "False",
    "core.dags_are_paused_at_creation": "False",
    # Every client of the loopback port is an administrator: no login on a laptop.
    "core.simple_auth_manager_all_admins": "True",
    "api.host": "127.0.0.1",
    "api.workers": "1",
    # A chain of five no-op tasks takes 2 s instead of 6 s.  0.1 would not be faster, and an idle
    # Airflow would use a sixth of a CPU.
    "scheduler.scheduler_idle_sleep_time": "0.25",
    "scheduler.scheduler_heartbeat_sec": "1",
    "database.sql_alchemy_connect_args": "scripts.sqlite_timeouts.SYNC",
    "database.sql_alchemy_connect_args_async": "scripts.sqlite_timeouts.ASYNC",
    "dag_processor.parsing_processes": "1",
    "dag_processor.refresh_interval": "15",
}


def connections() -> dict[str, dict[str, Any]]:
    """Returns the connections of the DAGs in ``dags/`` by id, in Airflow's JSON form."""
    return {
        "spark_default": {
            "conn_type": "spark",
            "host": "local[2]",
            "extra": {"deploy-mode": "client", "spark-binary": "spark-submit"},
        },
        # The host of an embedded queue is its file.
        "flights_queue": {"conn_type": "broadway_sqlite", "host": str(FLIGHTS_QUEUE)},
    }


def home_of(root: Path, name: str = "airflow") -> Path:
    """Returns the AIRFLOW_HOME called ``name`` in the checkout ``root``."""
    return root / "build" / name


def airflow_variables(
    root: Path = ROOT,
    *,
    port: int = DEFAULT_PORT,
    home: Path | None = None,
    dags: Path | None = None,
    settings: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns Airflow's environment variables for this checkout.

    Creates ``home``, and the secret that its components share, if necessary.

    :param root: The checkout.
    :param port: The port of the API server.
    :param home: AIRFLOW_HOME; ``build/airflow`` in the checkout by default.
    :param dags: The DAGs folder; ``dags`` in the checkout by default.
    :param settings: Airflow settings as ``section.key``, which override :data:`SETTINGS`.
    """
    root = root.resolve()
    home = (home or home_of(root)).resolve()
    dags = (dags or root / "dags").resolve()
    secret = _shared_secret(home)
    options = {
        **SETTINGS,
        "core.dags_folder": str(dags),
        "core.execution_api_server_url": f"http://127.0.0.1:{port}/execution/",
        "api.port": str(port),
        "api.base_url": f"http://127.0.0.1:{port}",
        "api.secret_key": secret,
        "api_auth.jwt_secret": secret,
        # Otherwise each component generates a key, and cannot decrypt the triggers of another.
        "core.fernet_key": _fernet_key(secret),
        **(settings or {}),
    }
    variables = {
        "AIRFLOW_HOME": str(home),
        # Otherwise Spark resolves the hostname and listens on an external address.
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    for name, value in options.items():
        section, _, key = name.partition(".")
        variables[f"AIRFLOW__{section.upper()}__{key.upper()}"] = value
    for conn_id, connection in connections().items():
        variables[f"AIRFLOW_CONN_{conn_id.upper()}"] = json.dumps(connection)
    return variables


def airflow_env(
    root: Path = ROOT,
    *,
    port: int = DEFAULT_PORT,
    home: Path | None = None,
    dags: Path | None = None,
    settings: Mapping[str, str] | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns a complete environment for Airflow's commands, and for ``dag.test()``.

    Removes Airflow's settings and connections from ``base``, so that a developer's own Airflow has
    no effect.  The checkout and the DAGs folder are on PYTHONPATH, and this interpreter's programs
    (``airflow``, ``spark-submit``) are first on PATH.

    :param base: The base environment; this process's by default.

    The other parameters are those of :func:`airflow_variables`.
    """
    env = {
        name: value
        for name, value in (os.environ if base is None else base).items()
        if not name.startswith(("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_", "_AIRFLOW_"))
    }
    variables = airflow_variables(root, port=port, home=home, dags=dags, settings=settings)
    folders = [str(root.resolve()), variables["AIRFLOW__CORE__DAGS_FOLDER"]]
    env.update(variables)
    env["PATH"] = _prepend([str(Path(sys.executable).parent)], env.get("PATH", os.defpath))
    env["PYTHONPATH"] = _prepend(folders, env.get("PYTHONPATH", ""))
    return env


def _prepend(first: list[str], rest: str) -> str:
    """Prepends folders to a search path, without duplicates."""
    return os.pathsep.join(dict.fromkeys([*first, *filter(None, rest.split(os.pathsep))]))


def _shared_secret(home: Path) -> str:
    """Returns the secret of ``home``, with which all components sign; creates it once."""
    path = home / "secret"
    home.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        # Writes a temporary file and links it, so that concurrent processes read the same secret.
        aside = home / f"secret.{os.getpid()}"
        aside.touch(mode=0o600)
        aside.write_text(secrets.token_hex(48))
        try:
            path.hardlink_to(aside)
        except FileExistsError:
            pass
        aside.unlink()
    return path.read_text()


def _fernet_key(secret: str) -> str:
    """Returns the key with which Airflow encrypts values in its database."""
    return base64.urlsafe_b64encode(hashlib.sha256(secret.encode()).digest()).decode()


def main() -> None:
    """Prints the variables as shell ``export`` lines, for ``scripts/env.sh``."""
    home = home_of(ROOT, *sys.argv[1:2])
    env = airflow_env(home=home, base={"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    del env["PATH"]
    for name, value in sorted(env.items()):
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
