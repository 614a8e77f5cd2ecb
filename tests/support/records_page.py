"""Write docs/RECORDS.md, the fields of records, from `bass_lab/assets/records.schema.json`.

PYTHONPATH=.:kernels:tests/support python tests/support/records_page.py
"""

from pathlib import Path

from models_page import table

from bass_lab.measure import records

PAGE = Path(__file__).parents[2] / "docs" / "RECORDS.md"
COLUMNS = ("field", "type", "unit", "better", "meaning")
HEAD = """\
# Records

Measurements are stored as JSON lines. `bass bench --record FILE`, `bass load --record FILE`,
`bass eval --output FOLDER` and `make gpu` write records. Lessons 03, 06, 08 and 09 write records to their parameter
`output`, which `bass sweep` sets. `bass_lab.load_records(path)` checks every line and returns a table of a file, a
sweep's folder, a folder of notebooks executed by papermill, or a folder of all of these. Without a path, the function
reads the folder in `BASS_RECORDS`, or the built-in records in `bass_lab/assets/records`.

The field `schema` names the kind of a line. This page is generated from the JSON schema
[bass_lab/assets/records.schema.json](../bass_lab/assets/records.schema.json). A line may have further fields unless the
kind excludes further fields. null is a missing value. Notebooks may record lines without `schema`; `load_records` does
not check these lines. A field with a unit is a metric. The column *better* is empty for a metric that is no goal:
for example, more tokens per step are not always faster.
"""


def page() -> str:
    return "\n".join([HEAD, *map(_section, records.kinds())])


def _section(kind: str) -> str:
    schema = records.kinds()[kind]
    rows = [
        (name, _type(part), part.get("unit", ""), part.get("better", ""), _meaning(name, part, schema))
        for name, part in schema["properties"].items()
    ]
    only = "" if schema.get("additionalProperties", True) else " No further fields."
    return f"## {kind}\n\n{schema['description']}{only}\n\n{table(COLUMNS, rows)}\n"


def _type(part: dict) -> str:
    named = part.get("type", "string")
    return named if isinstance(named, str) else " or ".join(named)


def _meaning(name: str, part: dict, schema: dict) -> str:
    if "const" in part:
        return f'"{part["const"]}". {part["description"]}'
    return part["description"] if name in schema["required"] else f"Optional. {part['description']}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
