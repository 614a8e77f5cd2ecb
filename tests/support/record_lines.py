"""Validate the lines of a record with a third-party validator of the JSON schema."""

import json
from functools import cache

import jsonschema  # nbformat needs jsonschema, too

from bass_lab.measure import records


@cache
def validator() -> jsonschema.Draft202012Validator:
    document = json.loads(records.SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


def kind_of(line: dict) -> str:
    """Return the kind of a line from JSON. Raises an error for an invalid or contradictory line."""
    line = json.loads(json.dumps(line, allow_nan=False))
    validator().validate(line)
    records.check(line)
    return line["schema"]
