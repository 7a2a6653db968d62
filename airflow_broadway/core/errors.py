"""All exceptions that this package raises deliberately.

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
    ├── RequestRefused        the requested operation on a run is not possible
    └── StagingError          the staging directory cannot be used
    │   └── StagingDamaged    a staged file is missing or corrupt

Client libraries' errors are translated at the border: callers need no client library to catch one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from airflow_broadway.core.masking import redacted, shown


class BroadwayError(Exception):
    """The base class of all errors of this package."""


class OptionsError(BroadwayError, ValueError):
    """An option breaks its rule.

    The text masks values that may be secrets.

    :param path: The option's path, e.g. ``"batchers.delayed.batch_size"``.
    :param rule: The expected value, as a phrase: ``"a positive integer"``.
    :param value: The rejected value.
    """

    def __init__(self, path: str, rule: str, value: object) -> None:
        got = shown(value, _option_name(path))
        super().__init__(
            f"invalid value for option {redacted(path)!r}: expected {rule}, got: {got}"
        )
        self.path = path
        self.rule = rule
        self.value = value

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).__new__, (type(self), *self.args), self.__dict__

    @classmethod
    def unknown(
        cls, path: str, value: object, valid: Iterable[str], example: str = ""
    ) -> OptionsError:
        """Builds the error for an unknown option, with the valid names and the closest match.

        :param example: The correct spelling, where it belongs elsewhere:
            ``qos=Qos(prefetch_count=…)``.
        """
        names = sorted(valid)
        name = _option_name(path)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if example:
            hint = f"; give it as {example}"
        error = cls(path, f"one of {names}", value)
        option = f"{redacted(path)!r} (value {shown(value, name)})"
        error.args = (f"unknown option {option}, valid options are: {names}{hint}",)
        return error

    @classmethod
    def missing(cls, path: str, example: str = "") -> OptionsError:
        """Builds the error for a missing required option.

        :param example: A valid value, such as ``SqliteProducer(queue="orders")``.
        """
        error = cls(path, "a value", None)
        hint = f"; give it, such as {example}" if example else ""
        error.args = (f"required option {path!r} not found{hint}",)
        return error


def _option_name(path: str) -> str:
    return path.rpartition(".")[2]


class PipelineError(BroadwayError):
    """The pipeline cannot be imported, or a callback broke its contract.

    :param code: The ``code`` of its log record, if any.
    """

    def __init__(self, text: str, *, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class SchemaError(BroadwayError):
    """A schema's text cannot be parsed."""


class ConversionError(SchemaError):
    """A message's data does not fit the schema; the text names column, value and rule."""


class ConnectionMissing(BroadwayError):
    """An Airflow connection does not exist, or lacks a required field."""


class ProducerError(BroadwayError):
    """The broker refused the request; retrying will not help."""


class ProducerUnavailable(ProducerError):
    """The broker could not be reached; retrying may succeed."""


class LeaseLapsed(BroadwayError):
    """The run no longer holds its messages; the broker redelivers them to another run."""


class RequestRefused(BroadwayError):
    """The requested operation on a run is not possible; the text gives the reason and a way out."""


class StagingError(BroadwayError):
    """The staging directory cannot be read or written, or belongs to another host."""


class StagingDamaged(StagingError):
    """A staged file is missing or corrupt; nothing is settled by it."""

    def __init__(self, damage: str) -> None:
        super().__init__(
            f"{damage}.  Nothing of its generation is acknowledged: restore the file and clear the"
            " task that failed, or leave it: the next run releases these messages"
        )
        self.damage = damage

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.damage,)
