"""From a message to what is staged of it: the part of the work that can fail message by message.

:class:`Rows` is the last step of judging a message a success: it converts the data to the
batcher's schema, the key and the metadata to text, and asks ``partition_by``.  It runs where
``handle_message`` ran, so that an error there fails that message alone, with ``handle_failed`` and
the usual verdict.  What it made travels as the message's data, a :class:`StagedRow`, until the
writer takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_broadway.core.batcher import partitioner
from airflow_broadway.core.message import Message
from airflow_broadway.core.options import Batcher
from airflow_broadway.core.schema import encode_json, encode_metadata, parse_schema

if TYPE_CHECKING:
    from airflow_broadway.core.broadway import Broadway

__all__ = ["Rows", "StagedRow"]

#: Keys whose text is kept; more, and the cache starts anew.
_CACHED_KEYS = 10_000
_NO_METADATA: dict[str, str] = {}


class StagedRow(NamedTuple):
    """What is staged of one message, beside what the message itself says.

    :param data: A tuple of the schema's columns; without a schema ``bytes``, or JSON text.
    :param key: The batch key as JSON text.
    :param partition: What ``partition_by`` said, modulo ``concurrency``; ``None`` without it.
    :param dropped: Keys of the data that the schema does not name, with how often.
    """

    data: Any
    key: str
    partition: int | None
    metadata: dict[str, str]
    dropped: dict[str, int] | None = None


class Rows:
    """Converts messages of ``pipeline``; one object for one thread.

    Without batchers nothing is staged, and messages stay what they are.
    """

    def __init__(self, pipeline: Broadway) -> None:
        self._batchers = {name: _converter(made) for name, made in pipeline.batchers.items()}
        self._keys: dict[str, str] = {}

    def __call__(self, message: Message) -> Message:
        """Return the message with its :class:`StagedRow` for data.

        :raises ConversionError: Naming column, value and rule: the data does not fit the schema or
            is no JSON, or the key or the metadata is no JSON.
        :raises Exception: Whatever ``partition_by`` raises.
        """
        if not self._batchers:
            return message
        return message.put_data(self.row(message))

    def row(self, message: Message) -> StagedRow:
        """Return what is staged of the message; raises as a call does."""
        convert, partition, dropped = self._batchers[message.batcher]
        data = convert(message.data)
        key = message.batch_key
        if type(key) is str:
            text = self._keys.get(key)
            if text is None:
                if len(self._keys) >= _CACHED_KEYS:
                    self._keys.clear()
                text = self._keys[key] = encode_json(key, path="batch_key")
        else:
            text = encode_json(key, path="batch_key")
        if not message.message_id.isascii():
            encode_json(message.message_id, path="message_id")
        metadata = message.metadata
        counted = None
        if dropped:
            counted = dict(dropped)
            dropped.clear()
        made = (
            data,
            text,
            None if partition is None else partition(message),
            _encoded(metadata) if metadata else _NO_METADATA,
            counted,
        )
        return tuple.__new__(StagedRow, made)  # half the cost of calling the class


def _encoded(metadata: Mapping[str, Any]) -> dict[str, str]:
    for key, value in metadata.items():
        if type(value) is not str or type(key) is not str:
            return encode_metadata(metadata)
        if not (value.isascii() and key.isascii()):
            return encode_metadata(metadata)
    return dict(metadata)


#: How the data is converted, the partition, and the counter of dropped keys.
_Converter = tuple[Callable[[Any], Any], Callable[[Message], int] | None, Any]


def _converter(batcher: Batcher) -> _Converter:
    partition = partitioner(batcher)
    if batcher.schema is None:
        return _plain, partition, None
    converter = parse_schema(batcher.schema).converter()
    return converter, partition, converter.dropped


def _plain(data: Any) -> bytes | str:
    """Bytes as they are, anything else as JSON text."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    return encode_json(data)
