"""What happened at each step and to each token, as data frames.

`Trace.steps` has a line per (step, row), `Trace.tokens` (with trace="tokens") a line per token. Arrays are kept as they
come and turned into frames when asked for, so that recording costs a step next to nothing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bass_core.drafters import Context, Draft
from bass_core.environment import write_whole
from bass_core.loop.rows import Commit
from bass_core.options import LEVELS

STEP_COLUMNS = (
    "step", "row", "kind", "k", "drafted", "accepted", "emitted", "kv_length", "draft_ms", "verify_ms", "other_ms",
)  # fmt: skip
TOKEN_COLUMNS = ("row", "position", "step", "token", "kind", "p", "q")
PROBABILITIES = ("p", "q")  # of these columns


@dataclass(frozen=True)
class StepEvent:
    """One step: its number, and what it added. rows: row ids; new_tokens: the ids each of them emitted. Rows that ended
    by a deadline or by `cancel` are in none: their handles have a finish_reason.

    drafted, accepted: how many tokens each of them drafted, and had accepted; where a row ended, fewer may be emitted.
    """

    step: int
    rows: list[int]
    new_tokens: list[list[int]]
    drafted: list[int]
    accepted: list[int]


class Summary(TypedDict):
    """What `Trace.summary` tells. Figures are NaN where nothing was decoded, or drafted."""

    rows: int
    tokens: int
    steps: int  # decode steps of the batch, prefills excluded
    tokens_per_step: float  # emitted by a decode step of a row, mean: what stands in the text, up to its end
    k: float  # planned draft length, mean
    acceptance_rate: float  # accepted / drafted; this and alpha count what was verified behind a text's end, too
    alpha: float  # chance that a draft token is accepted if all before it in its step were
    prefill_s: float  # seconds
    draft_s: float
    verify_s: float
    other_s: float
    attention: NotRequired[str]  # paths of the target and the draft, and what a session knew besides
    draft_attention: NotRequired[str | None]
    compile: NotRequired[str]
    kernels: NotRequired[str]
    synthetic: NotRequired[bool]
    acceptance: NotRequired[str]
    verification: NotRequired[str]
    policy: NotRequired[str]


class Trace:
    """The record of one `generate` call or `Session`.

    meta: names of attention path, verification and policy. `steps`, `tokens`: DataFrames, see the columns' names and
    the class's properties.
    """

    def __init__(self, level: str = "steps", **meta):
        if level not in LEVELS:
            raise ValueError(f"trace must be one of {', '.join(LEVELS)}; got {level!r}")
        self.level = level
        self.meta = meta
        self._step_parts: list[dict] = []
        self._token_parts: list[dict] = []

    @property
    def synthetic(self) -> bool:
        """Whether models had dummy weights or accepted counts were drawn: then only the times mean something."""
        return bool(self.meta.get("synthetic", False))

    def record_step(self, **columns) -> None:
        """One step; arrays of one entry per row, scalars are repeated."""
        if self.level != "off":
            self._step_parts.append(columns)
            self.__dict__.pop("steps", None)

    def record_tokens(self, **columns) -> None:
        if self.level == "tokens":
            self._token_parts.append(columns)
            self.__dict__.pop("tokens", None)

    def record_commit(
        self,
        step: int,
        kind: str,
        planned: np.ndarray,
        context: Context,
        draft: Draft,
        p: Tensor | None,
        commit: Commit,
        times: Sequence[float],
    ) -> StepEvent:
        """Record what a step committed, and return it as an event. times: milliseconds of plan, draft, verify,
        commit."""
        ids = [request.row for request in commit.requests]
        before, drafting, verifying, after = times
        self.record_step(
            step=step,
            row=np.array(ids),
            kind=kind,
            k=planned,
            drafted=draft.lengths_host,
            accepted=commit.accepted,
            emitted=commit.emitted,
            kv_length=context.lengths_host,
            draft_ms=drafting,
            verify_ms=verifying,
            other_ms=before + after,
        )
        if self.level == "tokens":
            self.record_tokens(**token_columns(step, context.lengths_host, draft, p, commit))
        new = [tokens[:count].tolist() for tokens, count in zip(commit.new_tokens, commit.emitted, strict=True)]
        return StepEvent(step, ids, new, draft.lengths_host.tolist(), commit.accepted.tolist())

    def record_chunk(self, step: int, row: int, read: int, reading_ms: float, after_ms: float) -> None:
        """Record a step that read a chunk of a row's prompt, of which `read` tokens were read before."""
        counts = dict.fromkeys(("k", "drafted", "accepted", "emitted"), 0)
        times = {"draft_ms": 0.0, "verify_ms": reading_ms, "other_ms": after_ms}
        self.record_step(step=step, row=np.array([row]), kind="prefill", kv_length=read, **counts, **times)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One line per (step, row). `step` counts the session's steps, prefills included; `kind` is prefill or decode
        (a chunk of a long prompt is a prefill that emits nothing, of a row that waits for it); `k` the planned draft
        length; `drafted`, `accepted`: what the row submitted and had accepted; `emitted`: what was kept of
        accepted + 1 after EOS, stop string or limit; `kv_length` the row's tokens before it; times are the whole
        step's, the same on each of its rows."""
        return _frame(self._step_parts, STEP_COLUMNS)

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """One line per token: kind accepted, recovered (after a rejection), bonus (after full acceptance), regular
        (no draft), or rejected (a draft that was submitted and is not in the text; its position is where it would have
        stood). p and q: target's and draft's probability of it after processing (temperature 1 where all rows are
        greedy; of a greedy row beside sampled ones 1 or 0). q is NaN where nothing was drafted, and where what drafts
        has no probabilities; p is where the target's logits were none."""
        if self.level != "tokens":
            raise ValueError(f"tokens were not recorded: trace={self.level!r}; ask for trace='tokens'")
        return _frame(self._token_parts, TOKEN_COLUMNS)

    def summary(self) -> Summary:
        """The figures that people quote, over all rows and steps, and `meta`. Raises ValueError with trace="off"."""
        if self.level == "off":
            raise ValueError("steps were not recorded: trace='off'; ask for trace='steps'")
        steps = self.steps
        decode = steps[(steps.kind == "decode") & (steps.emitted > 0)]  # a row that failed emitted nothing
        once = steps.drop_duplicates("step")
        once_decode = once[once.kind == "decode"]
        accepted, drafted = int(decode.accepted.sum()), int(decode.drafted.sum())
        times = {name: float(once_decode[f"{name}_ms"].sum()) / 1e3 for name in ("draft", "verify", "other")}
        prefill = once[once.kind == "prefill"]
        return {
            **self.meta,
            "rows": int(steps.row.nunique()),
            "tokens": int(steps.emitted.sum()),
            "steps": len(once_decode),
            "tokens_per_step": float(decode.emitted.mean()) if len(decode) else float("nan"),
            "k": float(decode.k.mean()) if len(decode) else float("nan"),
            "acceptance_rate": accepted / drafted if drafted else float("nan"),
            "alpha": alpha(decode.drafted, decode.accepted),
            "prefill_s": float(prefill[["draft_ms", "verify_ms", "other_ms"]].to_numpy().sum()) / 1e3,
            **{f"{name}_s": seconds for name, seconds in times.items()},
        }

    def save(self, path: str | Path) -> None:
        """Write as JSON (gzipped where the name ends in .gz)."""
        document = {"level": self.level, "meta": self.meta, "steps": self.steps.to_dict("list")}
        if self.level == "tokens":
            tokens = self.tokens.to_dict("list")
            for name in PROBABILITIES:
                tokens[name] = [None if np.isnan(each) else each for each in tokens[name]]  # NaN is no JSON
            document["tokens"] = tokens
        text = json.dumps(document, allow_nan=False)
        write_whole(path, gzip.compress(text.encode()) if Path(path).suffix == ".gz" else text)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote."""
        data = Path(path).read_bytes()
        document = json.loads(gzip.decompress(data) if Path(path).suffix == ".gz" else data)
        trace = cls(document["level"], **document["meta"])
        trace._step_parts = [document["steps"]]
        if "tokens" in document:
            numbers = {name: np.array(document["tokens"][name], dtype=float) for name in PROBABILITIES}  # null is NaN
            trace._token_parts = [document["tokens"] | numbers]
        return trace


def alpha(drafted: np.ndarray, accepted: np.ndarray) -> float:
    """The chance that a draft is accepted if all before it in its step were, from counts per row and step.

    drafted, accepted: int arrays of one shape, such as columns of `Trace.steps`. NaN where nothing was drafted.
    """
    tried = int(accepted.sum() + (accepted < drafted).sum())
    return int(accepted.sum()) / tried if tried else float("nan")


def token_columns(step: int, lengths: np.ndarray, draft: Draft, p: Tensor, commit: Commit) -> dict[str, np.ndarray]:
    """A step's tokens as the columns of `Trace.tokens`: of each row first the emitted ones, then the rejected drafts.

    lengths: committed tokens before the step [B]; p: target probabilities [B, K + 1, V].
    """
    k, new = draft.tokens.shape[1], torch.from_numpy(commit.new_tokens).to(p.device)
    slots, is_new = np.r_[: k + 1, :k], np.r_[: 2 * k + 1] <= k  # [2K + 1]: what the step added, then what was drafted
    submitted, accepted = draft.lengths_host[:, None], commit.accepted[:, None]
    shown = np.where(is_new, slots < commit.emitted[:, None], (slots >= accepted) & (slots < submitted))
    last = np.where(submitted == 0, "regular", np.where(accepted < submitted, "recovered", "bonus"))
    q = np.full(shown.shape, np.nan)
    if draft.probs is not None:
        q[:, :k], q[:, k + 1 :] = _probability(draft.probs, new[:, :k]), _probability(draft.probs, draft.tokens)
    columns = {
        "row": np.array([request.row for request in commit.requests])[:, None],
        "position": lengths[:, None] + slots,
        "step": np.array(step),
        "token": np.concatenate([commit.new_tokens, draft.tokens.cpu().numpy()], axis=1),
        "kind": np.where(is_new, np.where(slots < accepted, "accepted", last), "rejected"),
        "p": np.concatenate([_probability(p, new), _probability(p[:, :k], draft.tokens)], axis=1),
        "q": np.where(slots < submitted, q, np.nan),
    }
    return {name: np.broadcast_to(column, shown.shape)[shown] for name, column in columns.items()}


def _probability(probs: Tensor, tokens: Tensor) -> np.ndarray:
    """probs [B, J, V] at tokens [B, J]."""
    return probs.gather(-1, tokens[..., None])[..., 0].double().cpu().numpy()


def _frame(parts: list[dict], columns: tuple[str, ...]) -> pd.DataFrame:
    """Stack parts whose columns are arrays of equal length (scalars repeat)."""
    if not parts:
        return pd.DataFrame({name: [] for name in columns})
    sizes = [max(np.size(value) for value in part.values()) for part in parts]
    stacked = {
        name: np.concatenate([np.broadcast_to(part[name], size) for part, size in zip(parts, sizes, strict=True)])
        for name in columns
    }
    return pd.DataFrame(stacked)
