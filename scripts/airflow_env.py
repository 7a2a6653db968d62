"""The one definition of a checkout's local Airflow: its home, settings and connections.

``make demo``, ``make test``, ``make up`` and the fault tests all run Airflow with what stands here,
so that they cannot drift apart.  Standard library only: the shell asks for the same values with
``python -m scripts.airflow_env``, before every target.

Every setting is an environment variable, and a generated ``airflow.cfg`` never matters: environment
variables win over it.
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

#: The queue file of the demo's flights; ``make demo`` starts with a fresh one.
FLIGHTS_QUEUE = ROOT / "build" / "demo" / "queue.db"

#: Where ``make up`` listens, if the port is free.
DEFAULT_PORT = 8080

#: Airflow's settings that never depend on the place, as ``section.key``.
SETTINGS: Mapping[str, str] = {
    "core.executor": "LocalExecutor",
    "core.parallelism": "4",
    "core.load_examples": "False",
    "core.dags_are_paused_at_creation": "False",
    # Every client of the loopback port is an administrator: no login on a laptop.
    "core.simple_auth_manager_all_admins": "True",
    "api.host": "127.0.0.1",
    "api.workers": "1",
    # Five no-op tasks in a chain take 2 s rather than 6 s.  With 0.1 they do not take less, and an
    # Airflow that has nothing to do takes a sixth of a processor.
    "scheduler.scheduler_idle_sleep_time": "0.25",
    "scheduler.scheduler_heartbeat_sec": "1",
    "database.sql_alchemy_connect_args": "scripts.airflow_patience.SYNC",
    "database.sql_alchemy_connect_args_async": "scripts.airflow_patience.ASYNC",
    "dag_processor.parsing_processes": "1",
    "dag_processor.refresh_interval": "15",
}


def connections() -> dict[str, dict[str, Any]]:
    """Return the connections of the DAGs in ``dags/``, by connection id, in Airflow's JSON form."""
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
    """Returns only the variables that make Airflow this checkout's, not a whole environment.

    Makes ``home`` if needed, and in it the secret that its components share.

    :param root: The checkout.
    :param port: Where the API server is, or will be.
    :param home: AIRFLOW_HOME; ``build/airflow`` in the checkout if not given.
    :param dags: The DAGs folder; ``dags`` in the checkout if not given.
    :param settings: Airflow settings as ``section.key``, over :data:`SETTINGS`.
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
        # Else the components of a new home each make one, and one cannot read another's triggers.
        "core.fernet_key": _fernet_key(secret),
        **(settings or {}),
    }
    variables = {
        "AIRFLOW_HOME": str(home),
        # Spark would look up the machine's name and listen on its outward address.
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
    """Returns a whole environment for Airflow's commands, and for ``dag.test()``, in this checkout.

    Airflow settings and connections that ``base`` carries are left out, so that a developer's own
    Airflow never shows through.  The checkout and the DAGs folder are on PYTHONPATH, and this
    interpreter's programs (``airflow``, ``spark-submit``) first on PATH.

    :param base: The environment to start from; this process's if not given.

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
    """Puts ``first`` at the start of a search path, each folder once."""
    return os.pathsep.join(dict.fromkeys([*first, *filter(None, rest.split(os.pathsep))]))


def _shared_secret(home: Path) -> str:
    """Returns the secret of ``home``, made once: all components sign and check with the same."""
    path = home / "secret"
    home.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        # Written aside and linked: of two processes at once one wins, and both read it whole.
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
    """Returns the key to what Airflow keeps encrypted in its database."""
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
