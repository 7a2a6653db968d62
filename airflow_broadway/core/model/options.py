"""Declares options, each with its default, its rule and its documentation.

A class decorated with :func:`options` is a frozen, keyword-only dataclass whose fields are declared
by :func:`option`.  Its constructor validates every field; an unknown name raises an
:class:`OptionsError` that lists the valid names and the closest match.  ``docs/options.md`` is
generated from the declarations.

Text that contains ``{{`` is an Airflow template: it passes every rule while the Dag is parsed, and
is validated once rendered (:func:`override` with ``rendered=True``).  Rendered text is also parsed
as the number or boolean that the rule expects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.rules import AUTO, Rule

if TYPE_CHECKING:
    from typing import dataclass_transform
else:  # not in Python 3.10, on which Spark clusters may still run this module

    def dataclass_transform(**_: object):
        """Returns the class unchanged; for type checkers."""
        return lambda cls: cls


T = TypeVar("T")


def option(
    *,
    default: Any = MISSING,
    rule: Rule,
    doc: str,
    nested: type[Options] | None = None,
    no_template: str = "",
) -> Any:
    """Declares one option.  Keyword-only: otherwise type checkers do not see the default.

    :param default: The default value; required without one.
    :param rule: The validation rule.
    :param doc: The documentation: one or two sentences, with unit and range.
    :param nested: The class of its nested options, if any.
    :param no_template: Why it cannot be a template; empty if it can.
    """
    metadata = {"rule": rule, "doc": doc, "nested": nested, "no_template": no_template}
    return dataclasses.field(default=default, metadata=metadata)


class Options:
    """The base class of all option classes."""

    __slots__ = ()

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            rule: Rule = field.metadata["rule"]
            reason = field.metadata["no_template"]
            items = value if isinstance(value, (list, tuple)) else (value,)
            if reason and any(map(is_template, items)):
                raise OptionsError(f"{name}.{field.name}", f"no template: {reason}", value)
            if value is AUTO or is_template(value) or rule.admits(value):
                continue
            raise OptionsError(f"{name}.{field.name}", rule.text, value)
        self._resolve()

    def _resolve(self) -> None:
        """Validates options against each other, and replaces ``AUTO``; for subclasses."""

    def _default(self, name: str, value: object) -> None:
        """Replaces ``AUTO``; recomputed when another option is overridden."""
        if getattr(self, name) is AUTO:
            object.__setattr__(self, name, value)
            object.__setattr__(self, "_auto", (*getattr(self, "_auto", ()), name))


def is_template(value: object) -> bool:
    """Returns whether it is text with an Airflow template that is not rendered yet."""
    return isinstance(value, str) and "{{" in value


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option,))
def options(cls: type[T]) -> type[T]:
    """Turns a class into an option class: frozen, keyword-only, validated, strict about names."""
    decorated: Any = dataclass(frozen=True, kw_only=True)(cls)
    build = decorated.__init__
    valid = {field.name: field for field in dataclasses.fields(decorated)}
    required = [field.name for field in dataclasses.fields(decorated) if field.default is MISSING]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if args:
            raise OptionsError(cls.__name__, "options by keyword", args[0])
        for name, value in kwargs.items():
            if name not in valid:
                raise _unknown(f"{cls.__name__}.{name}", value, valid)
        for name in required:
            if name not in kwargs:
                raise OptionsError.missing(f"{cls.__name__}.{name}", f"{cls.__name__}({name}=…)")
        build(self, **kwargs)

    __init__.__wrapped__ = build  # type: ignore[attr-defined] # for inspect.signature
    decorated.__init__ = __init__
    return decorated  # type: ignore[no-any-return]


def override(base: Any, values: Mapping[str, Any], path: str, *, rendered: bool = False) -> Any:
    """Returns a copy of ``base`` with some options replaced; nested options are merged.

    :param path: The path of ``base``, for errors: ``"batchers.delayed"``.
    :param rendered: Whether templates have been rendered: parse text as the rule's type.
    :raises OptionsError: With the full path of the option.
    """
    changed = _read_options(type(base), base, values, path, rendered)
    auto = {name: AUTO for name in getattr(base, "_auto", ()) if name not in changed}
    try:
        return dataclasses.replace(base, **auto, **changed)
    except OptionsError as error:  # a rule on several options: add the full path
        raise _with_path(path, error) from None


def build(cls: type[Any], options: Mapping[str, Any], path: str, *, rendered: bool = False) -> Any:
    """Builds a set of options from a mapping, as :func:`override` reads one."""
    values = _read_options(cls, None, options, path, rendered)
    try:
        return cls(**values)
    except OptionsError as error:
        raise _with_path(path, error) from None


def _read_options(
    cls: type[Any], base: Any, options: Mapping[str, Any], path: str, rendered: bool
) -> dict[str, Any]:
    """Validates the options of a mapping; nested ones override those of ``base``."""
    if not isinstance(options, Mapping):
        raise OptionsError(path, "a mapping of options", options)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for name, value in options.items():
        where = f"{path}.{name}"
        if name not in fields:
            raise _unknown(where, value, fields)
        nested, current = fields[name].metadata["nested"], getattr(base, name, None)
        if isinstance(value, Mapping) and isinstance(current, Options):
            values[name] = override(current, value, where, rendered=rendered)
        elif nested is None or not isinstance(value, Mapping):
            values[name] = _validate(where, fields[name].metadata["rule"], value, rendered)
        else:
            values[name] = build(nested, value, where, rendered=rendered)
    return values


def _unknown(
    where: str, value: object, fields: Mapping[str, dataclasses.Field[Any]]
) -> OptionsError:
    """Builds the error for an unknown name; suggests the nested option of that name, if any."""
    name = where.rpartition(".")[2]
    for outer, field in fields.items():
        nested = field.metadata["nested"]
        if nested is not None and name in {inner.name for inner in dataclasses.fields(nested)}:
            example = f"{outer}={nested.__name__}({name}=…)"
            return OptionsError.unknown(where, value, fields, example)
    return OptionsError.unknown(where, value, fields)


def _validate(where: str, rule: Rule, value: Any, rendered: bool) -> Any:
    if rendered and rule.read is not None and isinstance(value, str):
        try:
            value = rule.read(value)
        except ValueError:
            raise OptionsError(where, rule.text, value) from None
    if rule.admits(value) or (not rendered and is_template(value)):
        return value
    raise OptionsError(where, rule.text, value)


def _with_path(path: str, error: OptionsError) -> OptionsError:
    """Returns the error with the option's full path in place of the class's name."""
    moved = OptionsError(
        f"{path}.{error.path.partition('.')[2] or error.path}", error.rule, error.value
    )
    moved.args = (str(error).replace(error.path, moved.path),)
    return moved
