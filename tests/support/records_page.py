"""docs/RECORDS.md: what the lines of records hold, as tables of `bass_lab/assets/records.schema.json`.

PYTHONPATH=.:kernels:tests/support python tests/support/records_page.py      writes it
"""

from pathlib import Path

from models_page import table

from bass_lab.measure import records

PAGE = Path(__file__).parents[2] / "docs" / "RECORDS.md"
HEAD = """\
# Records

What is measured is kept as JSON lines. `bass bench --record FILE`, `bass load --record FILE`,
`bass eval --output FOLDER` and `make gpu` write some, and so do lessons 03, 06, 08 and 09 by their parameter `output`,
which `bass sweep` sets. `bass_lab.load_records(path)` reads a file, a sweep's folder or a folder of both as one table,
and checks every line. Without a path it reads the records that ship, which lie in `bass_lab/assets/records`;
`BASS_RECORDS` names another folder to look for records in.

Every line names its kind in the field `schema`. The kinds are those of the JSON schema
[bass_lab/assets/records.schema.json](../bass_lab/assets/records.schema.json), which any validator of JSON schemas
takes; this page is made from it. A line may have more fields than are listed, unless its kind says otherwise; null
stands for "there is none". A notebook of your own may record lines without a `schema`: they are read as they are.
"""


def page() -> str:
    """The whole text."""
    return "\n".join([HEAD, *map(_section, records.kinds())])


def _section(kind: str) -> str:
    schema = records.kinds()[kind]
    rows = [(name, _type(part), _meaning(name, part, schema)) for name, part in schema["properties"].items()]
    only = "" if schema.get("additionalProperties", True) else " There are no other fields."
    return f"## {kind}\n\n{schema['description']}{only}\n\n{table(('field', 'type', 'meaning'), rows)}\n"


def _type(part: dict) -> str:
    named = part.get("type", "string")
    return named if isinstance(named, str) else " or ".join(named)


def _meaning(name: str, part: dict, schema: dict) -> str:
    if "const" in part:
        return f'"{part["const"]}". {part["description"]}'
    return part["description"] if name in schema["required"] else f"Optional. {part['description']}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
