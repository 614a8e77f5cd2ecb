"""Print the tests that depend on files changed since a commit: `make test-changed BASE=origin/main`.

For a changed test file, all tests are selected. For a module: the tests that caught a mutant of the module, and the
shortest test files with an import of the module. For a lesson or a page: the test files with the file's name.
Run the selection between two edits; `make test` remains the check of a commit.
"""

import json
import subprocess
import sys
from pathlib import Path

from import_graph import ImportGraph

ROOT = Path(__file__).parents[2]
CAUGHT = ROOT / "tests/mutants/caught.json"
MOST = 4  # test files that import a changed module
LESSONS = "tests/lessons/test_notebooks.py"


def changed_files(base: str) -> list[str]:
    git = ["git", "-C", str(ROOT)]
    start = subprocess.run([*git, "merge-base", base, "HEAD"], capture_output=True, text=True)
    if start.returncode:
        sys.exit(f"no commit {base!r}; write for example make test-changed BASE=HEAD~1")
    difference = [*git, "diff", "--name-only", "-z", start.stdout.strip()]
    new = [*git, "ls-files", "-z", "--others", "--exclude-standard"]
    found = [subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in (difference, new)]
    return sorted(set("".join(found).split("\0")) - {""})


def reached(file: str, graph: ImportGraph, caught: dict[str, str | None]) -> list[str]:
    path = ROOT / file
    if path.suffix == ".py" and file.split("/")[0] in ("bass_core", "bass_lab", "kernels", "tests"):
        if path.stem.startswith("test_"):
            return [file] * path.exists()
        direct = [test for imports, test in graph.nearest(file) if imports == 1]
        catching = [test for name, test in caught.items() if name.startswith(f"{file.removesuffix('.py')}: ")]
        return [*dict.fromkeys(test for test in catching if test and is_there(test)), *direct[:MOST]]
    if path.suffix == ".ipynb":
        return [f"{LESSONS}::test_every_cell_runs[{path.stem}-smallest]"] * path.exists()
    return [test for test in graph.tests if path.name in (ROOT / test).read_text("utf-8")]


def is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    return (ROOT / file).exists() and f"def {name.split('[')[0]}(" in (ROOT / file).read_text("utf-8")


def main(base: str) -> None:
    graph = ImportGraph(ROOT, leave_out=("test_quantized",))
    caught = json.loads(CAUGHT.read_text("utf-8")) if CAUGHT.exists() else {}
    tests = dict.fromkeys(test for file in changed_files(base) for test in reached(file, graph, caught))
    whole = {test for test in tests if "::" not in test}
    chosen = [test for test in tests if test in whole or test.split("::")[0] not in whole]
    print(*(chosen or ["--collect-only", "-q", "tests/support"]))


if __name__ == "__main__":
    main(sys.argv[1])
