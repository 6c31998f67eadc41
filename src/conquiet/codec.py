"""Encode and decode typed data, and whole messages as structured CloudEvents JSON."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, cast, get_origin, is_typeddict

import msgspec

from conquiet.errors import ConfigError, HandlerError, InvalidMessage
from conquiet.message import TEXT_ATTRIBUTES, Attributes, Message, check_kinds, describe

SPEC_VERSION = "1.0"
Decode = Callable[[Message[Any]], Any]

_JSON = "application/json"
_attribute_name = re.compile(r"[a-z0-9]+")
_json = msgspec.json.Encoder()
_raw_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raw_value = msgspec.json.Decoder(msgspec.Raw)
_any_value = msgspec.json.Decoder()


def is_json(content_type: str) -> bool:
    """Return whether a media type is JSON: `application/json`, `text/json` or `…+json`."""
    essence = content_type.partition(";")[0].strip().lower()
    return essence.endswith(("/json", "+json"))


def _has_json(message: Message[Any]) -> bool:
    content_type = message.attributes.get("datacontenttype")
    return content_type == "application/json" or is_json(message.datacontenttype)


def encode_data(message: Message[Any]) -> bytes:
    """Encode a message's data: bytes unchanged, typed data as JSON."""
    data = message.data
    if isinstance(data, bytes):
        return data
    if isinstance(data, (bytearray, memoryview)):
        return bytes(data)
    if not _has_json(message):
        raise HandlerError(
            f"{describe(message.attributes)}: data of type {type(data).__name__} can only be"
            f" written as JSON, not as {message.datacontenttype}; give the data as bytes"
        )
    try:
        if hasattr(data, "model_dump_json"):
            return cast(str, data.model_dump_json(by_alias=True)).encode()
        return _json.encode(data)
    except (TypeError, ValueError, OverflowError) as error:
        raise HandlerError(
            f"{describe(message.attributes)}: data of type {type(data).__name__}"
            f" cannot be written as JSON: {error}"
        ) from error


def decoder(kind: Any) -> Decode:
    """Build a decoder of a message's data into `kind`, once per handler.

    Supports msgspec structs, dataclasses, pydantic models, TypedDicts, dict and bytes. Wrong data
    raises `InvalidMessage` with the path of the first error.
    """
    if kind is bytes:
        return encode_data
    if hasattr(kind, "model_validate_json"):
        return _pydantic_decoder(kind)
    if not _is_decodable(kind):
        raise ConfigError(
            f"a handler cannot take {kind!r}: use a msgspec Struct, a dataclass, a pydantic"
            " model, a TypedDict, dict or bytes"
        )
    try:
        decode = msgspec.json.Decoder(kind).decode
    except TypeError as error:
        raise ConfigError(f"a handler cannot take {kind!r}: {error}") from error
    accepts = kind if isinstance(kind, type) and not is_typeddict(kind) else dict

    def read(message: Message[Any]) -> Any:
        data = message.data
        try:
            if type(data) is bytes:
                content_type = message.attributes.get("datacontenttype", _JSON)
                if content_type != _JSON:
                    _check_content_type(message, kind)
                return decode(data)
            if isinstance(data, accepts) and accepts is not dict:
                return data
            return msgspec.convert(data, kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _misfit(message, kind, error) from error

    return read


def _is_decodable(kind: Any) -> bool:
    if kind is dict or get_origin(kind) is dict or is_typeddict(kind) or is_dataclass(kind):
        return True
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _pydantic_decoder(model: Any) -> Decode:
    def read(message: Message[Any]) -> Any:
        data = message.data
        if isinstance(data, model):
            return data
        try:
            if isinstance(data, bytes):
                _check_content_type(message, model)
                return model.model_validate_json(data)
            return model.model_validate(data)
        except ValueError as error:  # pydantic's ValidationError is one
            raise _misfit(message, model, error) from error

    return read


def _check_content_type(message: Message[Any], kind: Any) -> None:
    content_type = message.attributes.get("datacontenttype")
    if content_type is not None and not _has_json(message):
        raise InvalidMessage(
            f"{describe(message.attributes)}: {_name(kind)} is read from JSON, but"
            f" datacontenttype is {content_type!r:.80}; let the handler take bytes"
        )


def _misfit(message: Message[Any], kind: Any, error: Exception) -> InvalidMessage:
    reason = str(error) or type(error).__name__
    return InvalidMessage(
        f"{describe(message.attributes)}: data is not a valid {_name(kind)}: {reason:.500}"
    )


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)


def to_json(message: Message[Any]) -> bytes:
    """Encode a message in CloudEvents' structured JSON format.

    JSON data is embedded unchanged. Other data is encoded in `data_base64`, so that no byte is
    lost whatever the content type is.
    """
    attributes = {"specversion": SPEC_VERSION, **message.attributes}
    check_attributes(attributes)
    event: dict[str, Any] = {
        name: b64encode(value).decode() if isinstance(value, bytes) else value
        for name, value in attributes.items()
    }
    if message.data is not None:
        name, value = _json_member(message)
        event[name] = value
    try:
        return _json.encode(event)
    except UnicodeEncodeError as error:
        raise InvalidMessage(
            f"{describe(attributes)}: an attribute is not valid text: {error}"
        ) from error


def _json_member(message: Message[Any]) -> tuple[str, Any]:
    data = encode_data(message)
    try:
        if is_json(message.datacontenttype):
            if not data.isascii():
                data.decode()  # a raw JSON decoder does not check the encoding
            return "data", _raw_value.decode(data)
        if message.datacontenttype.startswith("text/"):
            return "data", data.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return "data_base64", b64encode(data).decode()


def from_json(event: bytes) -> Message[bytes]:
    """Decode CloudEvents' structured JSON format; the data is kept byte for byte."""
    try:
        members = _raw_members.decode(event)
        attributes: Attributes = {}
        for name, raw in members.items():
            if name not in ("data", "data_base64"):
                value = _any_value.decode(raw)
                if value is not None:  # CloudEvents: null means unset
                    attributes[name] = value
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMessage(f"not a CloudEvents JSON object: {error}") from error
    check_attributes(attributes)
    version = attributes.get("specversion")
    if version != SPEC_VERSION:
        raise InvalidMessage(
            f"{describe(attributes)}: specversion must be {SPEC_VERSION!r}, not {version!r:.40}"
        )
    return Message(_data_of(members, attributes), attributes)


def _data_of(members: dict[str, msgspec.Raw], attributes: Attributes) -> bytes:
    inline, encoded = members.get("data"), members.get("data_base64")
    if encoded is not None and inline is not None:
        raise InvalidMessage(f"{describe(attributes)}: has both data and data_base64; send one")
    if encoded is not None:
        try:
            return b64decode(_any_value.decode(encoded), validate=True)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidMessage(
                f"{describe(attributes)}: data_base64 is not base64: {error}"
            ) from error
    if inline is None:
        return b""
    if not is_json(attributes.get("datacontenttype", "application/json")):
        try:
            value = _any_value.decode(inline)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidMessage(f"{describe(attributes)}: data cannot be read: {error}") from error
        if isinstance(value, str):  # text is embedded as a JSON string
            return value.encode()
    return bytes(inline)


def check_attributes(attributes: Attributes) -> None:
    """Check CloudEvents' rules for attributes: required names, spelling, types."""
    check_kinds(attributes)
    for name in ("id", "source", "type"):
        if not attributes.get(name):
            raise InvalidMessage(f"{describe(attributes)}: attribute {name!r} is missing or empty")
    if TEXT_ATTRIBUTES.issuperset(attributes):
        return
    for name in attributes:
        if name not in TEXT_ATTRIBUTES and not _attribute_name.fullmatch(name):
            raise InvalidMessage(
                f"{describe(attributes)}: attribute name {name!r:.60} must consist of a-z and 0-9"
            )
