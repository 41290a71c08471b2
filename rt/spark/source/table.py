"""The options of a table: `CREATE TABLE … USING rt OPTIONS (…)`. Pure, except for Spark's types.

Spark passes the properties of a table to a Python data source when the table is created, but not when it is
read. Spark only keeps the schema that the source returned. So the options are in the metadata of the first
column of that schema. They are paths and names; keys stay in their files.

Among the properties of a table, Spark marks the user's options by a prefix. Spark adds its own properties:
`provider`, `owner`, `location`, `external`, `comment`, and all of TBLPROPERTIES.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote

from pyspark.sql.types import ArrayType, DataType, StructType

from rt.spark.options import local_path
from rt.spark.source.columns import COLUMNS, HEADERS_KIND, default_columns

_PREFIX: Final = "option."
_METADATA: Final = "rt.options"
_TYPES: Final[dict[str, str | DataType]] = {
    "bigint": "long",
    HEADERS_KIND: ArrayType(StructType().add("key", "string").add("value", "binary")),
}
"""The types of a schema whose names differ from their names in SQL. Parsing SQL would need a session."""


def options_of_table(properties: Mapping[str, str]) -> dict[str, str] | None:
    """The user's options, if `properties` are the properties of a table that is created; otherwise None."""
    given = {name.lower(): value for name, value in properties.items()}
    if not {"provider", "owner"} <= given.keys():
        return None
    options = {name.removeprefix(_PREFIX): value for name, value in given.items() if name.startswith(_PREFIX)}
    location = given.get("location")
    if location is not None:
        options["path"] = local_path(unquote(location))
    return options


def table_schema(options: Mapping[str, str], *, include_headers: bool) -> StructType:
    """The columns of a table, and its options."""
    schema = StructType()
    for name in default_columns(include_headers=include_headers):
        kind = COLUMNS[name]
        schema.add(name, _TYPES.get(kind, kind))
    schema.fields[0].metadata = {_METADATA: dict(options)}
    return schema


def recorded_options(schema: StructType) -> dict[str, str]:
    """The options that `table_schema` has recorded; empty for another schema."""
    found = schema.fields[0].metadata.get(_METADATA) if schema.fields else None
    return dict(found) if isinstance(found, dict) else {}
