"""A report in one file of HTML, readable in light and in dark, that fetches nothing."""

from __future__ import annotations

from html import escape

_STYLE = """\
:root { color-scheme: light dark; --paper: #fbfbfa; --card: #fff; --ink: #1c2024; --muted: #5c6570;
  --rule: #dfe3e8; --s0: #1f6feb; --s1: #c2410c; --s2: #0f766e; --bad: #b42318; --good: #157f3b }
@media (prefers-color-scheme: dark) { :root { --paper: #101418; --card: #181d23; --ink: #e6e9ec;
  --muted: #9aa5b1; --rule: #2d353e; --s0: #6cb0ff; --s1: #ffa263; --s2: #5fd3c4; --bad: #ff8a80;
  --good: #6fdc8c } }
* { box-sizing: border-box }
body { font: 15px/1.55 system-ui, sans-serif; max-width: 1180px; margin: 0 auto; padding: 1.5rem;
  background: var(--paper); color: var(--ink) }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0 }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .8rem }
p { margin: .4rem 0; max-width: 75ch } .muted, figure p { color: var(--muted) }
figure p { font-size: .88rem; margin: 0 0 .5rem } a { color: var(--s0) }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr));
  gap: 1rem; align-items: start }
figure, .card { margin: 0; padding: 1rem 1.1rem; background: var(--card); min-width: 0;
  border: 1px solid var(--rule); border-radius: 10px }
figcaption { font-weight: 650; margin-bottom: .15rem }
svg { width: 100%; height: auto; font-size: 15px; display: block } .wide svg { font-size: 13px;
  min-width: 760px } figure.wide { overflow-x: auto }
svg text { fill: var(--ink) }
svg text.muted, svg .grid + text { fill: var(--muted) }
.grid { stroke: var(--rule) } .axis { stroke: var(--muted) }
.s0 { fill: var(--s0) } .s1 { fill: var(--s1) } .s2 { fill: var(--s2) }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round }
.l0 { stroke: var(--s0) } .l1 { stroke: var(--s1) } .l2 { stroke: var(--s2) }
line.mark { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 4 3 }
.band { fill: var(--bad); opacity: .16 }
svg text.mark { fill: var(--bad); font-weight: 600 }
.box { fill: var(--paper); stroke: var(--rule) } .wide { grid-column: 1 / -1 }
.arrow { stroke: var(--muted); stroke-width: 1.5; fill: none } .tip { fill: var(--muted) }
svg text.aside { fill: var(--s1) } svg text.big { font-size: 19px; font-weight: 650 }
details { margin-top: .6rem } summary { cursor: pointer; color: var(--muted); font-size: .88rem }
.scrolls { overflow: auto; max-height: 22rem } .scrolls.all { max-height: none }
table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums }
td, th { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--rule) }
th { font-weight: 500 } thead th { color: var(--muted) } th:first-child { text-align: left }
.good { color: var(--good) } .bad { color: var(--bad) }
.verdict { font-size: 1.15rem; font-weight: 650 }
@media (max-width: 600px) { body { padding: .8rem } figure, .card { padding: .8rem }
  table { font-size: .78rem } td, th { padding: .25rem .2rem } }
@media print { details { display: block } }"""


def page(title: str, *parts: str) -> str:
    """The whole document; `parts` are HTML."""
    name, body = escape(title), "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{name}</title><style>{_STYLE}</style></head>\n"
        f"<body><main><h1>{name}</h1>\n{body}\n</main></body></html>\n"
    )


def section(title: str, *figures: str) -> str:
    """A heading, and figures beside each other where there is room."""
    return f'<section><h2>{escape(title)}</h2><div class="cards">{"".join(figures)}</div></section>'


def sentence(text: str, kind: str = "") -> str:
    """A paragraph; `kind` is good, bad, muted or verdict, or several of them."""
    return f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"
