"""The way to one queue: boto3's client, opened by the connection, and its errors translated.

One call here is one request, of up to ten entries where SQS takes them in a batch.  The client may
be used from several threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from airflow_broadway.core.custody.producer import Connection, ProducerEnv
from airflow_broadway.core.errors import ConnectionMissing, ProducerError
from airflow_broadway.producers.kit.checks import connection_of, warn_of_plain_http
from airflow_broadway.producers.kit.failures import Failures
from airflow_broadway.producers.kit.receipts.receipts import ReceiptsFolder
from airflow_broadway.producers.sqs.errors import translated
from airflow_broadway.producers.sqs.options import DEFAULT_CONNECTION, SqsOptions, region_of

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient


__all__ = [
    "BatchAnswer",
    "Queue",
    "boto_client",
    "open_queue",
    "receipts_folder",
]

#: Days for which SQS keeps a message at most.
_KEPT_DAYS: Final = 14

#: Extras of an Airflow connection that only the Amazon provider knows how to follow.
_PROVIDERS = frozenset(
    {"role_arn", "assume_role_method", "assume_role_kwargs", "session_kwargs", "s3_config_file"}
)


def _endpoint_of(url: str) -> str | None:
    """The endpoint in the URL of a queue elsewhere than at AWS's own: a VPC's, a test server's."""
    host = urlsplit(url).netloc
    name = host.partition(":")[0]
    if name.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws")) and ".vpce." not in name:
        return None
    return f"{urlsplit(url).scheme}://{host}"


class BatchAnswer(NamedTuple):
    """What SQS answered to a request of several entries: by their ``Id``."""

    done: frozenset[str]
    failed: list[dict[str, Any]]


def _answer_of(answer: Any) -> BatchAnswer:
    done = frozenset(str(each.get("Id")) for each in answer.get("Successful") or ())
    return BatchAnswer(done, list(answer.get("Failed") or ()))


class Queue:
    """One queue: the requests that this package makes of it.

    :raises BroadwayError: From every call, in the words of ``errors``.
    """

    def __init__(self, client: SQSClient, url: str, *, shown: str = "") -> None:
        self.client = client
        self.url = url
        self.name = shown or url.rpartition("/")[2] or url
        meta = client.meta
        self._where = f"in region {meta.region_name!r} at {meta.endpoint_url}"
        #: When SQS answered the last request for attributes, by its own clock.
        self.answered_at: datetime | None = None

    def receive(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One ``ReceiveMessage``: its messages as boto3 gives them."""
        try:
            answer: Any = self.client.receive_message(QueueUrl=self.url, **request)
        except Exception as error:
            raise self._translated(error, "ReceiveMessage") from error
        return answer.get("Messages") or []

    def delete(self, entries: Sequence[Any]) -> BatchAnswer:
        """One ``DeleteMessageBatch``."""
        try:
            answer: Any = self.client.delete_message_batch(QueueUrl=self.url, Entries=entries)
        except Exception as error:
            raise self._translated(error, "DeleteMessage") from error
        return _answer_of(answer)

    def change(self, entries: Sequence[Any]) -> BatchAnswer:
        """One ``ChangeMessageVisibilityBatch``."""
        try:
            answer: Any = self.client.change_message_visibility_batch(
                QueueUrl=self.url, Entries=entries
            )
        except Exception as error:
            raise self._translated(error, "ChangeMessageVisibility") from error
        return _answer_of(answer)

    def send(self, entries: Sequence[Any]) -> BatchAnswer:
        """One ``SendMessageBatch``."""
        try:
            answer: Any = self.client.send_message_batch(QueueUrl=self.url, Entries=entries)
        except Exception as error:
            raise self._translated(error, "SendMessage") from error
        return _answer_of(answer)

    def attributes(self, *names: Any) -> dict[str, str]:
        """One ``GetQueueAttributes``."""
        try:
            answer: Any = self.client.get_queue_attributes(
                QueueUrl=self.url, AttributeNames=list(names or ("All",))
            )
        except Exception as error:
            raise self._translated(error, "GetQueueAttributes") from error
        self.answered_at = _date_of(answer)
        return dict(answer.get("Attributes") or {})

    def other(self, place: str) -> Queue:
        """Another queue, by its URL, ARN or name.

        :raises ProducerError: If there is none, or its URL may not be asked for.
        """
        if place.startswith(("https://", "http://")):
            return Queue(self.client, place)
        request: dict[str, Any] = {"QueueName": place}
        if place.startswith("arn:"):
            account, name = place.split(":")[4:6]
            request = {"QueueName": name, "QueueOwnerAWSAccountId": account}
        try:
            url = self.client.get_queue_url(**request)["QueueUrl"]
        except Exception as error:
            raise translated(error, "GetQueueUrl", request["QueueName"], self._where) from error
        return Queue(self.client, url)

    def close(self) -> None:
        """Release connections.  Safe to repeat."""
        self.client.close()

    def _translated(self, error: Exception, action: str) -> Exception:
        return translated(error, action, self.name, self._where)


def _date_of(answer: Mapping[str, Any]) -> datetime | None:
    """The server's own time, where the answer has it."""
    headers = (answer.get("ResponseMetadata") or {}).get("HTTPHeaders") or {}
    try:
        found = parsedate_to_datetime(headers["date"])
    except (KeyError, TypeError, ValueError):
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


def receipts_folder(producer: SqsOptions, env: ProducerEnv) -> ReceiptsFolder:
    """Where the receipts of the producer's queue are."""
    return ReceiptsFolder(
        producer.kind, env.shared, producer.place, failures=partial(Failures, kept_days=_KEPT_DAYS)
    )


def open_queue(producer: SqsOptions, env: ProducerEnv) -> Queue:
    """The producer's queue.

    :raises ConnectionMissing: If the connection is missing or lacks what is needed.
    :raises ProducerError: If the queue has to be looked up by name, and is not there.
    """
    client = boto_client(producer, env)
    if producer.queue_url is not None:
        return Queue(client, producer.queue_url)
    return Queue(client, "", shown=str(producer.queue_name)).other(str(producer.queue_name))


def boto_client(producer: SqsOptions, env: ProducerEnv) -> SQSClient:
    """A client of boto3 with a pool for all of the producer's threads."""
    connection = connection_of(
        env, producer.conn_id, default=DEFAULT_CONNECTION, types=("aws",), service="SQS"
    )
    extra: Mapping[str, Any] = connection.extra if connection is not None else {}
    service = (extra.get("service_config") or {}).get("sqs") or {}
    region = (
        producer.region_name
        or (region_of(producer.queue_url) if producer.queue_url else None)
        or service.get("region_name")
        or extra.get("region_name")
    )
    endpoint = (
        producer.endpoint_url
        or service.get("endpoint_url")
        or extra.get("endpoint_url")
        or (_endpoint_of(producer.queue_url) if producer.queue_url else None)
    )
    if endpoint is not None:
        warn_of_plain_http(endpoint, "The messages of SQS")
    try:
        return _client(producer, connection, region, endpoint, extra)
    except Exception as error:
        if isinstance(error, (ConnectionMissing, ProducerError)):
            raise
        name = producer.queue_url or str(producer.queue_name)
        raise translated(error, "opening a client", name, f"in region {region!r}") from error


def _client(
    producer: SqsOptions,
    connection: Connection | None,
    region: str | None,
    endpoint: str | None,
    extra: Mapping[str, Any],
) -> SQSClient:
    from botocore.config import Config

    own = dict(extra.get("config_kwargs") or {})
    base = Config(**own) if own else Config()
    config = base.merge(
        Config(
            max_pool_connections=producer.receive_concurrency + 4,
            retries=own.get("retries") or {"mode": "standard", "max_attempts": 5},
            connect_timeout=own.get("connect_timeout", 10),
            # A long poll is no broken connection.
            read_timeout=max(own.get("read_timeout", 0), (producer.wait_time_seconds or 0) + 40),
            tcp_keepalive=True,
        )
    )
    if connection is not None and _PROVIDERS & set(extra):
        create: Any = _provider_session(connection, region, config).client
    else:
        create = _plain_session(connection, extra).create_client
    client: SQSClient = create(
        "sqs",
        endpoint_url=endpoint,
        region_name=region,
        verify=extra.get("verify"),
        config=config,
    )
    return client


def _plain_session(connection: Connection | None, extra: Mapping[str, Any]) -> Any:
    """A session by what the connection says, else by what botocore finds."""
    from botocore.session import Session

    session = Session(profile=extra.get("profile_name"))
    session.register_component("data_loader", _loader())
    if connection is not None:
        key = connection.login or extra.get("aws_access_key_id")
        secret = connection.password or extra.get("aws_secret_access_key")
        if bool(key) != bool(secret):
            raise ConnectionMissing(
                f"the connection {connection.conn_id!r} has an access key (login) or a secret key"
                " (password), and needs both or neither"
            )
        if key:
            session.set_credentials(key, secret, extra.get("aws_session_token"))
    return session


@cache
def _loader() -> Any:
    """Botocore's descriptions of AWS, read once a process: seven eighths of opening a client."""
    from botocore.loaders import create_loader

    return create_loader()


def _provider_session(connection: Connection, region: str | None, config: Any) -> Any:
    """A session by the Amazon provider, which knows roles, federation and their renewal."""
    try:
        from airflow.providers.amazon.aws.hooks.base_aws import BaseSessionFactory
        from airflow.providers.amazon.aws.utils.connection_wrapper import (
            AwsConnectionWrapper,
        )
    except ImportError:
        raise ConnectionMissing(
            f"the connection {connection.conn_id!r} assumes a role, which needs"
            " apache-airflow-providers-amazon: install airflow-broadway[sqs]"
        ) from None
    wrapper = AwsConnectionWrapper.from_connection_metadata(
        conn_id=connection.conn_id,
        login=connection.login or None,
        password=connection.password or None,
        extra=dict(connection.extra),
    )
    return BaseSessionFactory(conn=wrapper, region_name=region, config=config).create_session()
