"""Writes random passwords and keys, and what contains them, for docker/compose.yaml.

``python3 docker/make_secrets.py [FOLDER]`` keeps what is there.  Only the owner can enter the
folder; its files are readable, since containers that run as other users get them as they are.
"""

from __future__ import annotations

import base64
import json
import secrets
import sys
from pathlib import Path


def make_secrets(folder: Path) -> None:
    """Writes the files that are missing in ``folder``."""
    folder.mkdir(mode=0o700, exist_ok=True)

    def keep(name: str, text: str) -> str:
        path = folder / name
        if not path.exists():
            path.write_text(text)
            path.chmod(0o644)
        return path.read_text()

    for name in ("api_secret_key", "jwt_secret"):
        keep(name, secrets.token_hex(48))
    keep("fernet_key", base64.urlsafe_b64encode(secrets.token_bytes(32)).decode())
    password = keep("postgres_password", secrets.token_hex(24))
    database = f"airflow:{password}@postgres/airflow"
    keep("sql_alchemy_conn", f"postgresql+psycopg2://{database}")
    keep("celery_result_backend", f"db+postgresql://{database}")
    user = keep("rabbitmq_user", f"broadway:{secrets.token_hex(24)}")
    name, _, password = user.partition(":")
    keep("rabbitmq.conf", f"default_user = {name}\ndefault_pass = {password}\n")
    keep("rabbitmq_url", f"amqp://{user}@127.0.0.1:5672/")
    keep("celery_broker_url", f"amqp://{user}@rabbitmq:5672//")
    keep("connections.json", json.dumps(_connections(name, password), indent=1))


def _connections(name: str, password: str) -> dict[str, object]:
    return {
        "rabbitmq_default": {
            "conn_type": "rabbitmq",
            "host": "rabbitmq",
            "login": name,
            "password": password,
        },
        "kafka_default": {"conn_type": "kafka", "extra": {"bootstrap.servers": "kafka:19092"}},
        # moto takes any key.
        "lake": {
            "conn_type": "aws",
            "login": "any",
            "password": secrets.token_hex(24),
            "extra": {"endpoint_url": "http://aws:5000", "region_name": "us-east-1"},
        },
        "spark_default": {
            "conn_type": "spark",
            "host": "spark://spark-master:7077",
            "extra": {"deploy-mode": "client"},
        },
        "flights_queue": {
            "conn_type": "broadway_sqlite",
            "host": "/opt/airflow/queues/flights.db",
        },
    }


if __name__ == "__main__":
    make_secrets(Path(*sys.argv[1:] or [Path(__file__).parent / "secrets"]))
