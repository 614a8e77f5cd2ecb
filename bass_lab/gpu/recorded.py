"""Records of GPUs (from `make gpu`, in bass_lab/assets/records), for lessons on machines without a GPU.

recorded = gpu_record("costs")
print(recorded or NONE)
if recorded:
    recorded.content  # a CostModel
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from bass_core import checks
from bass_core.policies.costs import CostModel
from bass_lab.gpu import decoding
from bass_lab.measure import records
from bass_lab.measure.plan import DRY
from bass_lab.measure.profiling import Profile

NONE = "There is no GPU record of this kind yet. Run `make gpu` on a machine with a GPU."
KERNEL_CASE = ("kernel", "model", "batch", "query_length", "kv_length", "distribution", "dtype")
WAY = ("shape", "batch", "way")


@dataclass(frozen=True)
class GpuRecord:
    """A record with its origin. content: as returned by the reader of its kind (`READERS`).

    synthetic: weights or acceptance are synthetic. failed: number of cases with a reason instead of a time.
    """

    content: CostModel | Profile | pd.DataFrame
    device: str
    dtype: str = ""
    torch: str = ""
    commit: str = ""
    synthetic: bool = False
    failed: int = 0
    on_gpu: bool = field(default=True, repr=False)

    @property
    def name(self) -> str:
        """Return a short name for a legend."""
        return f"{self.device.removeprefix('NVIDIA ')} (recorded)"

    def __str__(self) -> str:
        """Return the origin in one line."""
        parts = [self.dtype, f"torch {self.torch}", self.commit and f"commit {self.commit}"]
        parts += ["synthetic weights or acceptance"] * self.synthetic
        parts += [f"{self.failed} cases have a reason instead of a time"] * (self.failed > 0)
        return f"Recorded on {self.device}: {', '.join(filter(None, parts))}"


def gpu_record(kind: str, folder: str | Path | None = None) -> GpuRecord | None:
    """Return the GPU record of this kind (see `READERS`), the first by device name, or None if there is none.

    folder: default is the folder of the project's records. Rehearsals on a CPU do not count. Raises ValueError for an
    unknown kind and for a file of another kind.
    """
    checks.one_of("kind", kind, READERS)
    ending, _ = READERS[kind]
    place = records.folder() if folder is None else Path(folder)
    found = (read(kind, path) for path in sorted(place.glob(f"{kind}_*.{ending}")))
    return next((record for record in found if record.on_gpu), None)


def read(kind: str, path: str | Path) -> GpuRecord:
    """Return the record of this kind in a file, from any device."""
    _, reader = READERS[kind]
    return reader(Path(path))


def _costs(path: Path) -> GpuRecord:
    """Read a `CostModel` of the embedded pair."""
    cost = CostModel.load(path)
    return _of_one_place(cost, cost.measured | {"device": cost.device}, synthetic=cost.is_synthetic)


def _timeline(path: Path) -> GpuRecord:
    """Read a `Profile` of the embedded pair."""
    found = Profile.load(path)
    return _of_one_place(found, found.about)


def _of_one_place(content: CostModel | Profile, about: dict, synthetic: bool = False) -> GpuRecord:
    said = {name: str(about.get(name, "")) for name in ("device", "dtype", "torch", "commit")}
    return GpuRecord(content, **said, synthetic=synthetic, on_gpu=about.get("device_type") == "cuda")


def _kernels(path: Path) -> GpuRecord:
    """Read kernels and peers that were timed on a GPU, one line per case."""
    lines = _latest(_read(path, "kernel"), KERNEL_CASE)
    return _of_lines([line for line in lines if line["clock"] == "cuda"], pd.DataFrame)


def _ways(path: Path) -> GpuRecord:
    """Read decoding methods at real sizes, with transformers' generate (peers_*): one line per shape, batch and method.

    Fields are as in `gpu.decoding`, with `over_regular` flattened by `records.frame`, and over_regular_mean. exact: the
    embedded pair decoded exactly with these settings (None: not checked, as for transformers' generate).
    """
    peers = path.with_name(path.name.replace("gpu_", "peers_", 1))
    lines = [line for each in (path, peers) if each.exists() for line in _read(each, *decoding.KINDS)]
    lines = [line for line in _latest(lines, WAY) if line["shape"] != DRY.shape]

    def table(timed: Sequence[dict]) -> pd.DataFrame:
        found = records.frame(timed).assign(exact=[line["exactness"]["passed"] for line in timed])
        return records.with_means(found, ["shape", "batch"])

    return _of_lines(lines, table)


def _read(path: Path, *kinds: str) -> list[dict]:
    return records.read(path, lambda line: records.check(line, *kinds))


def _latest(lines: Iterable[dict], case: Sequence[str]) -> list[dict]:
    """Return the latest line of each case."""
    return list({tuple(line[name] for name in case): line for line in lines}.values())


def _of_lines(lines: Sequence[dict], table: Callable[[Sequence[dict]], pd.DataFrame]) -> GpuRecord:
    timed = [line for line in lines if not line.get("reason")]
    said = {
        name: ", ".join(dict.fromkeys(line[name] for line in timed if name in line))
        for name in ("device", "dtype", "torch", "commit")
    }
    return GpuRecord(
        table(timed) if timed else pd.DataFrame(),
        **said,
        synthetic=any(line.get("synthetic", False) for line in timed),
        failed=len(lines) - len(timed),
        on_gpu=len(timed) > 0,
    )


READERS: dict[str, tuple[str, Callable[[Path], GpuRecord]]] = {  # ending and reader of the files, by kind
    "costs": ("json", _costs),
    "timeline": ("json.gz", _timeline),
    "kernels": ("jsonl", _kernels),
    "gpu": ("jsonl", _ways),
}
