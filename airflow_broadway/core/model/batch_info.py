"""Information on a batch, passed along with its messages, and a folder for its output."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, Final, NamedTuple


class Trigger(str, Enum):
    """Why a batch was closed."""

    SIZE = "size"
    BYTES = "bytes"
    TIMEOUT = "timeout"
    FLUSH = "flush"


class BatchInfo(NamedTuple):
    """Information on a batch, passed to ``handle_batch``.

    :param batcher: The batcher's name.
    :param batch_key: The key that its messages share; ``None`` with ``merge_keys``.
    :param partition: The value of ``partition_by`` modulo ``concurrency``; ``None`` without it.
    :param size: The number of messages.
    :param trigger: Why it was closed.
    :param batch_id: Stable when the same batch is run again: a hash of the pipeline, batcher, key
        and message ids; usable as a path segment and as a transaction id.
    :param redelivered: How many of its messages may have been handled before.
    :param attempt: The try number of its task, or the number of the run's Spark application; from
        1.
    """

    batcher: str
    batch_key: Any
    partition: int | None
    size: int
    trigger: Trigger
    batch_id: str = ""
    redelivered: int = 0
    attempt: int = 1

    def path(self, root: str, *parts: str) -> str:
        """Returns this batch's own folder below ``root``: ``<root>/<parts…>/batch_id=<id>``.

        Writing it with mode ``overwrite`` makes the batch idempotent, and separates the temporary
        files of batches that are written concurrently.

        :param root: Used unchanged.
        :param parts: The name of one folder each.  Characters that a partition name cannot contain
            are percent-encoded, as Hive and Spark write and read them: ``dt=2026-01-01`` is
            unchanged, a key ``a/b`` becomes ``a%2Fb``, and ``..`` cannot leave ``root``.
        """
        return "/".join([root.rstrip("/"), *map(_folder_name, parts), f"batch_id={self.batch_id}"])


#: Characters that Hive encodes in a partition name, and surrogates.
_UNSAFE: Final = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{}\[\]^\ud800-\udfff]""")
#: A leading character of relative paths and of files that readers ignore.
_UNSAFE_FIRST: Final = re.compile(r"[._]")
#: Hive's name for a partition without a value.
_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"


def _folder_name(part: str) -> str:
    """Returns a text as the name of one folder; distinct texts give distinct names."""
    name, equals, value = part.partition("=")
    if name and equals:
        name = _encode(_UNSAFE, name)
        name = _encode(_UNSAFE_FIRST, name[0]) + name[1:] if name[0] == "." else name
        return f"{name}={_encode(_UNSAFE, value) or _NO_VALUE}"
    name = _encode(_UNSAFE, part) or "%20"
    return _encode(_UNSAFE_FIRST, name[0]) + name[1:]


def _encode(unsafe: re.Pattern[str], text: str) -> str:
    def encode_match(match: re.Match[str]) -> str:
        return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))

    return unsafe.sub(encode_match, text)
