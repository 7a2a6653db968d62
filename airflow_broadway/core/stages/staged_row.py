"""Converts a message to what its batcher receives, which can fail message by message.

It is the last step before a message counts as a success.  The data is converted to the batcher's
schema, or without one must be serializable; so must key and metadata.  ``partition_by`` is called
here, too.  It runs where ``handle_message`` ran, so that an error fails that message alone, with
``handle_failed`` and the usual verdict.

:class:`RowConverter` returns what a process task stages.  Where nothing is staged,
:class:`DirectConverter` returns what would be read back, so that a batch has the same content in a
run in one process, in the test kit and in a task group.  ``docs/semantics.md`` has the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from airflow_broadway.core.formats.plan import plain_key
from airflow_broadway.core.model.message import BatchMode, Message
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.schema.ddl import parse_schema
from airflow_broadway.core.schema.encoding import (
    dump,
    dump_key,
    dump_metadata,
    encode_json,
    encode_metadata,
    is_json,
    load,
    load_key,
    load_metadata,
)
from airflow_broadway.core.stages.batcher import partitioner

#: Keys whose text is cached; the cache is cleared when it is full.
_CACHED_KEYS: Final = 10_000
#: Types of keys whose text is cached: for these, equal keys have equal texts.
_CACHED_TYPES: Final = frozenset({str, int, bool, type(None)})
_NO_METADATA: dict[str, str] = {}


class StagedRow(NamedTuple):
    """The staged form of one message, next to the message's own attributes.

    :param data: A tuple of the schema's columns; without a schema ``bytes``, text, or ``None``.
    :param key: The batch key as text.
    :param partition: ``partition_by`` modulo ``concurrency``; ``None`` without it.
    :param dropped: Keys of the data that are not in the schema → count.
    """

    data: Any
    key: str
    partition: int | None
    metadata: dict[str, str]
    dropped: dict[str, int] | None = None


class PlacedData(NamedTuple):
    """A message's data and its place, between a processor and a batcher in one process.

    A message with a text key and no partition carries its data directly.

    :param data: The data itself.
    :param identity: Equal for equal keys; a text key is its own identity.
    :param partition: As in :class:`StagedRow`.
    :param dropped: As in :class:`StagedRow`.
    """

    data: Any
    identity: Any
    partition: int | None
    dropped: dict[str, int] | None


class PlacedMessage(NamedTuple):
    """A message with its place: an item of the batcher."""

    message: Message
    batch_key: Any
    partition: int | None

    @property
    def batch_mode(self) -> BatchMode:
        return self.message.batch_mode

    @property
    def size(self) -> int:
        return self.message.size


class RowConverter:
    """Converts messages of ``pipeline`` to their staged form; for use in one thread.

    Without batchers nothing is staged, and messages are unchanged.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._conversions = {key: _Conversion(value) for key, value in pipeline.batchers.items()}

    def __call__(self, message: Message) -> Message:
        """Returns the message with its :class:`StagedRow` as data.

        :raises ConversionError: Naming column, value and rule: the data does not fit the schema, or
            the data, the key or the metadata cannot be serialized.
        :raises Exception: Any exception of ``partition_by``.
        """
        if not self._conversions:
            return message
        conversion = self._conversions[message.batcher]
        data = conversion.dump_data(message.data)
        text = conversion.key_text(message.batch_key)
        _check_id(message)
        metadata = message.metadata
        fields = (
            data,
            text,
            None if conversion.partition is None else conversion.partition(message),
            conversion.dump_metadata(metadata) if metadata else _NO_METADATA,
            conversion.dropped_now() if conversion.dropped else None,
        )
        # Half the cost of calling the class.
        return message.put_data(tuple.__new__(StagedRow, fields))


class DirectConverter:
    """Converts messages of ``pipeline`` to the form that batches would read back from staging; for
    use in one thread.

    Without batchers messages are unchanged.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._conversions = {
            key: _Conversion(value, read_back=True) for key, value in pipeline.batchers.items()
        }

    def __call__(self, message: Message) -> Message:
        """Returns the message as its batch receives it; its data is :class:`PlacedData` if needed.

        :raises Exception: As :class:`RowConverter`.
        """
        conversion = self._conversions.get(message.batcher)
        if conversion is None:
            return message
        original, key, metadata = message.data, message.batch_key, message.metadata
        if (
            conversion.keeps_bytes
            and type(original) is bytes
            and type(key) is str
            and key.isascii()
            and not metadata
            and message.message_id.isascii()
        ):
            return message  # most messages of most queues
        data = conversion.read_back(original)
        identity = key
        if type(key) is not str or not key.isascii():
            text = conversion.key_text(key)
            key = conversion.load_key(text)
            identity = key if type(key) is str else (text,)
        _check_id(message)
        partition = None if conversion.partition is None else conversion.partition(message)
        restored = conversion.metadata_read_back(metadata) if metadata else metadata
        if conversion.dropped or partition is not None or identity is not key:
            dropped = conversion.dropped_now() if conversion.dropped else None
            data = PlacedData(data, identity, partition, dropped)
        elif data is original and key is message.batch_key and restored is metadata:
            return message
        return message.replace(data=data, batch_key=key, metadata=restored)


def _check_id(message: Message) -> None:
    if not message.message_id.isascii():
        encode_json(message.message_id, path="message_id")


class _Conversion:
    """The conversion of data, keys and metadata for one batcher's messages."""

    def __init__(self, batcher: Batcher, *, read_back: bool = False) -> None:
        self.partition: Callable[[Message], int] | None = partitioner(batcher)
        self._python = batcher.engine == "python"
        #: Whether bytes with a text key are passed on unchanged.
        self.keeps_bytes = self._python and batcher.schema is None and self.partition is None
        #: The counter of keys that are not in the schema.
        self.dropped: Any = None
        self._schema = batcher.schema is not None
        self._dump = dump if self._python else encode_json
        self._key_text = dump_key if self._python else partial(encode_json, path="batch_key")
        self._load = load if self._python else json.loads
        self.dump_data: Callable[[Any], Any] = self._plain
        self.dump_metadata = dump_metadata if self._python else encode_metadata
        if batcher.schema is not None:
            converter = parse_schema(batcher.schema).converter(read_back=read_back)
            self.dump_data, self.dropped = converter, converter.dropped
        self._keys: dict[Any, str] = {}

    def _plain(self, data: Any) -> bytes | str | None:
        """Returns bytes and ``None`` unchanged, anything else as text."""
        if data is None:
            return None
        if isinstance(data, (bytes, bytearray, memoryview)):
            return bytes(data)
        return self._dump(data)

    def dropped_now(self) -> dict[str, int]:
        """Returns the keys that were dropped since the last call."""
        counted = dict(self.dropped)
        self.dropped.clear()
        return counted

    def key_text(self, key: Any) -> str:
        cache_key = key
        if type(key) is not str:
            kinds = tuple(map(type, key)) if type(key) is tuple else (type(key),)
            if not _CACHED_TYPES.issuperset(kinds):
                return self._key_text(key)
            cache_key = kinds, key  # True and 1 are equal, but distinct keys
        text = self._keys.get(cache_key)
        if text is None:
            if len(self._keys) >= _CACHED_KEYS:
                self._keys.clear()
            text = self._keys[cache_key] = self._key_text(key)
        return text

    def load_key(self, text: str) -> Any:
        """Returns a key as a batch receives it, from its text."""
        value = json.loads(text)
        return load_key(value) if self._python else plain_key(value)

    def read_back(self, data: Any) -> Any:
        """Returns the data as a batch would read it back from staging."""
        if self._schema:
            return self.dump_data(data)
        if self._python and (type(data) is bytes or is_json(data)):
            return data
        staged = self._plain(data)
        return self._load(staged) if type(staged) is str else staged

    def metadata_read_back(self, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the metadata as a batch would read it back from staging."""
        if self._python:
            if is_json(metadata):
                return metadata
            return load_metadata(dump_metadata(metadata))
        return self.dump_metadata(metadata)
