"""What the lines of records hold, by their kind: `assets/records.schema.json`, a JSON schema, is the one place for it.

Every line names its kind in the field `schema`. docs/RECORDS.md shows kinds and fields, with their units, as tables.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import NoneType

from bass_core import checks

PATH = Path(__file__).parents[1] / "assets" / "records.schema.json"
KIND = "schema"  # the field
TYPES = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (NoneType,),
}


@cache
def kinds() -> dict[str, dict]:
    """The schema of each kind, references to shared fields filled in."""
    document = json.loads(PATH.read_text(encoding="utf-8"))
    parts = document["$defs"]

    def resolved(part: dict) -> dict:
        return parts[part["$ref"].rpartition("/")[2]] if "$ref" in part else part

    found = [resolved(part) for part in document["oneOf"]]
    return {
        kind["title"]: kind | {"properties": {name: resolved(part) for name, part in kind["properties"].items()}}
        for kind in found
    }


def required(kind: str) -> list[str]:
    """The fields that every line of this kind has."""
    return kinds()[kind]["required"]


def check(line: dict, *expected: str) -> None:
    """Raises ValueError naming the field of a line that is missing or wrong by the schema of its kind.

    expected: the kinds that it may be of; any where none is named. Values that contradict each other are not found
    here, nor what lists and objects hold: `records.check` and the benchmarks look for that.
    """
    checks.check_fields(line, {KIND: str}, ())
    kind = checks.one_of(KIND, line[KIND], expected or tuple(kinds()))
    schema = kinds()[kind]
    fields = {name: part for name, part in schema["properties"].items() if name in line or name in schema["required"]}
    types = {name: _types(part) for name, part in fields.items()}
    checks.check_fields(line, types, [name for name, part in fields.items() if "exclusiveMinimum" in part])
    unknown = sorted(set(line) - set(schema["properties"]))
    if unknown and not schema.get("additionalProperties", True):
        raise ValueError(f"unknown fields: {', '.join(unknown)}")


def _types(part: dict) -> tuple[type, ...]:
    """The Python types of a field's values."""
    named = part.get("type", "string")  # a field without one is a constant: the kind's name
    return sum((TYPES[name] for name in ([named] if isinstance(named, str) else named)), ())
