"""Print the lines of Python by part, with the limits: `make lint`. Exits with 1 if a limit is exceeded."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = 400  # lines of a file outside the tests; a longer file has two concepts
FOLDER, MODEL = 1300, 3000  # lines of a folder of the core; `model/` is larger
BESIDE = ("gpu", "hf.py", "loading/quantization.py", "model/architectures.py", "model/encoder_decoder.py")
GOALS = {"thin core": 5000, "core": 8000, "core files": 42, "tests": 27_000, "all": 64_000}
LIMITS = {
    "thin core": 9345,
    "core": 11_083,
    "core files": 49,
    "tests": 29_191,
    "all": 68_860,
}  # current values, to be lowered


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def counted() -> tuple[dict[str, int], list[str]]:
    files = {
        path.relative_to(ROOT).as_posix(): lines(path)
        for folder in ("bass_core", "bass_lab", "kernels", "tests", "docs")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    core = {name.removeprefix("bass_core/"): count for name, count in files.items() if name.startswith("bass_core/")}
    beside = sum(count for name, count in core.items() if name.startswith(BESIDE))
    found = {
        "thin core": sum(core.values()) - beside,
        "core": sum(core.values()),
        "core files": sum(not name.endswith("__init__.py") for name in core),
        "tests": sum(count for name, count in files.items() if name.startswith("tests/")),
        "all": sum(files.values()) + lines(ROOT / "setup.py"),
    }
    wrong = [
        f"{name} has {found[name]:,}, the limit is {limit:,}" for name, limit in LIMITS.items() if found[name] > limit
    ]
    for name, count in files.items():
        if count > FILE and not name.startswith("tests/"):
            wrong.append(f"{name} has {count} lines, the limit is {FILE}: it holds two concepts")
    folders: dict[str, int] = {}
    for name, count in core.items():
        if "/" in name:
            folders[name.split("/")[0]] = folders.get(name.split("/")[0], 0) + count
    for name, count in folders.items():
        if count > (limit := MODEL if name == "model" else FOLDER):
            wrong.append(f"bass_core/{name} has {count:,} lines, the limit is {limit:,}")
    return found | {f"bass_core/{name}": count for name, count in sorted(folders.items())}, wrong


if __name__ == "__main__":
    table, complaints = counted()
    for name, count in table.items():
        print(f"{name:22}{count:8,}{f'  limit {LIMITS[name]:,}, goal {GOALS[name]:,}' if name in LIMITS else ''}")
    if complaints:
        sys.exit("\n".join(complaints))
