"""Masks secrets in the texts of errors and log lines.

Errors are logged, stored in Airflow's database and displayed in its UI, so an option's value is
masked wherever it may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

#: The replacement for a secret.
HIDDEN = "***"

_WORDS = (
    r"passw(?:or)?d|passphrase|pwd|secret|token|credential|authorization|signature|dsn"
    r"|(?:api|access|private|account|shared|storage)[._-]?key"
)
#: Option names whose value is a secret, or an address that may hold one.
_SECRET_NAME = re.compile(rf"{_WORDS}|(?:^|[._-])(?:uri|url|sig)$", re.IGNORECASE)
#: Names within a text whose value is a secret.
_SECRET_WORD = re.compile(rf"{_WORDS}|\bsig", re.IGNORECASE)
# Each pattern below matches only at the start of a run of its characters (the lookbehind) or at a
# character outside the run.  A pattern that could match within a run would rescan the rest from
# every character: quadratic time.
#: A name before ``=`` or ``:`` in a text.
_NAME = re.compile(r"(?<![\w.-])([\w.-]+)['\"]?\s*[=:]\s*")
_VALUE = re.compile(r"\"[^\"]*\"?|'[^']*'?|[^\s&,;]+")
#: A query parameter of a URL.
_PARAMETER = re.compile(r"([?&]([\w.-]*)=)[^\s&'\"]+")
#: Secrets with a known format: keys of AWS, GitHub and Slack, headers, private keys.
_KNOWN = re.compile(
    r"\b(?:AKIA|ASIA)\w{12,}|\bgh[a-z]_\w{16,}|\bxox[a-z]-[\w-]+"
    r"|(?<=\bBearer )\S+|(?<=\bBasic )\S+|-----BEGIN [A-Z ]*PRIVATE KEY-----.*",
    re.DOTALL,
)
#: Text that may contain a JSON Web Token, and the start of one.
_DOTTED = re.compile(r"[\w.-]+")
_JWT = re.compile(r"\beyJ")
#: Text that may contain a URL: the user info extends to the last ``@``, since a password may
#: contain ``/`` and ``@``.
_WORD = re.compile(r"\S+")
#: A scheme, reversed.
_REVERSED_SCHEME = re.compile(r"[\w+.-]*\w")
_PASSWORD = re.compile(r"(://)[^/\s:\]]*:(?!\d*(?:[/?#\s'\"),]|$))\S*")
#: Object stores whose URLs have a connection id or a container before the ``@``.
_STORES = {"s3", "s3a", "s3n", "gs", "gcs", "abfs", "abfss", "wasb", "wasbs", "adl", "az", "hdfs"}


def redacted(text: str) -> str:
    """Masks user info and tokens of the URLs in an error or a log line.

    Runs in linear time.  Data, such as a message's payload, is never masked.
    """
    if "@" in text:
        text = _WORD.sub(_mask_user, text)
    return _PARAMETER.sub(_mask_parameter, text)


def shown(value: object, name: str = "") -> str:
    """Returns the ``repr`` of an option's value with everything masked that may be a secret.

    :param name: The option's name; some names mark a secret.
    """
    if value is None or (isinstance(value, (str, bytes)) and not value):
        return repr(value)
    if _SECRET_NAME.search(name):
        return HIDDEN
    if isinstance(value, str):
        return repr(_mask_text(value))
    if isinstance(value, Mapping):
        items = (f"{shown(key)}: {shown(item, str(key))}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if type(value) in (list, tuple, set, frozenset):
        inside = ", ".join(shown(item) for item in value)  # type: ignore[attr-defined]
        if isinstance(value, tuple):
            return f"({inside}{',' * (len(value) == 1)})"
        return f"[{inside}]" if isinstance(value, list) else f"{{{inside}}}"
    text = repr(value)
    return text if isinstance(value, (bool, int, float)) else _mask_text(text)


def _mask_text(text: str) -> str:
    before, at, after = text.rpartition("@")
    scheme, colon, user = before.partition("://")
    if at and colon:
        text = text if _names_no_user(scheme, user) else f"{scheme}://{HIDDEN}@{after}"
    elif at and ":" in before:  # user:password@host
        text = f"{HIDDEN}@{after}"
    text = _PASSWORD.sub(rf"\1{HIDDEN}", text)
    return _DOTTED.sub(_mask_jwt, _KNOWN.sub(HIDDEN, _mask_assignments(text)))


def _mask_assignments(text: str) -> str:
    """Masks each value assigned to a name that marks a secret."""
    parts, copied, position = [], 0, 0
    while name := _NAME.search(text, position):
        position = name.end()
        if _SECRET_WORD.search(name[1]) and (value := _VALUE.match(text, position)):
            parts += [text[copied:position], HIDDEN]
            copied = position = value.end()
    return "".join([*parts, text[copied:]])


def _mask_parameter(match: re.Match[str]) -> str:
    return f"{match[1]}{HIDDEN}" if _SECRET_WORD.search(match[2]) else match[0]


def _mask_jwt(match: re.Match[str]) -> str:
    text = match[0]
    for beginning in _JWT.finditer(text):
        dot = text.find(".", beginning.end(), len(text) - 1)
        if dot < 0:
            break
        if dot > beginning.end():
            return text[: beginning.start()] + HIDDEN
    return text


def _mask_user(match: re.Match[str]) -> str:
    text = match[0]
    at, begin = text.rfind("@"), 0
    while (colon := text.find("://", begin, max(at, 0))) >= 0:
        scheme = _REVERSED_SCHEME.match(text[begin:colon][::-1])
        begin = colon + 3
        if scheme and not _names_no_user(scheme[0][::-1], text[begin:at]):
            return f"{text[:begin]}{HIDDEN}{text[at:]}"
    return text


def _names_no_user(scheme: str, user: str) -> bool:
    return scheme == "file" or (scheme in _STORES and ":" not in user)


def reason_of(error: Exception) -> str:
    """Returns the first line of a client's error, without credentials."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {redacted(lines[0])[:500]}" if lines else type(error).__name__
