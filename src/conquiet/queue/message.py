"""One message, and its form in the stream: a single field `data` that holds a JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from types import NoneType
from typing import Any

import msgspec

from conquiet.queue.errors import InvalidPayloadError

FIELD = b"data"

# of foreign field names in an error: they can be of any number and length
_NAMES_SHOWN = 200

_ALWAYS_FINE = frozenset({str, int, bool, NoneType})


@dataclass(frozen=True, slots=True)
class QueueMessage:
    """What a consumer gets: `id` is the entry's id in the stream."""

    id: str
    payload: dict[str, Any]


def encode(payload: object) -> bytes:
    """The value of the field `data`; raises InvalidPayloadError for what JSON cannot carry."""
    if not isinstance(payload, dict):
        raise InvalidPayloadError(f"a payload must be a dict, not {type(payload).__name__}")
    try:
        flaw = _flaw(payload)
        data = b"" if flaw else _encoder.encode(payload)
    except RecursionError as error:
        raise InvalidPayloadError("the payload contains itself, or is nested too deep") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidPayloadError(f"the payload cannot be written as JSON: {error}") from error
    if flaw:
        raise InvalidPayloadError(f"payload{flaw}")
    return data


def decode(fields: Sequence[bytes] | None) -> dict[str, Any]:
    """The payload of an entry from its names and values in turn; ValueError says what is wrong."""
    if not fields or len(fields) != 2 or fields[0] != FIELD:
        names = b", ".join(fields[::2]).decode(errors="backslashreplace") if fields else "none"
        more = " …" if len(names) > _NAMES_SHOWN else ""
        raise ValueError(
            f"it must have exactly one field, data, and has: {names[:_NAMES_SHOWN]}{more}"
        )
    try:
        return _decoder.decode(fields[1])
    except UnicodeDecodeError as error:
        raise ValueError(f"its data is not UTF-8: {error}") from error
    except msgspec.ValidationError as error:
        raise ValueError(f"its data is not a JSON object: {error}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"its data is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("its data is nested too deep") from error


def _flaw(value: Any) -> str:
    """Where and why JSON cannot carry `value`, or an empty string.

    The encoder alone is too kind: it would write NaN as null, bytes as base64 and the key 1 as "1",
    and the consumer would get something else than was sent.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                return f" has the key {key!r}: keys must be strings"
            if type(item) not in _ALWAYS_FINE and (flaw := _flaw(item)):
                return f"[{key!r}]{flaw}"
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if type(item) not in _ALWAYS_FINE and (flaw := _flaw(item)):
                return f"[{index}]{flaw}"
    elif isinstance(value, float):
        return "" if isfinite(value) else f" is {value!r}, which JSON does not have"
    elif not isinstance(value, str | int | None):
        return f" is of type {type(value).__name__}, which JSON does not have"
    return ""


def _plain(value: Any) -> Any:
    """Kinds of str, int and float that the encoder does not know, as what they are to JSON."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError(f"type {type(value).__name__} is not supported")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_decoder = msgspec.json.Decoder(dict[str, Any])
