"""Validation of a record's lines by the JSON schema, with a validator that is not ours."""

import json
from functools import cache

import jsonschema  # nbformat needs it, too

from bass_lab.measure import record_schema


@cache
def validator() -> jsonschema.Draft202012Validator:
    document = json.loads(record_schema.PATH.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


def kind_of(line: dict) -> str:
    """Return the kind of a line after JSON. Raise an error if the line does not follow the schema of its kind."""
    line = json.loads(json.dumps(line, allow_nan=False))
    validator().validate(line)
    record_schema.check(line)
    return line["schema"]
