"""Validation of a record's lines by the JSON schema, with a validator that is not ours."""

import json
from functools import cache

import jsonschema  # nbformat needs it, too

from bass_lab.measure import records


@cache
def validator() -> jsonschema.Draft202012Validator:
    document = json.loads(records.SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


def kind_of(line: dict) -> str:
    """Return the kind of a line after JSON. Raise an error for a line that breaks its schema or contradicts itself."""
    line = json.loads(json.dumps(line, allow_nan=False))
    validator().validate(line)
    records.check(line)
    return line["schema"]
