"""Names of folders: any id, as one segment that disks, S3, Hadoop and URLs take as it is.

Letters, digits, ``_``, ``-`` and ``.`` stay; every other byte of the id's UTF-8 becomes ``!`` and
two hexadecimal digits (Hadoop refuses ``:``, and some readers decode ``%``).  A leading ``_`` or
``.`` is written so too, since Spark hides such files; names that begin with one are therefore free
for files of our own.  A name that would pass :data:`MAX_NAME` is cut and ends in a hash.
"""

from __future__ import annotations

import hashlib
import re

#: The longest name made here; disks take 255 bytes, and S3 1,024 for the whole path.
MAX_NAME = 150

_HASHED = "!!"
_UNSAFE = re.compile(rb"^[._]|[^A-Za-z0-9_.-]")


_ESCAPED = re.compile(rb"!([0-9A-F]{2})")


def readable_name(name: str) -> str:
    """Return the text of a folder's name; of a long one, its beginning and a hash."""
    raw = _ESCAPED.sub(lambda match: bytes.fromhex(match[1].decode("ascii")), name.encode("utf-8"))
    return raw.decode("utf-8", "backslashreplace")


def encode_name(text: str) -> str:
    """Return ``text`` as the name of a folder; different texts give different names."""
    raw = text.encode("utf-8", "surrogatepass")
    name = _UNSAFE.sub(lambda match: b"!%02X" % match[0][0], raw).decode("ascii") or "!"
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(raw).hexdigest()[:32]
    # Not in the middle of an escape: what stays can be read, and looks like no other name.
    head = name[: MAX_NAME - len(digest) - len(_HASHED)]
    head = head[:-1] if head.endswith("!") else head[:-2] if head[-2:-1] == "!" else head
    return f"{head}{_HASHED}{digest}"
