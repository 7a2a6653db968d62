"""An Airflow of several hosts: a control host, and Celery workers that share only the bucket."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from scripts.airflow_api import AirflowApi, ApiError, LocalAirflowError
from scripts.airflow_env import ROOT, airflow_env
from scripts.load_flights import flights
from scripts.local_airflow import COMPONENTS, free_port
from tests.cluster.hosts import Network, Process, kill_tree
from tests.cluster.queues import KafkaTopic, Queue, RabbitMQQueue, SqsQueue
from tests.cluster.services import BUCKET, Services, run_services
from tests.spark_standalone import Standalone

BUILD = ROOT / "build"
FOLDER = BUILD / "cluster"
CONTROL, WORKERS = "control", ("worker-1", "worker-2")
TRIGGERER = CONTROL, "triggerer"
SPARK_HOSTS = ("spark-1", "spark-2")
#: PostgreSQL's JDBC driver for Spark, if Maven could resolve it.
JDBC = next((ROOT / "build" / "tables").glob("postgresql-*.jar"), None)
_WORKER = ["celery", "worker", "--concurrency", "2", "--skip-serve-logs", "--without-gossip"]


class Cluster(AirflowApi):
    """The running cluster; a client of Airflow's API on the control host.

    :param services: PostgreSQL, brokers and S3.
    """

    #: A standalone Spark with one host per worker; ``None`` without :data:`JDBC`.
    spark: Standalone | None = None

    def __init__(self, services: Services, network: Network, folder: Path) -> None:
        self.services, self.folder = services, folder
        names = [CONTROL, *WORKERS, *SPARK_HOSTS]
        self.hosts = network.make_hosts(names, folder, BUILD)
        self.port = free_port()
        super().__init__(f"http://{self.hosts[CONTROL].address}:{self.port}")
        self.processes: dict[tuple[str, str], Process] = {}
        self._restarts = Counter[str]()
        self._sent = 0
        self.env = self._environment(network.gateway)
        self.queues: dict[str, Queue] = {
            "RabbitMQ": RabbitMQQueue("cluster_flights", services.rabbitmq, "flights"),
            "SQS": SqsQueue("cluster_sqs", services.sqs, "flights"),
        }
        if services.kafka:
            self.queues["Kafka"] = KafkaTopic("cluster_kafka", services.kafka, "flights")

    def start(self, stack: ExitStack, gateway: str) -> None:
        """Creates the databases and the table, and starts Spark, all components and workers.

        :param stack: The exit stack that stops Spark.
        """
        with self._database() as session:
            session.execute("CREATE TABLE flights (number int, redelivered boolean)")
        if JDBC:
            hosts = [self.hosts[name] for name in SPARK_HOSTS]
            # The build folder is not visible on the hosts.
            jars = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cluster-jars-")))
            shutil.copy(JDBC, jars)
            spark = Standalone(self.folder / "spark", address=gateway, hosts=hosts)
            self.spark = stack.enter_context(spark)
            client = {"deploy-mode": "client"}
            connection = {"conn_type": "spark", "host": spark.master, "extra": client}
            self.env["AIRFLOW_CONN_CLUSTER_SPARK"] = json.dumps(connection)
            self.env["CLUSTER_JARS"] = str(jars / JDBC.name)
            rabbitmq = self.services.rabbitmq
            self.queues["Spark"] = RabbitMQQueue("cluster_spark", rabbitmq, "spark_flights")
        migrate = self.hosts[CONTROL].start("migrate", [*_AIRFLOW, "db", "migrate"], self.env)
        if migrate.wait():
            raise self._failure("Airflow's database could not be migrated", "migrate")
        for name in COMPONENTS:
            self.start_component(name)
        for worker in WORKERS:
            self.start_worker(worker)
        self._wait(self._is_healthy, 180.0, lambda: "Airflow is not healthy", "api-server")

    def _is_healthy(self) -> bool:
        try:
            health = super().api("GET", "/monitor/health")
        except (ApiError, OSError):
            return False
        parts = ("metadatabase", "scheduler", "dag_processor", "triggerer")
        return all(health[part]["status"] == "healthy" for part in parts)

    def start_component(self, name: str) -> None:
        """Starts a component of Airflow on the control host."""
        command = [*_AIRFLOW, *COMPONENTS[name]]
        self.processes[CONTROL, name] = self.hosts[CONTROL].start(name, command, self.env)

    def start_worker(self, host: str, env: Mapping[str, str] | None = None) -> None:
        """Starts the Celery worker of a host.

        :param env: Additional variables of this worker.
        """
        command = [*_AIRFLOW, *_WORKER, "--celery-hostname", f"celery@{host}"]
        started = self.hosts[host].start("celery", command, {**self.env, **(env or {})})
        self.processes[host, "celery"] = started

    def kill(self, host: str, name: str) -> None:
        """Kills a component or worker, and its tasks, with SIGKILL."""
        kill_tree(self.processes.pop((host, name)))

    # The API server or its database may be restarting.
    @retry(
        retry=retry_if_exception_type((ApiError, OSError)),
        stop=stop_after_attempt(20),
        wait=wait_fixed(2.0),
        reraise=True,
    )
    def api(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Calls Airflow's API, and retries while it does not respond."""
        self.check_alive()
        return super().api(method, path, body, **query)

    def check_alive(self) -> None:
        """Restarts components of Airflow that have ended, like a process supervisor.

        :raises LocalAirflowError: If a worker has ended, or a component ends repeatedly; with the
            end of its log.
        """
        for (host, name), process in list(self.processes.items()):
            if process.poll() is None:
                continue
            self._restarts[name] += 1
            if host == CONTROL and self._restarts[name] <= _MAX_RESTARTS:
                self.start_component(name)
            else:
                text = f"{name} on {host} ended with code {process.returncode}"
                raise self._failure(text, f"{host}/{name}")

    def _failure(self, what: str, log: str) -> LocalAirflowError:
        """Returns an error with the end of a log: of a component, or ``<host>/<name>``."""
        path = self.folder / (log if "/" in log else f"{CONTROL}/{log}")
        lines = Path(f"{path}.log").read_text(errors="replace").splitlines()[-30:]
        return LocalAirflowError("\n".join([f"{what}.  The end of {path}.log:", *lines]))

    def _environment(self, gateway: str) -> dict[str, str]:
        bucket = f"http://{gateway}:{self.services.s3_gate.port}"
        settings = {
            "core.executor": "CeleryExecutor",
            "core.hostname_callable": "tests.cluster.hosts.hostname",
            "core.execution_api_server_url": f"{self.url}/execution/",
            "api.base_url": self.url,
            "api.host": self.hosts[CONTROL].address,
            "api.port": str(self.port),
            "database.sql_alchemy_conn": self.services.postgres.url,
            "celery.broker_url": f"amqp://guest:guest@{gateway}:{self.services.broker.port}//",
            "celery.result_backend": f"db+{self.services.postgres.url}",
            "celery.worker_prefetch_multiplier": "1",
            # Detects a dead worker after 20 seconds instead of 5 minutes.
            "scheduler.task_instance_heartbeat_timeout": "20",
            "scheduler.task_instance_heartbeat_timeout_detection_interval": "5",
            "scheduler.task_queued_timeout": "30",
            "scheduler.task_queued_timeout_check_interval": "10",
            "triggerer.job_heartbeat_sec": "2",
            # Airflow's own tokens expire by the hosts' clocks.
            "api_auth.jwt_leeway": "900",
            "broadway.staging": f"s3://cluster_s3@{BUCKET}/staging",
        }
        connections = {
            "cluster_s3": {
                "conn_type": "aws",
                "login": "test",
                "password": "test",
                "extra": {"endpoint_url": bucket, "region_name": "us-east-1"},
            },
            "cluster_rabbitmq": {
                "conn_type": "rabbitmq",
                "host": gateway,
                "port": self.services.broker.port,
                "login": "guest",
                "password": "guest",
            },
            "cluster_sqs": self.services.sqs.connection(
                endpoint_url=f"http://{gateway}:{self.services.sqs_gate.port}"
            ),
            "cluster_postgres": {**self.services.postgres.connection, "conn_type": "postgres"},
        }
        if self.services.kafka:
            connections["cluster_kafka"] = self.services.kafka.connection()
        home = self.folder / "airflow"
        dags = Path(__file__).with_name("dags")
        env = airflow_env(ROOT, port=self.port, home=home, dags=dags, settings=settings)
        # These arguments are for SQLite.
        for suffix in ("", "_ASYNC"):
            env.pop(f"AIRFLOW__DATABASE__SQL_ALCHEMY_CONNECT_ARGS{suffix}", None)
        env.pop("SPARK_LOCAL_IP", None)
        for name in [name for name in env if name.startswith("AWS_")]:
            del env[name]
        variables = {f"AIRFLOW_CONN_{key.upper()}": json.dumps(c) for key, c in connections.items()}
        return {**env, **variables, "PYTHONUNBUFFERED": "1"}

    # -- messages and output ---------------------------------------------------------------------

    def send(self, queue: Queue, count: int, seed: int | None) -> Expected:
        """Sends numbered flights to an empty queue.

        :param seed: Selects random flights; ``None``: the first ones.
        """
        expected = Expected()
        queue.fill(
            expected.add(n, flight) for n, flight in enumerate(flights(count, seed), self._sent)
        )
        self._sent += count
        return expected

    def output(self) -> dict[int, list[bool]]:
        """Returns the redelivery marks of the output rows by flight number."""
        bucket, rows = self.services.bucket(), defaultdict[int, list[bool]](list)
        for path in bucket.find(f"{BUCKET}/output", refresh=True):
            for line in bucket.cat(path).splitlines():
                row = json.loads(line)
                rows[row["number"]].append(row["redelivered"])
        with self._database() as session:
            for number, redelivered in session.execute("SELECT * FROM flights"):
                rows[number].append(redelivered)
        return rows

    def _database(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Connects to the database with the table, which is Airflow's metadata database."""
        server = self.services.postgres.connection
        host, port, user = server["host"], server["port"], server["login"]
        return psycopg.connect(host=host, port=port, user=user, dbname=server["schema"])


class Expected:
    """The sent flights: those that must be in the output, and those that are dead letters."""

    def __init__(self) -> None:
        self.rows: set[int] = set()
        self.dead_letters: set[int] = set()

    def add(self, number: int, flight: Mapping[str, Any]) -> bytes:
        """Counts a flight; returns its message."""
        (self.dead_letters if flight["dep_delay"] is None else self.rows).add(number)
        return json.dumps({"number": number, **flight}).encode()


#: Restarts are normal: the scheduler exits when its database is unavailable for a moment.
_MAX_RESTARTS = 5

_AIRFLOW = [sys.executable, "-m", "airflow"]


@contextmanager
def run_cluster(network: Network, folder: Path = FOLDER) -> Iterator[Cluster]:
    """Starts services, hosts and Airflow; all processes end with this program's namespaces.

    :raises ServiceMissing: If a program is not installed.
    :raises HostMissing: If a host cannot be created.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with run_services(folder, network.gateway) as services, ExitStack() as stack:
        cluster = Cluster(services, network, folder)
        try:
            cluster.start(stack, network.gateway)
            yield cluster
        finally:
            for process in cluster.processes.values():
                if process.poll() is None:
                    kill_tree(process)
