"""Describe an app in AsyncAPI 3, and find changes of a description that break other services.

topic          ──▶ channel
handler        ──▶ operation `receive`, named as the handler
returned event ──▶ operation `send`, named `send.TYPE`
class          ──▶ message, with the JSON Schema of its data
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin, is_typeddict

import msgspec

from conquiet.errors import ConfigError
from conquiet.event import is_event_class, type_name
from conquiet.message import Message

if TYPE_CHECKING:
    from conquiet.app.app import App

Schema = Mapping[str, Any]

VERSION = "3.0.0"
_SCHEMAS = "#/components/schemas/"
_MESSAGES = "#/components/messages/"


def describe(app: App, version: str = "1.0.0") -> dict[str, Any]:
    """Return the AsyncAPI document of an app; `version` is that of its interface.

    It has what handlers take and return; events that other code emits are not known to the app.
    Ticks are not in it, since no other service sends them.
    """
    document = _Document()
    for topic, handlers in app.handlers.items():
        document.channel(topic)
        for handler in handlers:
            document.receive(handler.name, topic, handler.type, handler.takes)
    for handlers in (*app.handlers.values(), list(app.scheduled.values())):
        for handler in handlers:
            for kind in handler.emits:
                if is_event_class(kind) or is_typeddict(kind):
                    document.send(app.name, type_name(kind), kind)
    return document.build(app.name, version)


class _Document:
    def __init__(self) -> None:
        self._channels: dict[str, dict[str, Any]] = {}
        self._operations: dict[str, Any] = {}
        self._messages: dict[str, dict[str, Any]] = {}
        self._schemas: dict[str, Any] = {}

    def channel(self, topic: str) -> dict[str, Any]:
        made: dict[str, Any] = self._channels.setdefault(topic, {"address": topic, "messages": {}})
        return made

    def receive(self, handler: str, topic: str, name: str | None, kind: Any) -> None:
        # Without a type it takes every message.
        messages = [] if name is None else [self._message(topic, name, kind, handler)]
        self._operate(handler, "receive", topic, messages)

    def send(self, topic: str, name: str, kind: Any) -> None:
        messages = [self._message(topic, name, kind, "sent")]
        self._operate(f"send.{name}", "send", topic, messages)

    def _operate(self, id: str, action: str, topic: str, messages: list[Any]) -> None:
        made = {"action": action, "channel": {"$ref": f"#/channels/{_escape(topic)}"}}
        self._operations[id] = made | ({"messages": messages} if messages else {})

    def _message(self, topic: str, name: str, kind: Any, owner: str) -> dict[str, str]:
        """Return the reference of a message; a second form of it has the name of its owner, too."""
        made: dict[str, Any] = {"name": name}
        if _has_fields(kind):
            made |= {"contentType": "application/json", "payload": self._schema(kind)}
        key = _key(name)
        if self._messages.get(key, made) != made:
            key = _key(f"{name}.{owner}")
        self._messages[key] = made
        self.channel(topic)["messages"][key] = {"$ref": f"{_MESSAGES}{key}"}
        return {"$ref": f"#/channels/{_escape(topic)}/messages/{key}"}

    def _schema(self, kind: Any) -> Any:
        try:
            if hasattr(kind, "model_json_schema"):
                found = dict(kind.model_json_schema(ref_template=_SCHEMAS + "{model}"))
                named = {**found.pop("$defs", {}), kind.__name__: found}
                reference: Any = {"$ref": f"{_SCHEMAS}{kind.__name__}"}
            else:
                [reference], named = msgspec.json.schema_components(
                    [kind], ref_template=_SCHEMAS + "{name}"
                )
                _name_times(msgspec.inspect.type_info(kind), reference, named, set())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{kind!r:.80} has no JSON Schema: {error}") from error
        for name, schema in named.items():
            if self._schemas.setdefault(name, schema) != schema:
                raise ConfigError(
                    f"two classes are named {name}, and differ: rename one, or import it from where"
                    " the other is defined"
                )
        return reference

    def build(self, title: str, version: str) -> dict[str, Any]:
        return {
            "asyncapi": VERSION,
            "info": {"title": title, "version": version},
            "defaultContentType": "application/json",
            "channels": self._channels,
            "operations": self._operations,
            "components": {"messages": self._messages, "schemas": self._schemas},
        }


_TIMES: Mapping[type, str] = {
    msgspec.inspect.DateTimeType: "date-time",
    msgspec.inspect.TimeType: "time",
}


def _name_times(info: Any, schema: Any, named: Mapping[str, Any], seen: set[Any]) -> None:
    """Write the format of dates and times that msgspec leaves out, since they may lack a time zone.

    Without it, `str` and `datetime` would have the same schema.
    """
    for one in getattr(info, "types", (info,)):  # a union has at most one type that is a string
        for part in schema.get("anyOf", (schema,)):
            if type(one) in _TIMES and part.get("type") == "string":
                part.setdefault("format", _TIMES[type(one)])
            for inner, place in (("item_type", "items"), ("value_type", "additionalProperties")):
                if hasattr(one, inner) and isinstance(part.get(place), dict):
                    _name_times(getattr(one, inner), part[place], named, seen)
            for item, place in zip(
                getattr(one, "item_types", ()), part.get("prefixItems", ()), strict=False
            ):
                _name_times(item, place, named, seen)
        cls = getattr(one, "cls", None)
        fields = named.get(getattr(cls, "__name__", ""), {}).get("properties")
        if cls not in seen and fields:
            seen.add(cls)
            for field in one.fields:
                _name_times(field.type, fields.get(field.encode_name, {}), named, seen)


def _has_fields(kind: Any) -> bool:
    """Return whether data of this type has a schema that says something."""
    return kind not in (bytes, dict) and (get_origin(kind) or kind) is not Message


def _key(name: str) -> str:
    """Return a name as AsyncAPI allows it for a component."""
    return re.sub(r"[^\w.\-]", "_", name)


def _escape(name: str) -> str:
    """Return a name as a part of a JSON Pointer."""
    return name.replace("~", "~0").replace("/", "~1")


# --- what breaks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """Holds a message as one operation of a document receives or sends it."""

    operation: str
    is_sent: bool
    address: str
    name: str
    payload: Schema | None

    @property
    def place(self) -> tuple[bool, str, str]:
        return self.is_sent, self.address, self.name

    def __str__(self) -> str:
        return f"{self.name} ({'sent to' if self.is_sent else 'received from'} {self.address})"


def read_document(path: Path) -> dict[str, Any]:
    """Read an AsyncAPI 3 document in JSON."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; write it by conquiet app describe") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict) or not str(found.get("asyncapi", "")).startswith("3."):
        raise ConfigError(f"{path} is no AsyncAPI 3 document; write it by conquiet app describe")
    try:
        for use in list_uses(found):
            list_fields(found, use)
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: its operations and messages are not as conquiet app describe writes them"
        ) from error
    return found


def find_breaks(old: Schema, new: Schema) -> list[str]:
    """Return a line for each change from one AsyncAPI document to another that breaks a service.

    Services that send to this one have the old form of what it receives, and those that read from
    it have the old form of what it sends.
    """
    lines: list[str] = []
    later = list(list_uses(new))
    for use in list_uses(old):
        same = [one for one in later if one.place == use.place]
        if not same:
            lines.append(f"{use}: is no longer {'sent' if use.is_sent else 'received'}")
            continue
        own = [one for one in same if one.operation == use.operation]
        if not own:
            lines.append(
                f"{use}: handler {use.operation} is gone or renamed, and the inbox knows it by its"
                f" name; keep it by name={use.operation!r}"
            )
        other = (own or same)[0]
        if use.payload is not None:
            comparison = _Comparison(old, new, use.is_sent)
            comparison.compare(use.payload, other.payload or {}, "")
            lines += [f"{use}: {line}" for line in comparison.lines]
    return list(dict.fromkeys(lines))


def list_uses(document: Schema) -> Iterator[Use]:
    for name, operation in document.get("operations", {}).items():
        channel = _resolve(document, operation["channel"])
        for reference in operation.get("messages", ()):
            message = _resolve(document, reference)
            yield Use(
                name,
                operation["action"] == "send",
                channel["address"],
                message["name"],
                message.get("payload"),
            )


def list_fields(document: Schema, use: Use) -> list[tuple[str, str, bool]]:
    """Return name and type of each field of a message, and whether it is required."""
    payload = _resolve(document, use.payload or {})
    required = payload.get("required", ())
    return [
        (name, _type_text(document, schema), name in required)
        for name, schema in payload.get("properties", {}).items()
    ]


def _type_text(document: Schema, schema: Schema) -> str:
    """Return the type of a field in a few words: `string`, `list of Line`, `integer or null`."""
    words = []
    for one in _alternatives(document, _resolve(document, schema)):
        values = _values(one)
        if values is not None:
            words.append(_list(values))
        elif one.get("type") == "array" and isinstance(one.get("items"), Mapping):
            words.append(f"list of {_name(_resolve(document, one['items']))}")
        else:
            words.append(str(one.get("format") or _name(one)))
    return " or ".join(words)


def _resolve(document: Schema, value: Any) -> Any:
    """Follow references within a document."""
    for _ in range(100):
        if not isinstance(value, Mapping) or "$ref" not in value:
            return value
        found: Any = document
        for part in str(value["$ref"]).removeprefix("#/").split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                raise ConfigError(f"the reference {value['$ref']!r:.100} leads nowhere")
            found = found[key]
        value = found
    raise ConfigError(f"the reference {value!r:.100} leads in a circle")


_ANY = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_EXACT = ("pattern", "format", "multipleOf", "uniqueItems", "contentEncoding")


class _Comparison:
    """Compares the schemas of one message in two documents."""

    def __init__(self, old: Schema, new: Schema, is_sent: bool) -> None:
        self._old = old
        self._new = new
        self._is_sent = is_sent
        self._seen: set[tuple[str, str]] = set()
        self.lines: list[str] = []

    def compare(self, old: Schema, new: Schema, path: str) -> None:
        references = (str(old.get("$ref", "")), str(new.get("$ref", "")))
        if all(references):
            if references in self._seen:
                return
            self._seen.add(references)
        old, new = _resolve(self._old, old), _resolve(self._new, new)
        before = _alternatives(self._old, old)
        after = _alternatives(self._new, new)
        if len(before) == len(after) == 1:
            self._compare_one(before[0], after[0], path)
            return
        self._compare_several(before, after, path)

    def _compare_several(
        self, before: Sequence[Schema], after: Sequence[Schema], path: str
    ) -> None:
        left = list(after)
        unmatched = []
        for one in before:
            key = _identity(one)
            twin = next((other for other in left if _identity(other) == key), None)
            if twin is None:
                unmatched.append(one)
                continue
            left.remove(twin)
            self._compare_one(one, twin, path)
        if len(unmatched) == len(left) == 1:
            self._compare_one(unmatched[0], left[0], path)
            return
        for one in unmatched:
            if not any(
                _types(one) <= _widen(_types(other)) and not _is_object(one) for other in after
            ):
                self._add(path, f"may no longer be {_name(one)}")
        if self._is_sent:
            for one in left:
                self._add(path, f"may now be {_name(one)}")

    def _compare_one(self, old: Schema, new: Schema, path: str) -> None:
        before, after = _types(old), _types(new)
        if not before <= _widen(after):
            self._add(path, f"was {_words(before)}, and is {_words(after)}")
            return
        if self._is_sent and not after <= _widen(before):
            self._add(path, f"was {_words(before)}, and may now be {_words(after)}")
        self._compare_values(old, new, path)
        self._compare_limits(old, new, path)
        if "object" in before & after:
            self._compare_objects(old, new, path)
        if "array" in before & after:
            self._compare_arrays(old, new, path)

    def _compare_values(self, old: Schema, new: Schema, path: str) -> None:
        before, after = _values(old), _values(new)
        if after is not None:
            if before is None:
                self._add(path, f"takes only {_list(after)} now")
            else:
                gone = [value for value in before if value not in after]
                if gone:
                    self._add(path, f"may no longer be {_list(gone)}")
        if self._is_sent and before is not None:
            more = None if after is None else [value for value in after if value not in before]
            if more is None:
                self._add(path, f"was one of {_list(before)}, and may now be any value")
            elif more:
                self._add(path, f"may now be {_list(more)}, which readers do not know")

    def _compare_limits(self, old: Schema, new: Schema, path: str) -> None:
        for names, sign in ((_LOWER, 1), (_UPPER, -1)):
            for name in names:
                limit, former = new.get(name), old.get(name)
                if limit is not None and (former is None or sign * limit > sign * former):
                    self._add(path, f"{name} is {limit} now, it was {_or_none(former)}")
                elif (
                    self._is_sent
                    and former is not None
                    and (limit is None or sign * limit < sign * former)
                ):
                    self._add(path, f"{name} was {former}, and is {_or_none(limit)} now")
        for name in _EXACT:
            if old.get(name) != new.get(name) and (self._is_sent or new.get(name) is not None):
                self._add(
                    path, f"{name} was {_or_none(old.get(name))}, and is {_or_none(new.get(name))}"
                )

    def _compare_objects(self, old: Schema, new: Schema, path: str) -> None:
        before, after = old.get("properties", {}), new.get("properties", {})
        needed, needs = set(old.get("required", ())), set(new.get("required", ()))
        for name, schema in before.items():
            place = f"{path}.{name}" if path else name
            if name not in after:
                self._add(place, "was removed")
                continue
            if self._is_sent and name in needed and name not in needs:
                self._add(place, "may be missing now")
            self.compare(schema, after[name], place)
        if not self._is_sent:
            for name in sorted(needs - needed):
                self._add(f"{path}.{name}" if path else name, "is required now")
        others, others_now = old.get("additionalProperties"), new.get("additionalProperties")
        if others_now is False and others is not False and not self._is_sent:
            self._add(path, "takes no other fields now")
        elif isinstance(others, Mapping) or isinstance(others_now, Mapping):
            self.compare(
                others if isinstance(others, Mapping) else {},
                others_now if isinstance(others_now, Mapping) else {},
                f"{path}.*" if path else "*",
            )

    def _compare_arrays(self, old: Schema, new: Schema, path: str) -> None:
        place = f"{path}[]"
        before, after = old.get("prefixItems", ()), new.get("prefixItems", ())
        for one, other in zip(before, after, strict=False):
            self.compare(one, other, place)
        if isinstance(old.get("items"), Mapping) or isinstance(new.get("items"), Mapping):
            one, other = old.get("items"), new.get("items")
            self.compare(
                one if isinstance(one, Mapping) else {},
                other if isinstance(other, Mapping) else {},
                place,
            )

    def _add(self, path: str, what: str) -> None:
        self.lines.append(f"field {path} {what}" if path else what)


def _alternatives(document: Schema, schema: Schema) -> list[Schema]:
    """Return the schemas of which data fits one; `anyOf` within `anyOf` is flat."""
    found: list[Schema] = []
    several = schema.get("anyOf") or schema.get("oneOf")
    if several:
        for one in several:
            found += _alternatives(document, _resolve(document, one))
        return found
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return [{**schema, "type": kind} for kind in kinds]
    return [schema]


def _identity(schema: Schema) -> Any:
    """Return by what an alternative is known: the name of its class, or its type."""
    if _is_object(schema):
        return "object", schema.get("title", "")
    return (*sorted(_types(schema)), schema.get("format", ""))


def _is_object(schema: Schema) -> bool:
    return schema.get("type") == "object"


def _types(schema: Schema) -> frozenset[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    values = _values(schema)
    if values is None:
        return _ANY
    return frozenset(_type_of(value) for value in values)


def _widen(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return names.get(type(value), "array" if isinstance(value, list) else "object")


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return None if found is None else list(found)


def _name(schema: Schema) -> str:
    title = schema.get("title")
    return str(title) if _is_object(schema) and title else _words(_types(schema))


def _words(types: frozenset[str]) -> str:
    return "any value" if types == _ANY else " or ".join(sorted(types))


def _list(values: Sequence[Any]) -> str:
    return ", ".join(msgspec.json.encode(value).decode() for value in values)


def _or_none(value: Any) -> str:
    return "none" if value is None else str(value)
