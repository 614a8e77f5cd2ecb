"""Write the measured parts of docs/MODELS.md and the tested parts of docs/SUPPORT.md, each between two marks.

PYTHONPATH=.:kernels python tests/support/models_page.py      measures all outcomes (about three minutes)
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "MODELS.md"
SUPPORT = PAGE.with_name("SUPPORT.md")


def section(name: str, page: Path = PAGE) -> str:
    return _split(name, page)[1]


def put(name: str, text: str) -> None:
    before, _, after = _split(name, PAGE)
    PAGE.write_text(f"{before}\n\n{text}\n\n{after}")


def _split(name: str, page: Path) -> tuple[str, str, str]:
    page, first, last = page.read_text(), f"<!-- {name}: measured -->", f"<!-- end of {name} -->"
    before, rest = page.split(first)
    inside, after = rest.split(last)
    return before + first, inside, last + after


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *[(f"`{first}`", *rest) for first, *rest in rows]]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def rows(name: str, page: Path = PAGE) -> list[list[str]]:
    lines = [line for line in section(name, page).splitlines() if line.startswith("| `")]
    cells = ([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines)
    return [[first.strip("`"), *rest] for first, *rest in cells]


def main() -> None:
    import faults
    import kinds
    import reading_kinds
    import torch
    import transformers
    from tqdm import tqdm

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    found = [kinds.find(kind) for kind in tqdm(kinds.kinds(), "kinds")]
    put("kinds", f"{kinds.summary(found)}\n\n{table(kinds.COLUMNS, [kinds.cells(finding) for finding in found])}")
    print(kinds.summary(found))
    found = [reading_kinds.find(kind) for kind in tqdm(reading_kinds.kinds(), "encoder-decoder kinds")]
    put("reading kinds", reading_kinds.page(found))
    put("faults", table(faults.COLUMNS, [faults.found(fault) for fault in tqdm(faults.FAULTS, "faults")]))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
