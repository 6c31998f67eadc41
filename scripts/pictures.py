"""Draw the pictures of the docs from the texts below: python scripts/pictures.py

They are docs/images/NAME.svg.

    [box]  (party)  {fault}  <note>   boxes, as wide as their text is here
    x                                 a crash
    -  |  +  >  v                     lines, corners, heads of arrows

Text is on filled boxes and lines are mid-grey, so that both read on a light and on a dark page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
COLUMN, ROW, BOX, GAP = 8.6, 46, 32, 8
FILLS = {"[": "#0f766e", "(": "#475569", "{": "#b91c1c", "<": "#e2e8f0"}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_box = re.compile(r"\[[^]]*\]|\([^)]*\)|\{[^}]*\}|<[^>]*>")
_line = re.compile(r"[-|+>vx]")

PICTURES = {
    # --- docs/concepts/failures.md ---
    "dual-write": """
(service)  [COMMIT]---x         <state changed, event never sent>
(broker)          {publish}
""",
    "dual-write-outbox": """
(service)  [BEGIN]--[UPDATE orders]--[INSERT outbox]--[COMMIT]
(relay)                                                  [claim]-->[publish]-->[mark]
""",
    "publish-first": """
(service)  [publish]----{COMMIT fails}   <the event is out, the state is not>
""",
    "redelivery": """
(broker)   [deliver]-------------------------------->[deliver again]
(worker)      [BEGIN]--[effect]--[COMMIT]---x           [BEGIN]--{effect again}
""",
    "early-note": """
(1st delivery)  [SET id NX]---x          <the work was never begun>
(2nd delivery)     [SET id NX fails]--{taken for a duplicate}--{ack}   <never done>
""",
    "zombie": """
(first)   [lease]-----{paused}----------------------------{writes?}
(second)                  <lease ends>-->[takes over]-->[done]
""",
    "long-handler": """
(worker)  [read]--[handler]------------------------------------->[ack]
(others)             <lease ends>-->[claim]-->{handler, beside the first}
""",
    "dead-consumer": """
(consumer)  [read 10]--[ack 4]---x       <6 are pending, and their consumer is dead>
""",
    "duplicate-publication": """
(relay A)  [claim]-->[publish]---x       <not marked>
(relay B)                           [claim]-->{publish again}-->[mark]
""",
    "two-relays": """
(relay A)  [SELECT unpublished]-->[1, 2, 3]-->[publish]
(relay B)  [SELECT unpublished]-->[1, 2, 3]-->{publish again}
""",
    "late-commit": """
(transaction A)  [INSERT id 7]----------------------------------->[COMMIT]
(transaction B)       [INSERT id 8]--[COMMIT]
(reader)                                     [sees 8, goes on behind 8]   {7 is never read}
""",
    "trimmed-log": """
(stream)   {1}  {2}  {3}  {4}  {5}  [6]  [7]  [8]     <MAXLEN 3 deletes 1 to 5>
(reader)        <was here>--------->[goes on with 6]
""",
    "poison": """
(queue)   [ok]  [ok]  {fails}  [ok]  [ok]     <fails, returns, fails, returns>
""",
    "bad-batch": """
(batch)   [1]  [2]  [3]  {4}  [5]   <ROLLBACK>-->[1]   [2]   [3]   {4}   [5]
                                                <each in a transaction of its own>
""",
    "outage": """
(store)      [up]-----------{away}--------------------[up]
(attempts)            {1}  {2}  {3}  <…>  {10: a dead letter}
""",
    "swallowed-error": """
(handler)  {INSERT fails}--<except: pass>--{UPDATE ignored}-->[COMMIT]-->{is a ROLLBACK}-->[ack]
""",
    "stuck-duplicate": """
(1st delivery)  [INSERT id]--[effect]--[COMMIT]-->[ack]
(2nd delivery)  {INSERT id fails}--{ROLLBACK}-->[nack]      <3rd, 4th, … : for ever>
""",
    "no-outbox": """
(worker)   [COMMIT, inbox: done]---x      <redelivery: done, so it is acked>
(broker)                  {publish}
""",
    "out-of-order": """
(relay A)  [placed]-------------------------------->[arrives second]
(relay B)  [canceled]----->[arrives first]
""",
    "partial-exec": """
(worker)  [MULTI]--[HSET ok]--{LPUSH fails}--[XADD ok]-->[EXEC]     <two of three took effect>
""",
    "lost-answer": """
(worker)  [EXEC]                     {done? not done?}
(Redis)       [written]--<answer>--x
""",
    "colliding-ids": """
(/web)     [id 1]-->[inbox: 1]
(/phone)   [id 1]-->{inbox: seen}-->[ack]      <never handled>
""",
    "stop": """
(worker)  [read]--[handle]--<SIGTERM>-->[finish]-->[COMMIT]-->[ack]-->[exit 0]
                                 +----->[after the grace time: give back, not counted]
""",
    "micro-batch": """
(driver)  [batch 7: write]---x      <not committed>       [restart]-->{batch 7 again}
""",
    # --- other pages ---
    "quickstart": """
(place.py)-->[shop: inbox and orders]-->[outbox, the log]-->[shipping: inbox and parcels]
              <  one transaction  >      <one SQLite file>    <    one transaction     >
""",
    "outside-transaction": """
(in the transaction)  [BEGIN]--[inbox]--[effect]--[outbox]-->[COMMIT]    <all, or nothing>
(outside of it)       [BEGIN]--[inbox]--{effect}--{error}-->[ROLLBACK]   <stays, and comes again>
""",
    "outbox": """
(domain transaction)           (relay)                          (consumer)
[UPDATE orders …]              [claim: SKIP LOCKED]      +----->[seen this event id?]
        |                              v                 |        |              v
[INSERT outbox …]              [publish, await it]-------+        |      <yes: nothing>
        v                              v                          v              v
[COMMIT]---------------------->[mark published_at]       [no: effect, remember]-->[ack]
<both or neither>              <at least once>           <effect once>
""",
    "inbox-states": """
<absent>-->[processing, with a token and a lease]-->[done]-->[absent, after the retention]
                 |                          |      <by the EXEC of the work>
                 v                          v
        [handler failed: deleted]   [crash: ends after the lease]
""",
    "demo": """
(generator)-->[commands, 2 partitions]-->[worker 1]  {worker 2, killed}
     |                                       v               v
     |                                   [inbox, business tables, outbox]
     |                                                 v
     |                                        [relay 1, relay 2]
     |                                                 v
     +--->(ad views and clicks, bad events)--->[event log]
     |                                                 v
     |                                   [Spark: bronze, silver, gold, marts]
     |                                                 v
     +--->(what must come out of it)---------->[the verdict]
""",
    "lake": """
(log, outbox, files)-->[take]-->[raw_events]                  <bronze, as it came>
                                    v
                                 [judge]--->[events, a table per event type]   <silver>
                                    |  +--->(events_quarantine, redeliveries, expectations)
                                    v
                                  [fold]--->[tables of facts]      <a state by key gives rows>
                                    v
                                   [SQL]--->[marts, queries, reconciliation]   <what changed>
""",
    "lake-records": """
(per batch)    [offsets]-->[ids]-->[files of raw_events and silver]-->(JUDGED)-->[commits]
(per refresh)  [states, changes]-->(FOLDED)-->[commits of facts]-->[SQL tables]-->(APPLIED)
""",
    "marketplace-tables": """
(log)-->[raw_events]-->[events, a typed table per event type]   (events_quarantine)
                           |
                           +-->[Order]-->[fact_order, fact_order_line, recon_money]
                           |      +----->[four daily marts, buyer_first_purchase, admin_weekly]
                           |
                           +-->[ad_touches, fact_ad_event]-->[fact_attribution]-->[ad_daily]
                           |
                           +-->[recon_completeness, outbox_delivery]
""",
    "order-states": """
(created_pending)-->[accepted]------------------+
   |     |                                      v
   |     +---->[partially_accepted]-->[ready_for_dispatch]-->[in_transit]-->[delivered]-->[closed]
   |                                            v
   +-->{rejected; on day 10 expired}       {canceled}   <also from the three before>
""",
    "request": """
(POST /orders)-->[BEGIN]--[INSERT orders]--[INSERT outbox]--[COMMIT]-->(201)
                                                               v
                                  (worker)-->[INSERT inbox]--[INSERT invoices]--[COMMIT]
""",
    "faststream": """
(entry)-->[BEGIN]--[inbox row]--[your effect]--[outbox row]--[COMMIT]-->(ack)
""",
    "spark-pipeline": """
(log, Redis Streams)-->[raw_events]-->[order_placed]-->[days]-->(totals, PostgreSQL or SQLite)
""",
}


def draw(text: str) -> str:
    """Return the picture that a text describes, as SVG."""
    rows = text.strip("\n").split("\n")
    width = max(map(len, rows)) * COLUMN + 2 * GAP
    height = len(rows) * ROW
    lines, boxes = [], []
    for number, row in enumerate(rows):
        boxes += [_draw_box(found, number) for found in _box.finditer(row)]
        lines += _draw_lines(rows, number)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}"'
            f' width="{width:.0f}" role="img" font-family="{FONT}" font-size="14"'
            ' text-anchor="middle">',
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="5"'
            ' markerHeight="5" orient="auto"><path d="M0 0 10 5 0 10z" fill="#7d8b99"/>'
            "</marker></defs>",
            '<g fill="none" stroke="#7d8b99" stroke-width="2.5">',
            *lines,
            "</g>",
            *boxes,
            "</svg>\n",
        ]
    )


def _x(column: float) -> float:
    return GAP + column * COLUMN


def _draw_box(found: re.Match[str], row: int) -> str:
    left, right, middle = _x(found.start()), _x(found.end()), row * ROW + ROW / 2
    kind, words = found.group()[0], escape(found.group()[1:-1].strip())
    ink = "#1e293b" if kind == "<" else "#fff"
    fits = f' textLength="{right - left - 12:.0f}"' if len(words) * 7.4 > right - left - 10 else ""
    if fits:
        fits += ' lengthAdjust="spacingAndGlyphs"'
    return (
        f'<rect x="{left:.1f}" y="{middle - BOX / 2:.1f}" width="{right - left:.1f}"'
        f' height="{BOX}" rx="6" fill="{FILLS[kind]}"/>'
        f'<text x="{(left + right) / 2:.1f}" y="{middle + 5:.1f}" fill="{ink}"{fits}>{words}</text>'
    )


def _draw_lines(rows: list[str], number: int) -> Iterator[str]:
    row = _box.sub(lambda found: "#" * len(found.group()), rows[number])
    top, middle, bottom = number * ROW, number * ROW + ROW / 2, (number + 1) * ROW
    for run in re.finditer(r"[-+>x]*[->x][-+>x]*", row):
        begin, end = run.span()
        head = ' marker-end="url(#head)"' if run.group().endswith(">") else ""
        left = _x(begin + (run.group()[0] in "+x") * 0.5)
        right = _x(end - (run.group()[-1] in "+x") * 0.5)
        if end - begin > 1:
            yield f'<path d="M{left:.1f} {middle:.1f}H{right:.1f}"{head}/>'
    for column, mark in enumerate(row):
        x = _x(column + 0.5)
        if mark == "x":
            yield (
                f'<path stroke="#dc2626" stroke-width="4" d="M{x - 8:.1f} {middle - 8:.1f}l16 16'
                f'm0-16l-16 16"/>'
            )
        elif mark in "|v":
            upper = top - (ROW - BOX) / 2 if _is_box(rows, number - 1, column) else top - ROW / 2
            if mark == "|":
                lower = bottom
            else:
                gap = (ROW - BOX) / 2
                lower = bottom + gap if _is_box(rows, number + 1, column) else bottom
            head = ' marker-end="url(#head)"' if mark == "v" else ""
            yield f'<path d="M{x:.1f} {max(upper, 0):.1f}V{lower:.1f}"{head}/>'
        elif mark == "+" and _is_box(rows, number - 1, column):
            yield f'<path d="M{x:.1f} {top - (ROW - BOX) / 2:.1f}V{middle:.1f}"/>'
        elif mark == "+" and number and rows[number - 1][column : column + 1] == "|":
            yield f'<path d="M{x:.1f} {top}V{middle:.1f}"/>'


def _is_box(rows: list[str], number: int, column: int) -> bool:
    if not 0 <= number < len(rows):
        return False
    return any(found.start() <= column < found.end() for found in _box.finditer(rows[number]))


def main() -> int:
    for name, text in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
