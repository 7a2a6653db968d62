"""What a batch is: the value that travels beside its messages, and the folder of its own."""

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
    """What a batch is, handed to ``handle_batch``.

    :param batcher: The batcher's name.
    :param batch_key: The key that its messages share; with ``merge_keys``, ``None``.
    :param partition: The value of ``partition_by`` modulo ``concurrency``; ``None`` without it.
    :param size: Messages in it.
    :param trigger: Why it was closed.
    :param batch_id: The same whenever the same batch is run again: a hash of the pipeline, batcher,
        key and message ids; usable as a path segment and as a transaction id.
    :param redelivered: How many of its messages may have been handled before.
    :param attempt: Which try of its task handles it, or which Spark application of its run; 1 at
        first.
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
        """A folder of this batch's own below ``root``: ``<root>/<parts…>/batch_id=<id>``.

        Writing it with mode ``overwrite`` makes the batch safe to repeat, and keeps two batches
        that write at once out of each other's temporary files.

        :param root: As it is.
        :param parts: Each the name of one folder, whatever is in it: what a name of a partition
            cannot hold is written as ``%`` and two hexadecimal digits, as Hive and Spark write and
            read it.  So ``dt=2026-01-01`` stays, a key ``a/b`` becomes ``a%2Fb``, and ``..`` leads
            nowhere.
        """
        return "/".join([root.rstrip("/"), *map(_folder_name, parts), f"batch_id={self.batch_id}"])


#: What Hive encodes in the name of a partition, and what is no text at all.
_NOT_IN_A_NAME: Final = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{}\[\]^\ud800-\udfff]""")
#: A name that begins so leads elsewhere, or is passed over by readers.
_BEGINNING: Final = re.compile(r"[._]")
#: Hive's value of a partition that has none.
_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"


def _folder_name(part: str) -> str:
    """A text as the name of one folder; different texts give different names."""
    name, equals, value = part.partition("=")
    if name and equals:
        name = _encoded(_NOT_IN_A_NAME, name)
        name = _encoded(_BEGINNING, name[0]) + name[1:] if name[0] == "." else name
        return f"{name}={_encoded(_NOT_IN_A_NAME, value) or _NO_VALUE}"
    name = _encoded(_NOT_IN_A_NAME, part) or "%20"
    return _encoded(_BEGINNING, name[0]) + name[1:]


def _encoded(what: re.Pattern[str], text: str) -> str:
    def encode(match: re.Match[str]) -> str:
        return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))

    return what.sub(encode, text)
