"""Cost of a decode step: measured times of passes on a grid, with linear interpolation.

A step of B rows that draft k tokens each has three parts: a target pass over k + 1 tokens of every row, a draft phase,
and everything outside the models' passes (plan, sampling, verification, commit). A draft phase is a pass over two
tokens, then k - 1 passes over one. It is measured as a whole, because a processor's caches make each pass a little
faster than the previous one. `CostModel` holds these parts for a pair of models on a device. `calibration` measures
them, `costs_for` finds earlier measurements, and `predict` adds up the steps of a run.

Times are neither smoothed nor made monotone. GPUs round shapes up to tiles, so times grow in stairs. Policies need to
see the stairs, as far as the grid has points.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Protocol

import numpy as np

from bass_core import checks
from bass_core.environment import write_whole
from bass_core.policies.protocol import RowsView

SCHEMA = 2
FIELDS: checks.Kinds = {
    "schema": int,
    "device": str,
    "models": dict,
    "synthetic": bool,
    "measured": dict,  # environment of `records`, temperature, repeats
    "target_passes": dict,
    "draft_phases": (dict, type(None)),  # null: drafting takes no pass
    "overheads": dict,
}
MODEL_FIELDS: checks.Kinds = {"name": str, "fingerprint": str, "attention": (str, type(None))}
PASS_AXES = ("batch", "query_length", "kv_length")
PHASE_AXES = ("batch", "draft_length", "kv_length")
OVERHEAD_AXES = ("batch", "draft_length")
Number = float | np.ndarray


@dataclass(frozen=True, eq=False)
class Table:
    """Seconds on a grid. axes: increasing numbers of each dimension by name. seconds: one value per grid point.

    A call takes one number or array per axis. Values are linear between grid points in every dimension, and constant
    below the first point. Beyond the last point they are linear again, but never below the value at the grid's edge.
    """

    axes: dict[str, tuple[float, ...]]
    seconds: np.ndarray

    def __post_init__(self):
        object.__setattr__(self, "axes", {name: tuple(points) for name, points in self.axes.items()})
        object.__setattr__(self, "seconds", np.asarray(self.seconds, dtype=float))
        for name, points in self.axes.items():
            if not points or not np.isfinite(points).all() or not (np.diff(points) > 0).all():
                raise ValueError(f"the axis {name} must be increasing numbers, got {list(points)}")
        shape = tuple(map(len, self.axes.values()))
        if self.seconds.shape != shape:
            raise ValueError(f"{list(self.axes)} has {shape} points, but seconds has the shape {self.seconds.shape}")
        if not (np.isfinite(self.seconds) & (self.seconds >= 0)).all():
            raise ValueError("seconds must be finite and not negative")

    def __call__(self, *point: Number) -> Number:
        cells = [_cell(points, x) for points, x in zip(self.axes.values(), point, strict=True)]
        found = self._linear(cells)
        if any(weight > 1 if isinstance(weight, float) else np.any(weight > 1) for *_, weight in cells):
            edge = [(lower, upper, np.minimum(weight, 1)) for lower, upper, weight in cells]
            found = np.maximum(found, self._linear(edge))
        return found

    def _linear(self, cells: list[tuple[Number, Number, Number]]) -> Number:
        total = 0.0
        for corner in product((False, True), repeat=len(cells)):
            share, index = 1.0, []
            for (lower, upper, weight), is_upper in zip(cells, corner, strict=True):
                share = share * (weight if is_upper else 1 - weight)
                index.append(upper if is_upper else lower)
            total = total + share * self.seconds[tuple(index)]
        return total

    @classmethod
    def of(cls, axes: dict[str, Sequence[float]], seconds: Callable[..., float]) -> Table:
        """Return a table of seconds(*point) for every point of the grid."""
        shape = tuple(map(len, axes.values()))
        return cls(axes, np.array([seconds(*point) for point in product(*axes.values())]).reshape(shape))

    def to_dict(self) -> dict:
        """Return axes and seconds for JSON."""
        axes = {name: np.asarray(points).tolist() for name, points in self.axes.items()}
        return axes | {"seconds": self.seconds.tolist()}

    @classmethod
    def from_dict(cls, document: dict, axes: tuple[str, ...]) -> Table:
        """Return the table for a result of `to_dict`. Raises ValueError for anything else."""
        if missing := [name for name in (*axes, "seconds") if name not in document]:
            raise ValueError(f"a table lacks {', '.join(missing)}")
        try:
            seconds = np.array(document["seconds"], dtype=float)
            return cls({name: tuple(document[name]) for name in axes}, seconds)
        except TypeError as error:
            raise ValueError(f"a table contains a value that is no number: {error}") from error


def _cell(points: tuple[float, ...], x: Number) -> tuple[Number, Number, Number]:
    """Return the indices of the points around x (the last two beyond the grid), and the position of x between them."""
    if len(points) == 1:
        return np.zeros(np.shape(x), int), np.zeros(np.shape(x), int), np.zeros(np.shape(x))
    if isinstance(x, int | float):  # fast path for simulations of single steps
        x = max(x, points[0])
        lower = min(bisect.bisect_right(points, x) - 1, len(points) - 2)
    else:
        points, x = np.array(points), np.maximum(x, points[0])
        lower = np.minimum(points.searchsorted(x, side="right") - 1, len(points) - 2)
    return lower, lower + 1, (x - points[lower]) / (points[lower + 1] - points[lower])


class Cost(Protocol):
    """Seconds of a decode step's parts. Hashable. Arguments are numbers or arrays that broadcast (see `CostModel`)."""

    def target(self, batch, query_length, kv_length): ...

    def draft(self, batch, k, kv_length): ...

    def overhead(self, batch, k): ...

    def step(self, batch, k, kv_length): ...


@dataclass(frozen=True, eq=False)
class CostModel:
    """Seconds of a decode step's parts, for a pair of models on a device.

    models: under "target" and "draft", each model's name, fingerprint and attention path (None without a model).
    target_passes: over batch, query length and KV length. draft_phases: over batch, draft length and KV length; None if
    drafting takes no model pass. overheads: over batch and draft length.
    is_synthetic: computed instead of measured. measured: environment of the measurement.

    Arguments may be arrays that broadcast together. kv_length: cached positions of each row before the target pass, one
    less than the row's tokens. For rows of different lengths see `kv_of_rows`.
    """

    device: str
    models: dict[str, dict[str, str | None]]
    target_passes: Table
    draft_phases: Table | None
    overheads: Table
    is_synthetic: bool = False
    measured: dict = field(default_factory=dict)

    def target(self, batch: Number, query_length: Number, kv_length: Number) -> Number:
        """Return the seconds of a target pass over `query_length` tokens of each of `batch` rows."""
        return self.target_passes(batch, query_length, kv_length)

    def draft(self, batch: Number, k: Number, kv_length: Number) -> Number:
        """Return the seconds of the passes that draft k tokens per row: the first feeds two tokens, the others one.

        After steps without drafts, the first pass feeds more tokens. This cost is neglected.
        """
        if self.draft_phases is None:
            return np.zeros(np.broadcast(batch, k, kv_length).shape)[()]
        return np.where(np.greater(k, 0), self.draft_phases(batch, k, kv_length), 0.0)[()]

    def overhead(self, batch: Number, k: Number) -> Number:
        """Return the seconds of a step outside the models' passes: plan, sampling, verification, commit."""
        return self.overheads(batch, k)

    def step(self, batch: Number, k: Number, kv_length: Number) -> Number:
        """Return the seconds of a decode step that drafts k tokens for each row; k = 0 is regular decoding."""
        passes = self.target(batch, np.add(k, 1), kv_length) + self.draft(batch, k, kv_length)
        return passes + self.overhead(batch, k)

    @property
    def acceptance(self) -> Sequence[int] | None:
        """The numbers of accepted drafts and of steps that ended with a rejection, if the calibration decoded texts."""
        return self.measured.get("acceptance")

    @property
    def kv_of_rows(self) -> str:
        """KV length used for rows of different lengths: "max" if attention pads to the longest row, else "mean"."""
        return "max" if self.models["target"]["attention"] in ("pad", "eager") else "mean"

    @property
    def file_name(self) -> str:
        """The file name for `costs_for`: device and models."""
        return file_name(self.device, *(self.models[role]["fingerprint"] for role in ("target", "draft")))

    def save(self, path: str | Path) -> None:
        """Write the costs as JSON."""
        document = {"schema": SCHEMA, "device": self.device, "models": self.models, "synthetic": self.is_synthetic}
        document |= {"measured": self.measured, "target_passes": self.target_passes.to_dict()}
        document["draft_phases"] = None if self.draft_phases is None else self.draft_phases.to_dict()
        document["overheads"] = self.overheads.to_dict()
        write_whole(path, json.dumps(document, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read a file of `save`. Raises ValueError with the file name and the error."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            checks.check_fields(document, FIELDS, ())
            if document["schema"] != SCHEMA:
                raise ValueError(f"the file is not of schema {SCHEMA}")
            for role in ("target", "draft"):
                checks.check_fields(document["models"].get(role), MODEL_FIELDS, ())
            seen = document["measured"].get("acceptance")
            if seen is not None and not (
                isinstance(seen, list) and [type(each) for each in seen] == [int, int] and min(seen) >= 0 < max(seen)
            ):
                raise ValueError(f"acceptance must be the numbers of accepted and rejected drafts, got {seen!r}")
            draft = document["draft_phases"]
            tables = {
                "target_passes": Table.from_dict(document["target_passes"], PASS_AXES),
                "draft_phases": None if draft is None else Table.from_dict(draft, PHASE_AXES),
                "overheads": Table.from_dict(document["overheads"], OVERHEAD_AXES),
            }
        except ValueError as error:  # including JSON and Unicode errors
            raise ValueError(f"{path} holds no costs: {error}; measure the costs with `bass calibrate`") from error
        plain = {name: document[name] for name in ("device", "models", "measured")}
        return cls(**plain, **tables, is_synthetic=document["synthetic"])


def file_name(device: str, target: str, draft: str) -> str:
    """Return the file name of costs on this device for models of these fingerprints."""
    return f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}-{models_code(target, draft)}.json"


def models_code(target: str, draft: str) -> str:
    return hashlib.sha256(f"{target}\0{draft}".encode()).hexdigest()[:12]


# --- costs for policies ---------------------------------------------------------------------------

KV_STEP = 64  # KV lengths are rounded to multiples, so that few times are computed


def step_seconds(cost: Cost, limit: int, rows: RowsView) -> np.ndarray:
    """Return the seconds of a step of these rows with draft length 0, 1, … `limit`, float [limit + 1], read-only."""
    return _step_seconds(cost, limit, len(rows.ids), rounded_kv_length(cost, rows))


def rounded_kv_length(cost: Cost, rows: RowsView) -> int:
    """Return the longest or the mean KV length of these rows (see `kv_of_rows`), rounded to `KV_STEP`."""
    lengths = rows.lengths.tolist()
    by_longest = getattr(cost, "kv_of_rows", "mean") == "max"
    return KV_STEP * round((max(lengths) if by_longest else sum(lengths) / len(lengths)) / KV_STEP)


@functools.lru_cache(maxsize=1024)  # shared by all policies with the same costs
def _step_seconds(cost: Cost, limit: int, batch: int, kv_length: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(cost.step(batch, np.arange(limit + 1), kv_length), dtype=float), limit + 1)
