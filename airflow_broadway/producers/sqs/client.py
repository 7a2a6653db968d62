"""Opens boto3's client by the connection, sends requests to one queue, and translates errors.

One call here is one request, with up to ten entries for batch requests.  The client is thread-safe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import ConnectionMissing, ProducerError
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.producers.engine.port import Hidden, Refusal
from airflow_broadway.producers.kit.checks import connection_of, warn_of_plain_http
from airflow_broadway.producers.sqs.errors import retryable, throttled, translated
from airflow_broadway.producers.sqs.options import DEFAULT_CONNECTION, SqsProducer, region_of

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

#: Error codes of an invalid receipt handle.
_INVALID: Final = frozenset(
    {
        "AWS.SimpleQueueService.MessageNotInflight",
        "InvalidParameterValue",
        "MessageNotInflight",
        "ReceiptHandleIsInvalid",
    }
)
#: Extras of an Airflow connection that only the Amazon provider supports.
_PROVIDERS = frozenset(
    {"role_arn", "assume_role_method", "assume_role_kwargs", "session_kwargs", "s3_config_file"}
)


def _endpoint_of(url: str) -> str | None:
    """Returns the endpoint of a queue URL that is not AWS's own, e.g. of a VPC or a test server."""
    host = urlsplit(url).netloc
    name = host.partition(":")[0]
    if name.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws")) and ".vpce." not in name:
        return None
    return f"{urlsplit(url).scheme}://{host}"


class Queue:
    """The requests to one queue.

    :raises BroadwayError: From every call, as translated by ``errors``.
    """

    def __init__(self, client: SQSClient, url: str, *, shown: str = "") -> None:
        self.client = client
        self.url = url
        self.name = shown or url.rpartition("/")[2] or url
        meta = client.meta
        self._where = f"in region {meta.region_name!r} at {meta.endpoint_url}"

    def receive(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Sends one ``ReceiveMessage``; returns boto3's messages."""
        return self._request("ReceiveMessage", "receive_message", **request).get("Messages") or []

    def remove(self, receipts: Sequence[str]) -> Mapping[int, Refusal]:
        """Sends one ``DeleteMessageBatch``."""
        entries = [{"ReceiptHandle": receipt} for receipt in receipts]
        return self._batch("DeleteMessage", "delete_message_batch", entries)

    def hide(self, hidden: Sequence[Hidden]) -> Mapping[int, Refusal]:
        """Sends one ``ChangeMessageVisibilityBatch``."""
        entries = [
            {"ReceiptHandle": receipt, "VisibilityTimeout": seconds} for receipt, seconds in hidden
        ]
        return self._batch("ChangeMessageVisibility", "change_message_visibility_batch", entries)

    def send(self, entries: Sequence[Any]) -> Mapping[int, Refusal]:
        """Sends one ``SendMessageBatch``, whose entries have no ``Id`` yet."""
        return self._batch("SendMessage", "send_message_batch", entries)

    def attributes(self, *names: Any) -> dict[str, str]:
        """Sends one ``GetQueueAttributes``."""
        response = self._request(
            "GetQueueAttributes", "get_queue_attributes", AttributeNames=list(names or ("All",))
        )
        return dict(response.get("Attributes") or {})

    def other(self, place: str) -> Queue:
        """Opens another queue by its URL, ARN or name.

        :raises ProducerError: If there is none, or GetQueueUrl is denied.
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
        """Releases connections.  Safe to repeat."""
        self.client.close()

    def _request(self, action: str, method: str, **request: Any) -> Any:
        try:
            return getattr(self.client, method)(QueueUrl=self.url, **request)
        except Exception as error:
            raise translated(error, action, self.name, self._where) from error

    def _batch(
        self, action: str, method: str, entries: Sequence[Mapping[str, Any]]
    ) -> Mapping[int, Refusal]:
        """Sends one batch request; entries missing from ``Successful`` are refused."""
        numbered = [{"Id": str(index), **entry} for index, entry in enumerate(entries)]
        response = self._request(action, method, Entries=numbered)
        done = {str(entry.get("Id")) for entry in response.get("Successful") or ()}
        failed = {str(entry.get("Id")): entry for entry in response.get("Failed") or ()}
        return {
            index: _refusal(failed.get(str(index)))
            for index in range(len(entries))
            if str(index) in failed or str(index) not in done
        }


def _refusal(failed: dict[str, Any] | None) -> Refusal:
    """Converts the result of an unsuccessful entry."""
    if failed is None:
        return Refusal("NoAnswer", "SQS did not say what became of it", again=True, unclear=True)
    code, text = str(failed.get("Code", "")), str(failed.get("Message", ""))
    invalid = code in _INVALID
    retry = not invalid and retryable(code, bool(failed.get("SenderFault", False)))
    # A visibility timeout beyond the 12 hours has the same code.
    invalid = invalid and "Total VisibilityTimeout" not in text
    # An entry that failed within SQS may have been carried out; a throttled one was not.
    unclear = retry and not throttled(code)
    return Refusal(code, text, invalid=invalid, again=retry, unclear=unclear)


def redrive_of(attributes: Mapping[str, str]) -> dict[str, Any]:
    """Parses the redrive policy in a queue's attributes; empty if there is none."""
    try:
        policy = json.loads(attributes.get("RedrivePolicy") or "{}")
    except ValueError:
        return {}
    return policy if isinstance(policy, dict) else {}


def count_of(attributes: Mapping[str, str], which: str = "") -> int:
    """Returns an approximate number of messages from a queue's attributes."""
    return int(attributes.get(f"ApproximateNumberOfMessages{which}", 0))


def open_queue(producer: SqsProducer, env: ProducerEnv) -> Queue:
    """Opens the producer's queue.

    :raises ConnectionMissing: If the connection is missing or incomplete.
    :raises ProducerError: If the queue has to be looked up by name, and does not exist.
    """
    client = boto_client(producer, env)
    if producer.queue_url is not None:
        return Queue(client, producer.queue_url)
    return Queue(client, "", shown=str(producer.queue_name)).other(str(producer.queue_name))


def boto_client(producer: SqsProducer, env: ProducerEnv) -> SQSClient:
    """Creates a boto3 client with a connection pool for all of the producer's threads."""
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
        config = _config(producer, dict(extra.get("config_kwargs") or {}))
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
    except (ConnectionMissing, ProducerError):
        raise
    except Exception as error:
        raise translated(
            error, "opening a client", producer.place, f"in region {region!r}"
        ) from error


def _config(producer: SqsProducer, own: Mapping[str, Any]) -> Any:
    """Builds botocore's configuration: defaults, the connection's settings, and the pool size."""
    from botocore.config import Config

    settings = {
        "retries": {"mode": "standard", "max_attempts": 5},
        "connect_timeout": 10,
        **own,
        "max_pool_connections": producer.receive_concurrency + 4,
        # Longer than a long poll, which would time out otherwise.
        "read_timeout": max(own.get("read_timeout", 0), (producer.wait_time_seconds or 0) + 40),
        "tcp_keepalive": True,
    }
    return Config(**settings)


def _plain_session(connection: Connection | None, extra: Mapping[str, Any]) -> Any:
    """Creates a session with the connection's credentials, else botocore's default chain."""
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
    """Loads botocore's service models once per process: most of the time to open a client."""
    from botocore.loaders import create_loader

    return create_loader()


def _provider_session(connection: Connection, region: str | None, config: Any) -> Any:
    """Creates a session by the Amazon provider, which supports roles and federation."""
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
