"""Charts: text is shown as text and never as markup, and every number stands in a table too."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from marketplace.charts import Band, Step, bars, columns, flow, lines
from marketplace.page import page, section, sentence

EVIL = '<script>alert("1")</script>&'
POINTS = [("Monday", 1.0), (EVIL, 2_500.0), ("Wednesday", 0.0)]

DRAWN = {
    "lines": lines(EVIL, {EVIL: POINTS, "other": POINTS}, bands=[Band(0.5, 1.0, EVIL)], x=EVIL),
    "columns": columns(EVIL, POINTS, x=EVIL, note=EVIL),
    "bars": bars(EVIL, POINTS, unit=EVIL, note=EVIL),
    "flow": flow(EVIL, [Step(EVIL, 5, joined=(EVIL,), left=(EVIL,)), Step("end", 4)], note=EVIL),
}


def tree(html: str) -> ElementTree.Element:
    """What is drawn is well-formed, so that it can be read as XML."""
    return ElementTree.fromstring(html)


@pytest.mark.parametrize("kind", DRAWN)
def test_text_is_never_markup(kind: str) -> None:
    found = tree(DRAWN[kind])
    assert found.find(".//script") is None
    assert any(EVIL in (text.text or "") for text in found.iter())


@pytest.mark.parametrize("kind", DRAWN)
def test_a_chart_has_a_name_and_its_numbers_as_a_table(kind: str) -> None:
    found = tree(DRAWN[kind])
    picture = found.find("svg")
    assert picture is not None
    assert (picture.get("role"), picture.get("aria-label")) == ("img", EVIL)
    rows = found.findall(".//tbody/tr")
    assert len(rows) >= 2
    assert found.find("details/summary") is not None


def test_nothing_to_draw_is_said() -> None:
    for draw in (lines, columns, bars):
        assert "no rows yet" in draw("Orders", [])


def test_the_highest_point_is_within_the_picture_and_the_lowest_on_the_axis() -> None:
    found = tree(columns("Orders", [("a", 7.0), ("b", 0.0)]))
    tall, flat = (float(bar.get("height", "nan")) for bar in found.findall("svg/rect"))
    assert 0 == flat < tall < 280


def test_the_label_of_a_band_is_above_the_plot_where_no_line_crosses_it() -> None:
    drawn = lines("Orders", [("a", 9.0), ("b", 10.0)], bands=[Band(0.2, 0.4, "killed")])
    picture = tree(drawn).find("svg")
    assert picture is not None
    [label] = [text for text in picture.findall("text") if text.text == "killed"]
    [line] = picture.findall("polyline")
    top = min(float(point.split(",")[1]) for point in line.get("points", "").split())
    assert float(label.get("y", "nan")) < top
    [band] = [rect for rect in picture.findall("rect") if rect.get("class") == "band"]
    assert float(band.get("width", "0")) > 2


def test_the_boxes_of_a_flow_are_within_the_picture() -> None:
    picture = tree(flow("Flow", [Step("a", 1), Step("b", 2), Step("c", 3)])).find("svg")
    assert picture is not None
    width = float(picture.get("viewBox", "").split()[2])
    for box in picture.findall("rect"):
        left = float(box.get("x", "nan"))
        assert left > 1
        assert left + float(box.get("width", "nan")) < width - 1


def test_a_page_is_whole_and_fetches_nothing() -> None:
    made = page(EVIL, sentence(EVIL, "bad"), section(EVIL, DRAWN["bars"]))
    assert made.startswith("<!doctype html>")
    assert "<script" not in made
    assert "http" not in made
