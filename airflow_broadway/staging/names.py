"""Encodes ids as names of folders that are valid on disks, S3 and Hadoop and in URLs.

Letters, digits, ``_``, ``-`` and ``.`` are unchanged; every other byte of the id's UTF-8 becomes
``!`` and two hexadecimal digits (Hadoop rejects ``:``, and some readers decode ``%``).  A leading
``_`` or ``.`` is encoded too, since Spark ignores such files; so internal files may begin with one.
A name longer than :data:`MAX_NAME` is truncated and ends in a hash.
"""

from __future__ import annotations

import hashlib
import re

#: Maximum length of a name; disks allow 255 bytes, and S3 1,024 for the whole path.
MAX_NAME = 150

_HASHED = "!!"
_UNSAFE = re.compile(rb"^[._]|[^A-Za-z0-9_.-]")


_ESCAPED = re.compile(rb"!([0-9A-F]{2})")


def readable_name(name: str) -> str:
    """Decodes a folder's name; a long one yields its beginning and a hash."""
    raw = _ESCAPED.sub(lambda match: bytes.fromhex(match[1].decode("ascii")), name.encode("utf-8"))
    return raw.decode("utf-8", "backslashreplace")


def encode_name(text: str) -> str:
    """Encodes ``text`` as the name of a folder; different texts yield different names."""
    raw = text.encode("utf-8", "surrogatepass")
    name = _UNSAFE.sub(lambda match: b"!%02X" % match[0][0], raw).decode("ascii") or "!"
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(raw).hexdigest()[:32]
    # Not truncated within an escape, so that the rest can be decoded and the name is unique.
    head = name[: MAX_NAME - len(digest) - len(_HASHED)]
    head = head[:-1] if head.endswith("!") else head[:-2] if head[-2:-1] == "!" else head
    return f"{head}{_HASHED}{digest}"
