"""Measured results as JSON lines, loaded by pandas.

Every line names its kind in the field `schema`. The JSON schema `assets/records.schema.json` defines the fields of each
kind; docs/RECORDS.md shows the schema as tables. Every line of kind speed includes the exactness of the rows.

The shipped records are part of the package, so lessons find them from any folder. BASS_RECORDS names another folder.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO

import pandas as pd

from bass_core import checks
from bass_lab.locks import lock
from bass_lab.sweep import store

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "bass_lab" / "assets" / "records"
SCHEMA = ROOT / "bass_lab" / "assets" / "records.schema.json"
KIND = "schema"  # field with the kind of a line
TYPES = {
    **{"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)},
    **{"array": (list,), "object": (dict,), "null": (type(None),)},
}
PEERS = ("transformers", "assisted")  # methods of transformers
TIMED = ("speed", "gpu_speed")  # kinds with decode times
# Fields of a timed kernel. They are null if a reason is given instead.
KERNEL_TIMES = {
    "kernel": ("us", "gb_per_s", "percent_of_copy", "captured", "calls", "replays"),
    "product": ("us", "percent_of_copy", "captured"),
}
# A read-only kernel may exceed the copy bandwidth by some percent. A larger excess means that the data were cached.
MOST_PERCENT_OF_COPY = 125.0


def folder() -> Path:
    """Return the folder of the records: BASS_RECORDS if set, else the package's."""
    return Path(os.environ.get("BASS_RECORDS") or SHIPPED)


def shipped(name: str) -> Path:
    """Return a file or folder of the records. Raises FileNotFoundError if there is no such name."""
    path = folder() / name
    if not path.exists():
        held = ", ".join(sorted(each.name for each in folder().glob("*"))) or "nothing"
        where = "that BASS_RECORDS names" if os.environ.get("BASS_RECORDS") else "of the package"
        raise FileNotFoundError(f"there is no {name} in {folder()}, the folder {where}; it holds {held}")
    return path


@cache
def kinds() -> dict[str, dict]:
    """Return the schema of each kind, with references resolved."""
    document = json.loads(SCHEMA.read_text(encoding="utf-8"))

    def resolved(part: dict) -> dict:
        return document["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part

    found = [resolved(part) for part in document["oneOf"]]
    return {
        kind["title"]: kind | {"properties": {name: resolved(part) for name, part in kind["properties"].items()}}
        for kind in found
    }


@cache
def metrics(*of: str) -> dict[str, dict]:
    """Return the metrics of these kinds (none given: all kinds), in order. Each is the schema of a field with a `unit`.
    `better` is "higher" or "lower", and is missing if the metric is no goal."""
    fields = [field for kind in of or kinds() for field in kinds()[kind]["properties"].items()]
    fields += [inner for _, part in fields for inner in part.get("properties", {}).items()]
    return {name: part for name, part in fields if "unit" in part}


def check(line: dict, *expected: str) -> None:
    """Raise ValueError for a line with a missing, wrong or contradictory field, and name the field.

    expected: permitted kinds (none given: any kind).
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
    if kind in TIMED:
        _check_times(line)
    if kind == "speed":
        _check_exactness(line["exactness"], ours=line["method"] not in PEERS)
    if kind in KERNEL_TIMES:
        _check_kernel(line, KERNEL_TIMES[kind])


def _types(part: dict) -> tuple[type, ...]:
    named = part.get("type", "string")  # only the constant name of the kind has no type
    return sum((TYPES[name] for name in ([named] if isinstance(named, str) else named)), ())


def _check_times(line: dict) -> None:
    if len(line["seconds"]) != line["repeats"] or not all(_positive(s) for s in line["seconds"]):
        raise ValueError(
            f"seconds must be {line['repeats']} positive numbers (one per repeat), got {line['seconds']!r}"
        )
    if line["first_ms"] is not None and not line["first_ms"] <= line["mean_ms"] <= line["last_ms"]:
        raise ValueError(
            f"first_ms ≤ mean_ms ≤ last_ms does not hold: {[line[n] for n in ('first_ms', 'mean_ms', 'last_ms')]}"
        )
    for name in ("alpha", "acceptance_rate"):
        if line.get(name) is not None and not 0 <= line[name] <= 1:
            raise ValueError(f"{name} must be in [0, 1] or null, got {line[name]!r}")
    ratio = line["over_regular"]
    if not all(_positive(ratio.get(name)) for name in ("low", "median", "high")):
        raise ValueError(f"over_regular must hold positive low, median and high, got {ratio!r}")
    if not ratio["low"] <= ratio["median"] <= ratio["high"]:
        raise ValueError(f"over_regular: low ≤ median ≤ high does not hold: {ratio!r}")


def _check_exactness(exactness: dict, ours: bool) -> None:
    rows, identical = exactness.get("rows"), exactness.get("identical")
    if not isinstance(rows, int) or not isinstance(identical, int) or not 0 <= identical <= rows or rows < 1:
        raise ValueError(f"exactness must hold integers 0 <= identical <= rows and rows >= 1, got {exactness!r}")
    if ours and exactness.get("dtype") == "float32" and identical != rows:
        raise ValueError(f"in float32 every row must be identical, got {identical} of {rows}; find the cause first")


def _check_kernel(line: dict, times: Sequence[str]) -> None:
    reason, us, plan = line["reason"], line["us"], line.get("us_plan_share")
    if reason is not None:
        if not reason or plan is not None or any(line[name] is not None for name in times):
            raise ValueError(f"a line holds either a time or a reason; got us {us!r} and reason {reason!r}")
        return
    for name in ("error", *times):
        if line[name] is None:
            raise ValueError(f"without a reason, {name} must be given")
    if us <= 0 or us < (plan or 0):
        raise ValueError(f"us must be positive and at least us_plan_share ({plan!r}), got {us!r}")
    rate = line["gb"] / us * 1e6
    if not math.isclose(line.get("gb_per_s", rate), rate, rel_tol=1e-6):
        raise ValueError(f"gb_per_s is not gb / us: {line['gb_per_s']!r}")
    if not math.isclose(line["percent_of_copy"], 100 * rate / line["copy_gb_per_s"], rel_tol=1e-6):
        raise ValueError(f"percent_of_copy is not gb_per_s / copy_gb_per_s: {line['percent_of_copy']!r}")
    if line["percent_of_copy"] > MOST_PERCENT_OF_COPY:
        raise ValueError(f"{line['percent_of_copy']:.0f}% of the copy bandwidth: the data were in a cache")


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def append(path: Path, lines: list[dict], check: Callable[[dict], None] = check) -> None:
    """Append checked lines to a file of JSON lines, which is created if missing. After an error, no line is added.

    Other processes may append at the same time; the lines of each call stay together. Raises ValueError for a wrong
    line, and for a file with other content, which stays unchanged.
    """
    for line in lines:
        check(line)
    data = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _for_more(path) as file:
        end = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(end)
            raise


def mend(path: Path) -> None:
    """Remove an incomplete last line, left by a killed writer. A complete last line gets a missing line break. Raises
    ValueError for a file with other content, which stays unchanged."""
    with _for_more(path):
        pass


def mended(path: Path) -> list[dict]:
    """Mend a file and return the checked lines, or none if there is no file. Raises as `mend` and `read`."""
    if not path.exists():
        return []
    mend(path)
    return read(path)


def earlier(path: Path, here: dict) -> list[dict]:
    """Return the lines of earlier runs in a file that have the fields of `here`, such as device and commit. Empty if
    there is no file, or if the current commit is unknown. An incomplete last line is removed as by `mend`."""
    if not path.exists() or here.get("commit") == "":
        return []
    mend(path)
    with path.open(encoding="utf-8") as file:
        return [line for line in map(json.loads, file) if here.items() <= line.items()]


@contextmanager
def _for_more(path: Path) -> Iterator[BinaryIO]:
    """Yield the file, locked, positioned after complete lines. Raises ValueError unless the first line is a JSON object
    and an incomplete last line begins like an object."""
    with path.open("a+b", buffering=0) as file:
        lock(file.fileno())
        file.seek(0)
        found = file.read()
        end = found.rfind(b"\n") + 1
        first, half = found[:end].partition(b"\n")[0], found[end:]
        if not half[:2] == b'{"'[: len(half)] or (end and not _is_object(first)):
            raise ValueError(f"{path} does not hold records and was not changed; give another file")
        if half:
            try:
                json.loads(found[end:])
                file.write(b"\n")
            except ValueError:
                file.truncate(end)
        yield file


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def read(path: Path, check: Callable[[dict], None] = check) -> list[dict]:
    """Return the checked lines of a file. Raises ValueError naming the file, the line and the fault."""
    lines = []
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            try:
                line = json.loads(data.decode("utf-8"))
                check(line)
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            lines.append(line)
    if not lines:
        raise ValueError(f"{path} holds no record")
    return lines


def frame(lines: Sequence[dict]) -> pd.DataFrame:
    """Return lines of kind speed as a table. The field over_regular becomes the columns over_regular (the median), low
    and high; exactness, if present, becomes identical and rows."""
    flat = []
    for line in lines:
        ratio, exactness = line["over_regular"], line.get("exactness", {})
        spread = {"over_regular": ratio["median"], "low": ratio["low"], "high": ratio["high"]}
        flat.append(line | spread | {name: exactness[name] for name in ("identical", "rows") if name in exactness})
    return pd.DataFrame(flat).drop(columns="exactness", errors="ignore")


def with_means(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return a table of timed lines with the column over_regular_mean: the mean latency of regular decoding ÷ the
    line's. (over_regular compares throughput, until the last row ends.) by: columns that lines to compare share."""
    regular = table[table.method == "regular"].drop_duplicates(by)[[*by, "mean_ms"]]
    return table.assign(over_regular_mean=(table[by].merge(regular, "left", by).mean_ms.to_numpy() / table.mean_ms))


def load_records(path: str | Path | None = None) -> pd.DataFrame:
    """Load the records of a file of JSON lines, of a sweep's folder, of a folder of notebooks that papermill executed,
    or of a folder of all of these, as a table.

    path: None loads all records in `folder`. The column `source` is the file, relative to path. A file reached twice
    through links counts once. Lines with a kind of docs/RECORDS.md are checked; lines of kind speed are flattened as by
    `frame`; samples of `bass eval` give a line per row, with the settings as columns. Lines without a kind stay as they
    are. A sweep gives the records of finished runs: `run` is the key, and each parameter is a column, None as "auto"
    and lists as text. A record field that has the name of a parameter and another value becomes NAME_recorded. An
    executed notebook gives these columns for its `output`, unless several notebooks share the file.

    Raises FileNotFoundError; ValueError if there are no records; ValueError with file and line for a wrong line.
    """
    path = folder() if path is None else Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    tables = [
        table.assign(source=file.name if file == path else os.path.relpath(file, path))
        for file, table in _tables(path, set())
    ]
    if not tables:
        raise ValueError(f"{path} holds no records; with papermill, lessons record to -p output FILE.jsonl")
    return pd.concat(tables, ignore_index=True)


def _tables(path: Path, seen: set[Path]) -> Iterator[tuple[Path, pd.DataFrame]]:
    """Yield the files under a path and their lines. seen: real paths of files and folders already read."""
    if path.resolve() in seen:
        return
    seen.add(path.resolve())
    if path.is_file():
        yield path, _table(path)
    else:
        sweep = (path / store.SWEEP).exists()
        results = [*store.finished_runs(path)] if sweep else store.executed(path)
        versions = {(result.mark.get("code"), result.mark.get("cells")) for result in results}
        if len(versions) > 1:
            warnings.warn(
                f"{path} has runs of {len(versions)} versions of the notebook and the code; the column `code` holds "
                "the version. To repeat outdated runs, start the sweep's command again with all values",
                stacklevel=4,
            )
        for result in results:
            told = {} if len(versions) == 1 else {"code": f"{result.mark.get('code')} {result.mark.get('cells', '')}"}
            for file in result.files:
                for own, table in _tables(file, seen):
                    yield own, _with_parameters(table, result).assign(**told)
        for child in () if sweep else sorted(path.iterdir()):
            if child.suffix == ".jsonl" or child.is_dir():
                yield from _tables(child, seen)


def _table(path: Path) -> pd.DataFrame:
    with path.open("rb") as file:
        samples = file.readline().startswith(b'{"evaluation": ')
    if samples:
        from bass_lab import evaluation

        run = evaluation.load(path)
        fixed = {name: value for name, value in (run.environment | run.settings).items() if not isinstance(value, list)}
        return run.samples.assign(**{name: value for name, value in fixed.items() if name not in run.samples})
    lines = read(path, _check_if_known)
    return frame(lines) if all("over_regular" in line for line in lines) else pd.DataFrame(lines)


def _check_if_known(line: dict) -> None:
    """Check a line unless its kind is missing: users' own notebooks may record any fields."""
    if isinstance(line, dict) and KIND not in line:
        return
    check(line)


def _with_parameters(table: pd.DataFrame, result: store.Run) -> pd.DataFrame:
    columns = {"run": result.key}
    for name, value in result.parameters.items():
        columns[name] = store.in_table(value)
    same = [name for name in columns if name in table and (table[name] == columns[name]).all()]
    differ = {name: f"{name}_recorded" for name in columns if name in table and name not in same}
    left = pd.DataFrame({name: [value] * len(table) for name, value in columns.items()})
    return left.join(table.drop(columns=same).rename(columns=differ).reset_index(drop=True))


def text_table(heading: str, rows: Sequence[dict[str, str]]) -> str:
    """Return rows as a printable table under a heading."""
    return f"{heading}\n{pd.DataFrame(rows).to_string(index=False)}\n"


def text(value: float | None, form: str) -> str:
    """Return a formatted number, or an empty string for None."""
    return "" if value is None else format(value, form)


def device_file(kind: str, device: str) -> Path:
    """Return the file of a GPU's records of a kind: <kind>_<device>.jsonl in `folder`."""
    slug = re.sub(r"[^a-z0-9]+", "_", device.lower().replace("nvidia", "")).strip("_")
    return folder() / f"{kind}_{slug}.jsonl"
