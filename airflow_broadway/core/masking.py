"""Texts without the secrets that may stand in them.

Errors are logged, kept in Airflow's database and shown in its UI, so what people gave as an option
is shown in them only as far as it cannot be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["HIDDEN", "redacted", "shown"]

#: What stands in place of a secret.
HIDDEN = "***"

_WORDS = (
    r"passw(?:or)?d|passphrase|pwd|secret|token|credential|authorization|signature|dsn"
    r"|(?:api|access|private|account|shared|storage)[._-]?key"
)
#: Names whose value is a secret or an address, which may hold one.
_SECRET_NAME = re.compile(rf"{_WORDS}|(?:^|[._-])(?:uri|url|sig)$", re.IGNORECASE)
#: A secret that its name stands before, in a text.
_ASSIGNED = re.compile(
    rf"([\w.-]*(?:{_WORDS}|\bsig)[\w.-]*['\"]?\s*[=:]\s*)(?:\"[^\"]*\"?|'[^']*'?|[^\s&,;]+)",
    re.IGNORECASE,
)
#: The same in the query of an address.
_QUERY = re.compile(rf"([?&][\w.-]*(?:{_WORDS}|\bsig)[\w.-]*=)[^\s&'\"]+", re.IGNORECASE)
#: What is known by its form: keys of AWS, GitHub, Slack, signed tokens, headers.
_KNOWN = re.compile(
    r"\b(?:AKIA|ASIA)\w{12,}|\bgh[a-z]_\w{16,}|\bxox[a-z]-[\w-]+|\beyJ[\w-]+\.[\w.-]+"
    r"|(?<=\bBearer )\S+|(?<=\bBasic )\S+|-----BEGIN [A-Z ]*PRIVATE KEY-----.*",
    re.DOTALL,
)
#: An address from its scheme to its last ``@``: a password may hold ``/`` and ``@``.
_USER = re.compile(r"(\w[\w+.-]*)(://)(\S*)@")
#: Stores whose addresses name an Airflow connection, or a container, before the ``@``.
_STORES = {"s3", "s3a", "s3n", "gs", "gcs", "abfs", "abfss", "wasb", "wasbs", "adl", "az", "hdfs"}


def redacted(text: str) -> str:
    """A text without user and password, or token, of the addresses in it."""
    return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(_without_user, text))


def shown(value: object, name: str = "") -> str:
    """The ``repr`` of an option's value, less all that is or looks like a secret.

    :param name: The option's name, which may say that it is one.
    """
    if value is None or (isinstance(value, (str, bytes)) and not value):
        return repr(value)
    if _SECRET_NAME.search(name):
        return HIDDEN
    if isinstance(value, str):
        return repr(_masked(value))
    if isinstance(value, Mapping):
        items = (f"{shown(key)}: {shown(each, str(key))}" for key, each in value.items())
        return f"{{{', '.join(items)}}}"
    if type(value) in (list, tuple, set, frozenset):
        inside = ", ".join(shown(each) for each in value)  # type: ignore[attr-defined]
        if isinstance(value, tuple):
            return f"({inside}{',' * (len(value) == 1)})"
        return f"[{inside}]" if isinstance(value, list) else f"{{{inside}}}"
    text = repr(value)
    return text if isinstance(value, (bool, int, float)) else _masked(text)


def _masked(text: str) -> str:
    before, at, after = text.rpartition("@")
    scheme, colon, user = before.partition("://")
    if at and colon:
        text = text if _names_no_user(scheme, user) else f"{scheme}://{HIDDEN}@{after}"
    elif at and ":" in before:  # user:password@host
        text = f"{HIDDEN}@{after}"
    text = re.sub(r"(://)[^/\s:\]]*:(?!\d*(?:[/?#\s'\"),]|$))\S*", rf"\1{HIDDEN}", text)
    return _KNOWN.sub(HIDDEN, _ASSIGNED.sub(rf"\1{HIDDEN}", text))


def _without_user(found: re.Match[str]) -> str:
    scheme, user = found[1], found[3]
    return found[0] if _names_no_user(scheme, user) else f"{scheme}://{HIDDEN}@"


def _names_no_user(scheme: str, user: str) -> bool:
    return scheme == "file" or (scheme in _STORES and ":" not in user)
