"""What somebody might put into a broker: JSON that hurts, and bytes that are nothing at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from conquiet.errors import InvalidMessage

EXAMPLES = int(os.environ.get("CONQUIET_FUZZ_EXAMPLES", "0"))
"""How many examples each fuzz test tries; by default few enough for `make test`."""

DEEP_LIST = b"[" * 100_000 + b"]" * 100_000
DEEP_OBJECT = b'{"a":' * 100_000 + b"1" + b"}" * 100_000

HURTING = {
    "lists in lists": DEEP_LIST,
    "objects in objects": DEEP_OBJECT,
    "lists that never end": b"[" * 100_000,
    "a number of 5,000 digits": b"9" * 5_000,
    "a number beyond every float": b"1e999",
    "not a number": b"NaN",
    "infinity": b"-Infinity",
    "half a surrogate pair": b'"\\ud800"',
    "no UTF-8": b'"\xff\xfe"',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
    "NUL": b'"a\\u0000b"',
    "a raw NUL": b'"a\x00b"',
    "nothing": b"",
    "a truncated escape": b'"\\u12',
    "a byte order mark": b"\xef\xbb\xbf{}",
}
"""Values that stand where JSON is expected, by what is wrong with them."""


def fuzzed(quick: int = 50) -> settings:
    """Few examples in an ordinary run, as many as CONQUIET_FUZZ_EXAMPLES says in a long one."""
    return settings(max_examples=EXAMPLES or quick)


def refusal(
    decode: Callable[..., Any], *given: Any, by: type[Exception] = InvalidMessage
) -> Exception | None:
    """The room's own error, None if there was none; any other error fails the test."""
    try:
        decode(*given)
    except by as error:
        return error
    return None


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
"""Any value that JSON has."""


@st.composite
def damaged(draw: st.DrawFn, good: st.SearchStrategy[bytes]) -> bytes:
    """Good bytes in which some were changed, cut out or put in."""
    content = bytearray(draw(good))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 3))
        content[at : at + length] = draw(
            st.binary(max_size=3) | st.sampled_from([b'"', b"{", b"}", b"[", b"\\u", b"\r\n", b"-"])
        )
    return bytes(content)
