"""Counting: which entry is the n-th after another. Ids made of a clock do not tell.

Redis has no command for it, so entries are walked through: inside Redis by a small script, which
sends ids only, or by reading them where scripts are not allowed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from conquiet.errors import StoreError
from conquiet.redis.ids import next_after
from conquiet.redis.wire import Wire
from conquiet.spark.log.asking import ask
from conquiet.spark.log.piece import Piece, id_of, parts

logger = logging.getLogger("conquiet.spark")

PAGE = 500
_IN_ONE_GO = 5_000
"""Entries that are walked through in one go: Redis serves nobody else meanwhile."""
_AT_ONCE = 100

# KEYS[1]  the stream
# ARGV     the first id, the last id, how many entries, how many of them per page
# Answers with the last id of each page, and how many entries there were.
_WALK = b"""
local from, marks, walked = ARGV[1], {}, 0
local wanted, page = tonumber(ARGV[3]), tonumber(ARGV[4])
while walked < wanted do
  local count = math.min(page, wanted - walked)
  local entries = redis.call('XRANGE', KEYS[1], from, ARGV[2], 'COUNT', count)
  if #entries == 0 then break end
  walked = walked + #entries
  marks[#marks + 1] = entries[#entries][1]
  from = '(' .. marks[#marks]
  if #entries < count or marks[#marks] == ARGV[2] then break end
end
return {marks, walked}
"""


@dataclass(slots=True)
class Walk:
    """A way through a piece: the ids that stand at the end of each page, and how far it went."""

    piece: Piece
    wanted: int
    marks: list[tuple[int, str]] = field(default_factory=list)
    """How many entries lie up to an id, and the id."""
    is_done: bool = False

    @property
    def walked(self) -> int:
        return self.marks[-1][0] if self.marks else 0

    @property
    def end(self) -> str:
        """The last id that was reached."""
        return self.marks[-1][1] if self.marks else self.piece.after


def walk(wire: Wire, wanted: Sequence[tuple[Piece, int]]) -> list[Walk]:
    """Go through the first so many entries of each piece, many pieces at a time."""
    walks = [Walk(piece, count, is_done=count <= 0) for piece, count in wanted]
    for one in walks:
        if not one.is_done:
            _step_over_dense_ids(one)
    while left := [one for one in walks if not one.is_done][:_AT_ONCE]:
        steps = [min(_IN_ONE_GO // len(left), one.wanted - one.walked) for one in left]
        for one, asked, reply in zip(left, steps, _replies(wire, left, steps), strict=True):
            marks, walked = reply
            base = one.walked
            for number, mark in enumerate(marks, 1):
                one.marks.append((base + min(number * PAGE, walked), mark.decode()))
            one.is_done = walked < asked or one.walked >= one.wanted
    return walks


def _step_over_dense_ids(one: Walk) -> None:
    """Ids that are numbered without a gap need no walk."""
    piece = one.piece
    (first_ms, first), (last_ms, last) = parts(piece.after), parts(piece.until)
    if first_ms == last_ms and piece.entries == last - first:
        steps = range(PAGE, min(one.wanted, piece.entries) + PAGE, PAGE)
        counts = [min(step, one.wanted, piece.entries) for step in steps]
        one.marks = [(count, id_of(first_ms, first + count)) for count in counts]
        one.is_done = True


def _replies(
    wire: Wire, walks: Sequence[Walk], steps: Sequence[int]
) -> list[tuple[list[bytes], int]]:
    commands = []
    for one, count in zip(walks, steps, strict=True):
        key, first = one.piece.stream.encode(), next_after(one.end.encode())
        until = one.piece.until.encode()
        commands.append((key, (b"EVAL", _WALK, 1, key, first, until, count, PAGE)))
    replies = ask(wire, commands)
    return [
        _read_instead(wire, one, count, reply) if isinstance(reply, Exception) else reply
        for one, count, reply in zip(walks, steps, replies, strict=True)
    ]


def _read_instead(wire: Wire, one: Walk, wanted: int, error: Exception) -> tuple[list[bytes], int]:
    """A page of entries, of which only the last id is used: Redis before 6.2, or no scripts."""
    logger.debug("entries of %r are counted by reading them: %s", one.piece.stream, error)
    key, marks, walked = one.piece.stream.encode(), [], 0
    first, until = next_after(one.end.encode()), one.piece.until.encode()
    while walked < wanted:
        count = min(PAGE, wanted - walked)
        [page] = ask(wire, [(key, (b"XRANGE", key, first, until, b"COUNT", count))])
        if isinstance(page, Exception):
            raise StoreError(f"stream {one.piece.stream!r} cannot be read: {page}") from page
        if not page:
            break
        walked += len(page)
        marks.append(page[-1][0])
        first = next_after(page[-1][0])
        if len(page) < count or marks[-1] == until:  # nothing can follow the largest id
            break
    return marks, walked
