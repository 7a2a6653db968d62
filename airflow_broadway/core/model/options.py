"""Options, declared once: each with its default, its rule and its documentation.

A class decorated with :func:`options` is a frozen, keyword-only dataclass whose fields are made by
:func:`option`.  Building one checks every field; an unknown name is an :class:`OptionsError` that
lists the valid names and the nearest; ``docs/options.md`` is made of them.

Text that holds ``{{`` is an Airflow template: it passes every rule while the Dag is parsed, and is
checked once rendered (:func:`override` with ``rendered=True``), when text is also read as the
number or truth value that the rule asks for.
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
        """Leaves a class as it is, for type checkers' sake."""
        return lambda cls: cls


T = TypeVar("T")


def option(
    *, default: Any = MISSING, rule: Rule, doc: str, nested: type[Options] | None = None
) -> Any:
    """Declare one option.  All by keyword: type checkers see a default in no other way.

    :param default: Its value when not given; required without one.
    :param rule: What a value must be.
    :param doc: What it does: one or two sentences, with unit and range.
    :param nested: The class of options that it holds, where it holds one.
    """
    return dataclasses.field(default=default, metadata={"rule": rule, "doc": doc, "nested": nested})


class Options:
    """The base of all classes of options."""

    __slots__ = ()

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            rule: Rule = field.metadata["rule"]
            if value is AUTO or is_template(value) or rule.admits(value):
                continue
            raise OptionsError(f"{name}.{field.name}", rule.text, value)
        self._resolve()

    def _resolve(self) -> None:
        """Check what concerns several options, and replace ``AUTO``; for subclasses."""

    def _default(self, name: str, value: object) -> None:
        """Replace ``AUTO``; an override of another option makes this one anew."""
        if getattr(self, name) is AUTO:
            object.__setattr__(self, name, value)
            object.__setattr__(self, "_auto", (*getattr(self, "_auto", ()), name))


def is_template(value: object) -> bool:
    """Whether it is text with an Airflow template, not rendered yet."""
    return isinstance(value, str) and "{{" in value


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option,))
def options(cls: type[T]) -> type[T]:
    """Make a class of options: frozen, keyword-only, checked, and strict about names."""
    made: Any = dataclass(frozen=True, kw_only=True)(cls)
    build = made.__init__
    valid = {field.name: field for field in dataclasses.fields(made)}
    required = [field.name for field in dataclasses.fields(made) if field.default is MISSING]

    def __init__(self: Any, *args: Any, **given: Any) -> None:  # noqa: N807
        if args:
            raise OptionsError(cls.__name__, "options by keyword", args[0])
        for name, value in given.items():
            if name not in valid:
                raise _unknown(f"{cls.__name__}.{name}", value, valid)
        for name in required:
            if name not in given:
                raise OptionsError.missing(f"{cls.__name__}.{name}", f"{cls.__name__}({name}=…)")
        build(self, **given)

    __init__.__wrapped__ = build  # type: ignore[attr-defined] # for inspect.signature
    made.__init__ = __init__
    return made  # type: ignore[no-any-return]


def override(base: Any, given: Mapping[str, Any], path: str, *, rendered: bool = False) -> Any:
    """A copy of ``base`` with some options replaced; nested options take nested mappings.

    :param path: Where ``base`` stands, for errors: ``"batchers.delayed"``.
    :param rendered: Templates have been rendered: read text as what the rule asks for.
    :raises OptionsError: With the full path of the option.
    """
    changed = _read(type(base), base, given, path, rendered)
    auto = {name: AUTO for name in getattr(base, "_auto", ()) if name not in changed}
    try:
        return dataclasses.replace(base, **auto, **changed)
    except OptionsError as error:  # a rule that concerns several options: give it the full path
        raise _under(path, error) from None


def build(cls: type[Any], given: Mapping[str, Any], path: str, *, rendered: bool = False) -> Any:
    """A new set of options from a mapping, as :func:`override` reads one."""
    values = _read(cls, None, given, path, rendered)
    try:
        return cls(**values)
    except OptionsError as error:
        raise _under(path, error) from None


def _read(
    cls: type[Any], base: Any, given: Mapping[str, Any], path: str, rendered: bool
) -> dict[str, Any]:
    """The options of a mapping, checked; nested ones replace some of those that ``base`` has."""
    if not isinstance(given, Mapping):
        raise OptionsError(path, "a mapping of options", given)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        where = f"{path}.{name}"
        if name not in fields:
            raise _unknown(where, value, fields)
        nested, held = fields[name].metadata["nested"], getattr(base, name, None)
        if nested is None or not isinstance(value, Mapping):
            values[name] = _checked(where, fields[name].metadata["rule"], value, rendered)
        elif held is None:
            values[name] = build(nested, value, where, rendered=rendered)
        else:
            values[name] = override(held, value, where, rendered=rendered)
    return values


def _unknown(
    where: str, value: object, fields: Mapping[str, dataclasses.Field[Any]]
) -> OptionsError:
    """The error of a name that no option has, with where it belongs if a nested one has it."""
    name = where.rpartition(".")[2]
    for outer, field in fields.items():
        nested = field.metadata["nested"]
        if nested is not None and name in {inner.name for inner in dataclasses.fields(nested)}:
            example = f"{outer}={nested.__name__}({name}=…)"
            return OptionsError.unknown(where, value, fields, example)
    return OptionsError.unknown(where, value, fields)


def _checked(where: str, rule: Rule, value: Any, rendered: bool) -> Any:
    if rendered and rule.read is not None and isinstance(value, str):
        try:
            value = rule.read(value)
        except ValueError:
            raise OptionsError(where, rule.text, value) from None
    if rule.admits(value) or (not rendered and is_template(value)):
        return value
    raise OptionsError(where, rule.text, value)


def _under(path: str, error: OptionsError) -> OptionsError:
    """The same error, with the path of the whole pipeline instead of the class's name."""
    moved = OptionsError(
        f"{path}.{error.path.partition('.')[2] or error.path}", error.rule, error.value
    )
    moved.args = (str(error).replace(error.path, moved.path),)
    return moved
