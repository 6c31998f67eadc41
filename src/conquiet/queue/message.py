"""Encode and decode messages: one field `data` in the stream, with a JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from types import NoneType
from typing import Any

import msgspec

from conquiet.queue.errors import InvalidPayloadError

FIELD = b"data"

# The limit of field names in an error: foreign entries have any number, of any length.
_NAMES_SHOWN = 200

_ALWAYS_FINE = frozenset({str, int, bool, NoneType})


@dataclass(frozen=True, slots=True)
class QueueMessage:
    """Holds a message; `id` is the entry's id in the stream, `payload` what was enqueued."""

    id: str
    payload: dict[str, Any]


def encode(payload: object) -> bytes:
    """Encode the field `data`; raise InvalidPayloadError for values that JSON lacks."""
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
    """Decode the payload from an entry's alternating names and values, or raise ValueError."""
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
    """Return where and why JSON cannot encode `value`, or an empty string.

    The encoder alone would write NaN as null, bytes as base64 and the key 1 as "1", and the
    consumer would receive other data than was sent.
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
    """Convert subclasses of str, int and float, which the encoder does not support."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError(f"type {type(value).__name__} is not supported")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_decoder = msgspec.json.Decoder(dict[str, Any])
