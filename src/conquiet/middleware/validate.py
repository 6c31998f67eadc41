"""Refuse data that does not match the JSON Schema of its type, with the path of the error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from conquiet.codec import is_json
from conquiet.errors import ConfigError, InvalidMessage
from conquiet.handler import Process
from conquiet.message import Message, describe

Schema: TypeAlias = Mapping[str, Any] | bool
Schemas: TypeAlias = Mapping[str, Schema] | Callable[[str], Schema | None]
Unknown = Literal["pass", "refuse"]

_MAX_COMPILED = 1_000
_MAX_ERRORS_COMPARED = 20


class JsonSchema:
    """Checks data against JSON Schema (draft 2020-12), before any transaction begins.

    `schemas` maps message types to schemas, or is a function that does. `unknown` passes or refuses
    types without a schema. References to other documents are never fetched: put them into `$defs`.
    """

    def __init__(self, schemas: Schemas, *, unknown: Unknown = "pass") -> None:
        if unknown not in get_args(Unknown):
            raise ConfigError(f"unknown={unknown!r}: choose one of {', '.join(get_args(Unknown))}")
        _require_jsonschema()
        self._refuses_unknown = unknown == "refuse"
        self._schema_of = None if isinstance(schemas, Mapping) else schemas
        self._compiled: dict[str, Any] = {}
        if isinstance(schemas, Mapping):
            self._compiled = {kind: _compile(kind, schema) for kind, schema in schemas.items()}

    def admit(self, message: Message[Any]) -> None:
        """Refuse data that does not match its schema; called outside the transaction."""
        validator = self._validator(message.type)
        if validator is not None:
            _validate(validator, message)
        elif self._refuses_unknown:
            raise InvalidMessage(
                f"{describe(message.attributes)}: no schema for this type; add one to JsonSchema,"
                " or let such messages pass by unknown='pass'"
            )

    def __call__(self, next: Process) -> Process:
        return next  # admit does the work

    def _validator(self, kind: str) -> Any:
        if self._schema_of is None:
            return self._compiled.get(kind)
        if kind not in self._compiled:
            schema = self._schema_of(kind)
            if len(self._compiled) >= _MAX_COMPILED:  # types come from outside: limit their number
                self._compiled.clear()
            self._compiled[kind] = None if schema is None else _compile(kind, schema)
        return self._compiled.get(kind)


def _require_jsonschema() -> None:
    try:
        import jsonschema  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "JsonSchema needs the package jsonschema: pip install 'jsonschema>=4.20'"
        ) from error


def _compile(kind: str, schema: Schema) -> Any:
    from jsonschema import Draft202012Validator, SchemaError
    from referencing import Registry

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(
            f"the schema of {kind!r} is not valid at {error.json_path}: {error.message:.300}"
        ) from error
    nothing_fetched: Registry[Any] = Registry()
    return Draft202012Validator(schema, registry=nothing_fetched)


def _validate(validator: Any, message: Message[Any]) -> None:
    data = _json_value(message)
    try:
        misfits = list(islice(validator.iter_errors(data), _MAX_ERRORS_COMPARED))
    except RecursionError:
        raise InvalidMessage(
            f"{describe(message.attributes)}: data is nested too deeply to be checked"
        ) from None
    except Exception as error:
        raise _broken_schema(error, message) from error
    if misfits:
        raise _misfit(misfits, message)


def _broken_schema(error: Exception, message: Message[Any]) -> Exception:
    from referencing.exceptions import Unresolvable

    if not isinstance(error, Unresolvable):
        return ConfigError(f"the schema of {message.type!r} cannot be applied: {error!r:.300}")
    return ConfigError(
        f"the schema of {message.type!r} has a reference that it does not contain: {error!s:.300};"
        " references are not fetched: put it into $defs"
    )


def _misfit(misfits: list[Any], message: Message[Any]) -> InvalidMessage:
    from jsonschema.exceptions import best_match

    best = best_match(iter(misfits))
    return InvalidMessage(
        f"{describe(message.attributes)}: data does not fit its schema at"
        f" {best.json_path:.200}: {best.message:.300}"
    )


def _json_value(message: Message[Any]) -> Any:
    data = message.data
    try:
        if not isinstance(data, bytes):
            return msgspec.to_builtins(data)
        if not is_json(message.datacontenttype):
            raise InvalidMessage(
                f"{describe(message.attributes)}: only JSON has a schema, and datacontenttype is"
                f" {message.datacontenttype!r:.80}"
            )
        return msgspec.json.decode(data)
    except RecursionError:
        raise InvalidMessage(f"{describe(message.attributes)}: data is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
        raise InvalidMessage(
            f"{describe(message.attributes)}: data is not valid JSON: {error}"
        ) from error
