"""librdkafka's mock cluster, as a process: brokers in memory that end with it, on loopback alone.

``tests/kafka_server.py`` starts it.  It writes its address, one line of JSON, then carries out each
line of its input, as ``["topic_create", "name", 3, 1]``, answers ``null`` or the error, and ends
with its input, so with its parent.

The names are those of ``rdkafka_mock.h``, without ``rd_kafka_mock_``.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import confluent_kafka

__all__ = ["main"]

_PRODUCER = 0


def _library() -> ctypes.CDLL:
    """Loads the librdkafka of the client's package."""
    package = Path(confluent_kafka.__file__).parent
    for folder in (package.with_name("confluent_kafka.libs"), package / ".dylibs"):
        for path in folder.glob("librdkafka*"):
            return ctypes.CDLL(str(path))
    return ctypes.CDLL(None)


class Mock:
    """The cluster; each method is a command.

    :param brokers: How many brokers it has; their ids are 1 and so on.
    """

    def __init__(self, brokers: int) -> None:
        library = self._library = _library()
        for name in ("conf_new", "new", "mock_cluster_new"):
            getattr(library, f"rd_kafka_{name}").restype = ctypes.c_void_p
        library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        error = ctypes.create_string_buffer(512)
        conf = ctypes.c_void_p(library.rd_kafka_conf_new())
        handle = library.rd_kafka_new(_PRODUCER, conf, error, ctypes.c_size_t(len(error)))
        if not handle:
            raise RuntimeError(error.value.decode())
        self._cluster = ctypes.c_void_p(
            library.rd_kafka_mock_cluster_new(ctypes.c_void_p(handle), brokers)
        )

    @property
    def bootstrap(self) -> str:
        result: bytes = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster)
        return result.decode()

    def topic_create(self, name: str, partitions: int, replicas: int) -> None:
        self._checked("topic_create", name.encode(), partitions, replicas)

    def topic_set_error(self, name: str, code: int) -> None:
        """Answers every request about a topic with an error; 0 ends that."""
        self._call("topic_set_error", name.encode(), code)

    def push_request_errors_array(self, api: int, codes: list[int]) -> None:
        """Answers the next requests of one kind with these errors."""
        array = (ctypes.c_int * len(codes))(*codes)
        self._call(
            "push_request_errors_array", ctypes.c_int16(api), ctypes.c_size_t(len(codes)), array
        )

    def clear_request_errors(self, api: int) -> None:
        self._call("clear_request_errors", ctypes.c_int16(api))

    def broker_set_down(self, broker: int) -> None:
        self._checked("broker_set_down", ctypes.c_int32(broker))

    def broker_set_up(self, broker: int) -> None:
        self._checked("broker_set_up", ctypes.c_int32(broker))

    def broker_set_rtt(self, broker: int, milliseconds: int) -> None:
        """Delays each answer."""
        self._checked("broker_set_rtt", ctypes.c_int32(broker), milliseconds)

    def partition_set_leader(self, topic: str, partition: int, broker: int) -> None:
        """Moves the leader to a broker; -1: to none."""
        place = topic.encode(), ctypes.c_int32(partition)
        self._checked("partition_set_leader", *place, ctypes.c_int32(broker))

    def _checked(self, name: str, *arguments: Any) -> None:
        code = self._call(name, *arguments)
        if code:
            raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(code))

    def _call(self, name: str, *arguments: Any) -> int:
        result: int = getattr(self._library, f"rd_kafka_mock_{name}")(self._cluster, *arguments)
        return result


def main() -> None:
    """Serves until the input ends."""
    mock = Mock(int(sys.argv[1]))
    _answer(mock.bootstrap)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        command: Callable[..., None] = getattr(mock, name)
        try:
            command(*arguments)
        except confluent_kafka.KafkaException as error:
            _answer(str(error))
        else:
            _answer(None)


def _answer(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
