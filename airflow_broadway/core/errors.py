"""Every error that this package raises on purpose.

::

    BroadwayError
    ├── OptionsError          an option is unknown, ill-typed or out of range (also a ValueError)
    ├── PipelineError         the pipeline cannot be imported, or a callback breaks its contract
    ├── SchemaError           a schema's text cannot be read
    │   └── ConversionError   a message's data does not fit the schema
    ├── ConnectionMissing     an Airflow connection is missing or lacks a field
    ├── ProducerError         the broker refused; trying again will not help
    │   └── ProducerUnavailable   the broker could not be reached; trying again may help
    ├── LeaseLapsed           the run no longer holds its messages
    ├── RequestRefused        what is asked of a run cannot be done
    └── StagingError          the staging directory cannot be used
        └── StagingDamaged    a file there is not as it was written

Third-party errors are translated at the border, so a caller needs no client library to catch one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from airflow_broadway.core.masking import redacted, shown


class BroadwayError(Exception):
    """The root of all errors here."""


class OptionsError(BroadwayError, ValueError):
    """An option breaks its rule.

    Its text shows the value only as far as that can be no secret.

    :param path: Where the option stands, e.g. ``"batchers.delayed.batch_size"``.
    :param rule: What is expected, as a phrase: ``"a positive integer"``.
    :param value: What was given.
    """

    def __init__(self, path: str, rule: str, value: object) -> None:
        got = shown(value, _name_of(path))
        super().__init__(
            f"invalid value for option {redacted(path)!r}: expected {rule}, got: {got}"
        )
        self.path = path
        self.rule = rule
        self.value = value

    def __reduce__(self) -> tuple[object, ...]:
        return _options_error, (self.path, self.rule, self.value, str(self))

    @classmethod
    def unknown(
        cls, path: str, value: object, valid: Iterable[str], example: str = ""
    ) -> OptionsError:
        """Report a name that no option has, with the valid ones and the nearest of them.

        :param example: How to give it, where it belongs elsewhere: ``qos=Qos(prefetch_count=…)``.
        """
        names = sorted(valid)
        name = _name_of(path)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if example:
            hint = f"; give it as {example}"
        error = cls(path, f"one of {names}", value)
        given = f"{redacted(path)!r} (value {shown(value, name)})"
        error.args = (f"unknown option {given}, valid options are: {names}{hint}",)
        return error

    @classmethod
    def missing(cls, path: str, example: str = "") -> OptionsError:
        """Report a required option that was not given.

        :param example: How to give it, such as ``SqliteProducer(queue="orders")``.
        """
        error = cls(path, "a value", None)
        hint = f"; give it, such as {example}" if example else ""
        error.args = (f"required option {path!r} not found{hint}",)
        return error


def _name_of(path: str) -> str:
    return path.rpartition(".")[2]


def _options_error(path: str, rule: str, value: object, text: str) -> OptionsError:
    error = OptionsError(path, rule, value)
    error.args = (text,)
    return error


class PipelineError(BroadwayError):
    """The pipeline cannot be imported, or a callback broke its contract.

    :param code: What a log record of it carries as ``code``, where it has one.
    """

    def __init__(self, text: str, *, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class SchemaError(BroadwayError):
    """The text of a schema cannot be read."""


class ConversionError(SchemaError):
    """A message's data does not fit the schema; the message names column, value and rule."""


class ConnectionMissing(BroadwayError):
    """An Airflow connection does not exist, or lacks a field that is needed."""


class ProducerError(BroadwayError):
    """The broker refused, and would refuse again."""


class ProducerUnavailable(ProducerError):
    """The broker could not be reached; trying again may succeed."""


class LeaseLapsed(BroadwayError):
    """The run no longer holds its messages; its broker has given, or will give, them to another."""


class RequestRefused(BroadwayError):
    """What was asked of a run cannot be done; the text says why, and what to do instead."""


class StagingError(BroadwayError):
    """The staging directory cannot be read or written, or is another host's."""


class StagingDamaged(StagingError):
    """A staged file is gone, or is not as it was written: nothing is settled by it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}.  Nothing of its generation is acknowledged: restore the file and clear the"
            " task that failed, or leave it: the next run gives these messages back"
        )
        self.what = what

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what,)
