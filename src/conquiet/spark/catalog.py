"""Read the events of a catalog as typed columns, from the log or from an outbox.

events(spark, CATALOG, "order_created", url="redis://…", streams="events:*").select("data.*")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import inspect

from conquiet.errors import ConfigError
from conquiet.events.catalog import Catalog
from conquiet.spark.payload import JSON_COMMENT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ENVELOPE = (
    "version INT, eventId STRING, occurredAt TIMESTAMP,"
    " actor STRUCT<type: STRING, id: STRING, storeId: STRING>, data {}"
)
_JSON = f"STRING COMMENT '{JSON_COMMENT}'"
_PLAIN: dict[type, str] = {
    inspect.IntType: "BIGINT",
    inspect.FloatType: "DOUBLE",
    inspect.BoolType: "BOOLEAN",
    inspect.StrType: "STRING",
    inspect.UUIDType: "STRING",
    inspect.BytesType: "BINARY",
    inspect.DateType: "DATE",
    inspect.DateTimeType: "TIMESTAMP",
    inspect.DecimalType: "DECIMAL(38,9)",
    inspect.AnyType: _JSON,
    inspect.RawType: _JSON,
}


def events(
    spark: SparkSession,
    catalog: Catalog,
    event_type: str,
    *,
    version: int | None = None,
    streaming: bool = False,
    format: str = "conquiet",
    **options: object,
) -> DataFrame:
    """Return the events of one `event_type` and `version` (default: the newest).

    `data` is the declared struct. With `streaming` the frame is a stream, else what there is now.

    Beside the columns of the log there are `version`, `occurred_at` and `actor` of the envelope.
    What does not fit is a row with `_malformed` and `_raw`. `options` are those of the format,
    which may be `conquiet-outbox`.
    """
    version = version or max(catalog.versions(event_type), default=0)
    found = catalog.declaration(event_type, version)
    if found is None:
        known = ", ".join(map(str, catalog.versions(event_type))) or "none"
        raise ConfigError(
            f"the catalog has no {event_type!r:.60} version {version}; its versions: {known}"
        )
    schema = _ENVELOPE.format(ddl(found.data))
    given = {name: str(value) for name, value in options.items()}
    reader = spark.readStream if streaming else spark.read
    frame = reader.format(format).options(**given, schema=schema, types=event_type).load()
    before = [name for name in frame.columns if name not in ("data", "_malformed", "_raw")]
    return frame.where(f"data.version = {version} OR _malformed IS NOT NULL").selectExpr(
        *before,
        "data.version AS version",
        "data.occurredAt AS occurred_at",
        "data.actor AS actor",
        "data.data AS data",
        "_malformed",
        "_raw",
    )


def ddl(type: Any) -> str:
    """Return the type of Spark for what msgspec reads and writes as JSON.

    >>> import msgspec
    >>> class Line(msgspec.Struct):
    ...     sku: str
    ...     quantity: int | None = None
    >>> ddl(list[Line])
    'ARRAY<STRUCT<`sku`: STRING, `quantity`: BIGINT>>'
    """
    return _ddl(inspect.type_info(type))


def _ddl(info: inspect.Type) -> str:
    if isinstance(info, inspect.Metadata):
        return _ddl(info.type)
    if isinstance(info, (inspect.StructType, inspect.DataclassType, inspect.TypedDictType)):
        fields = [f"`{field.encode_name}`: {_ddl(field.type)}" for field in info.fields]
        return f"STRUCT<{', '.join(fields)}>"
    if isinstance(info, (inspect.ListType, inspect.SetType, inspect.VarTupleType)):
        return f"ARRAY<{_element(info.item_type)}>"
    if isinstance(info, inspect.DictType):
        value = _ddl(info.value_type)
        # Of a map's values no comment can say that they are JSON, so all of it is.
        return _JSON if value == _JSON else f"MAP<STRING, {value}>"
    if isinstance(info, (inspect.LiteralType, inspect.EnumType)):
        values = info.values if isinstance(info, inspect.LiteralType) else _values(info)
        return "STRING" if all(isinstance(value, str) for value in values) else "BIGINT"
    if isinstance(info, inspect.UnionType):
        left = [item for item in info.types if not isinstance(item, inspect.NoneType)]
        return _ddl(left[0]) if len(left) == 1 else _JSON
    return _PLAIN.get(type(info), _JSON)


def _element(info: inspect.Type) -> str:
    element = _ddl(info)
    if element == _JSON:
        raise ConfigError("a list of values of any type has no type in Spark; declare one")
    return element


def _values(info: inspect.EnumType) -> list[Any]:
    return [member.value for member in info.cls]
