"""AsyncAPI of an app: what the document says, and which changes of it break other services."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from conquiet import App, Message
from conquiet.app.description import find_breaks
from conquiet.cli import main
from conquiet.errors import ConfigError


@dataclass
class Line:
    article: str
    pieces: int = 1


@dataclass
class PlaceOrder:
    id: str
    lines: list[Line] = field(default_factory=list)


class OrderPlaced(msgspec.Struct):
    id: str
    amount: int


class Paid(BaseModel):
    id: str
    method: Literal["card", "cash"] = "card"


class Shipped(TypedDict):
    id: str


def make(path: Path) -> App:
    app = App("shop", f"sqlite:///{path}/shop.db")

    @app.on
    def place_order(order: PlaceOrder, message: Message[Any]) -> OrderPlaced | None: ...

    @app.on(topic="eu/payments", type="payment.done")
    def on_paid(paid: Paid) -> list[Shipped]: ...

    @app.on(topic="eu/payments", name="archive")
    def archive_all(message: Message[Any]) -> None: ...

    return app


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    made = make(tmp_path)
    yield made
    made.engine.dispose()


def follow(document: Any, reference: str) -> Any:
    found = document
    for part in reference.removeprefix("#/").split("/"):
        found = found[part.replace("~1", "/").replace("~0", "~")]
    return found


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, one in value.items():
            if name == "$ref":
                yield one
            else:
                yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def test_the_document_has_the_form_of_asyncapi_3(app: App) -> None:
    document = app.describe("2.1.0")
    assert set(document) == {
        "asyncapi", "info", "defaultContentType", "channels", "operations", "components",
    }  # fmt: skip
    assert document["asyncapi"] == "3.0.0"
    assert document["info"] == {"title": "shop", "version": "2.1.0"}
    for reference in references(document):
        follow(document, reference)
    for operation in document["operations"].values():
        assert operation["action"] in ("send", "receive")
        channel = operation["channel"]["$ref"]
        for message in operation.get("messages", ()):
            assert message["$ref"].startswith(f"{channel}/messages/")
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    json.dumps(document)


def test_it_says_what_handlers_take_and_return(app: App) -> None:
    document = app.describe()
    operations = document["operations"]
    assert list(operations) == [
        "place_order", "on_paid", "archive", "send.order.placed", "send.shipped",
    ]  # fmt: skip
    assert document["channels"]["eu/payments"]["address"] == "eu/payments"
    paid = follow(document, operations["on_paid"]["messages"][0]["$ref"])
    message = follow(document, paid["$ref"])
    assert message["name"] == "payment.done"
    schema = follow(document, message["payload"]["$ref"])
    assert schema["required"] == ["id"]
    assert "messages" not in operations["archive"]  # it takes every type
    assert operations["send.order.placed"]["channel"] == {"$ref": "#/channels/shop"}
    order = document["components"]["schemas"]["PlaceOrder"]
    assert order["properties"]["lines"]["items"] == {"$ref": "#/components/schemas/Line"}


def test_two_classes_of_one_name_are_refused(app: App) -> None:
    other = make_dataclass("Line", [("text", str)], namespace={"__message_type__": "other.line"})

    @app.on
    def on_other(line: other) -> None: ...  # type: ignore[valid-type]

    with pytest.raises(ConfigError, match="two classes are named Line"):
        app.describe()


# --- what breaks ----------------------------------------------------------------------------


def breaks(
    tmp_path: Path,
    before: list[Any],
    after: list[Any],
    *,
    is_sent: bool,
) -> list[str]:
    """Compare two forms of one message, which an app sends or receives."""

    def document(fields: list[Any]) -> dict[str, Any]:
        app = App("shop", f"sqlite:///{tmp_path}/shop.db")
        kind = make_dataclass("Order", fields)

        def handle(data: Any) -> Any: ...

        handle.__annotations__ = (
            {"data": Line, "return": kind} if is_sent else {"data": kind, "return": None}
        )
        app.on(handle)
        made = app.describe()
        app.engine.dispose()
        return made

    start = f"order ({'sent to' if is_sent else 'received from'} shop): "
    lines = find_breaks(document(before), document(after))
    assert all(line.startswith(start) for line in lines)
    return [line.removeprefix(start) for line in lines]


OLD: list[Any] = [("id", str), ("amount", int)]

BREAKS: list[tuple[bool, list[Any], list[Any], str]] = [
    (False, OLD, [("id", str)], "field amount was removed"),
    (True, OLD, [("id", str)], "field amount was removed"),
    (False, OLD, [*OLD, ("at", str)], "field at is required now"),
    (False, [("n", float)], [("n", int)], "field n was number, and is integer"),
    (True, [("n", float)], [("n", int)], "field n was number, and is integer"),
    (True, [("n", int)], [("n", float)], "field n was integer, and may now be number"),
    (False, [("n", int | None)], [("n", int)], "field n may no longer be null"),
    (True, [("n", int)], [("n", int | None)], "field n may now be null"),
    (False, OLD, [("id", int), ("amount", int)], "field id was string, and is integer"),
    (True, OLD, [("id", str), ("amount", int, field(default=0))],
     "field amount may be missing now"),
    (False, [("k", Literal["a", "b"])], [("k", Literal["a"])], 'field k may no longer be "b"'),
    (True, [("k", Literal["a"])], [("k", Literal["a", "b"])],
     'field k may now be "b", which readers do not know'),
    (False, [("k", str)], [("k", Literal["a"])], 'field k takes only "a" now'),
    (False, [("ns", list[float])], [("ns", list[int])],
     "field ns[] was number, and is integer"),
    (False, [("m", dict[str, str])], [("m", dict[str, int])],
     "field m.* was string, and is integer"),
    (False, [("at", str)], [("at", datetime)], "field at format was none, and is date-time"),
    (True, [("at", list[datetime | None])], [("at", list[str | None])],
     "field at[] format was date-time, and is none"),
]  # fmt: skip


@pytest.mark.parametrize(("is_sent", "before", "after", "line"), BREAKS)
def test_a_change_that_breaks_is_named(
    tmp_path: Path, is_sent: bool, before: list[Any], after: list[Any], line: str
) -> None:
    assert breaks(tmp_path, before, after, is_sent=is_sent) == [line]


PASSES: list[tuple[bool, list[Any], list[Any]]] = [
    (False, OLD, OLD),
    (False, OLD, [*OLD, ("at", str, field(default=""))]),
    (True, OLD, [*OLD, ("at", str)]),
    (False, [("n", int)], [("n", float)]),
    (False, [("n", int)], [("n", int | None)]),
    (False, [("n", int)], [("n", int | str)]),
    (False, [("k", Literal["a"])], [("k", Literal["a", "b"])]),
    (False, [("k", Literal["a"])], [("k", str)]),
    (False, OLD, [("id", str), ("amount", int, field(default=0))]),
]


@pytest.mark.parametrize(("is_sent", "before", "after"), PASSES)
def test_a_compatible_change_passes(
    tmp_path: Path, is_sent: bool, before: list[Any], after: list[Any]
) -> None:
    assert breaks(tmp_path, before, after, is_sent=is_sent) == []


class Tree(msgspec.Struct):
    name: str
    children: list[Tree] = []


def test_classes_that_contain_themselves_and_nested_fields_are_compared(tmp_path: Path) -> None:
    assert breaks(tmp_path, [("root", Tree)], [("root", Tree)], is_sent=True) == []
    short = make_dataclass("Line", [("article", str)])
    [line] = breaks(tmp_path, [("line", Line)], [("line", short)], is_sent=False)
    assert line == "field line.pieces was removed"


def test_a_message_that_is_gone_and_a_renamed_handler_are_named(app: App, tmp_path: Path) -> None:
    old = app.describe()
    later = App("shop", f"sqlite:///{tmp_path}/later.db")

    @later.on
    def accept_order(order: PlaceOrder) -> OrderPlaced: ...

    lines = find_breaks(old, later.describe())
    later.engine.dispose()
    assert lines == [
        "place.order (received from shop): handler place_order is gone or renamed, and the inbox"
        " knows it by its name; keep it by name='place_order'",
        "payment.done (received from eu/payments): is no longer received",
        "shipped (sent to shop): is no longer sent",
    ]


# --- the command ----------------------------------------------------------------------------

SHOP = """
from dataclasses import dataclass
from conquiet import App

@dataclass
class PlaceOrder:
    id: str
    amount: int

app = App("shop", database="postgresql://localhost:1/none")

@app.on
def place_order(order: PlaceOrder) -> None: ...
"""


def test_the_command_prints_the_document_and_checks_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (("described", SHOP), ("redescribed", SHOP.replace("    amount: int\n", ""))):
        (tmp_path / f"{name}.py").write_text(text)
    assert main(["app", "describe", "described:app"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "shop.json").write_text(printed)
    assert json.loads(printed)["info"]["title"] == "shop"
    assert main(["app", "describe", "described:app", "--check", "shop.json"]) == 0
    assert capsys.readouterr().out == "nothing breaks services that know shop.json\n"
    assert main(["app", "describe", "redescribed:app", "--check", "shop.json"]) == 1
    expected = "place.order (received from shop): field amount was removed"
    assert capsys.readouterr().out == f"{expected}\n"
    assert main(["app", "describe", "redescribed:app", "--check", "shop.json", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"ok": False, "breaks": [expected]}
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "half.json").write_text('{"asyncapi": "3.0.0", "operations": {"place": {}}}')
    for file, words in (
        ("other.json", "is no AsyncAPI 3 document"),
        ("half.json", "its operations and messages are not"),
        ("none.json", "No such file"),
    ):
        assert main(["app", "describe", "described:app", "--check", file]) == 2
        assert words in capsys.readouterr().err
