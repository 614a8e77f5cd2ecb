"""Record steps and tokens as data frames.

`Trace.steps` has one line per (step, row). `Trace.tokens` has one line per token with trace="tokens". A step only
appends arrays, so that recording is cheap. The data frames are built on access.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NotRequired, TypedDict, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bass_core import checks
from bass_core.drafters import Context, Draft
from bass_core.environment import write_whole
from bass_core.loop.rows import Commit
from bass_core.options import TraceLevel

STEP_COLUMNS = (
    "step", "row", "kind", "k", "drafted", "accepted", "emitted", "kv_length", "draft_ms", "verify_ms", "other_ms",
)  # fmt: skip
TOKEN_COLUMNS = ("row", "position", "step", "token", "kind", "p", "q")
PROBABILITIES = ("p", "q")


@dataclass(frozen=True)
class StepEvent:
    """One step and the tokens that the step added, with one entry per row.

    step: number of the step in the session.
    rows: row ids. No event reports the end of a row by a deadline or by `cancel`; see the handle's finish_reason.
    new_tokens: emitted ids of each row.
    drafted, accepted: number of draft tokens and accepted tokens of each row. An ending row may emit fewer tokens.
    """

    step: int
    rows: list[int]
    new_tokens: list[list[int]]
    drafted: list[int]
    accepted: list[int]


class Summary(TypedDict):
    """Result of `Trace.summary`. Figures are NaN without decoded or drafted tokens."""

    rows: int
    tokens: int
    steps: int  # decode steps of the batch, prefills excluded
    tokens_per_step: float  # mean number of tokens that a row emits per decode step
    k: float  # mean planned draft length
    acceptance_rate: float  # accepted / drafted; like alpha, this includes tokens verified beyond a text's end
    alpha: float  # acceptance probability of a draft token if all draft tokens before it in the step were accepted
    prefill_s: float  # seconds
    draft_s: float
    verify_s: float
    other_s: float
    attention: NotRequired[str]  # from here on: `Trace.meta` of a session
    draft_attention: NotRequired[str | None]
    compile: NotRequired[str]
    kernels: NotRequired[str]
    synthetic: NotRequired[bool]
    acceptance: NotRequired[str]
    verification: NotRequired[str]
    policy: NotRequired[str]


class Trace:
    """The record of one `generate` call or `Session`.

    meta: names of attention paths, verification rule, policy and other settings. `steps`, `tokens`: DataFrames.
    """

    def __init__(self, level: TraceLevel = "steps", **meta):
        self.level = checks.one_of("trace", level, get_args(TraceLevel))
        self.meta = meta
        self._step_parts: list[dict] = []
        self._token_parts: list[dict] = []

    @property
    def synthetic(self) -> bool:
        """True if a model has dummy weights or accepted lengths were drawn. Then only the times are meaningful."""
        return bool(self.meta.get("synthetic", False))

    def record_step(self, **columns) -> None:
        """Record one step. Columns are arrays with one entry per row, or scalars."""
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
        """Record a committed step and return the event. times: milliseconds of plan, draft, verify and commit."""
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
        """Record a step that read a chunk of a row's prompt. read: prompt tokens before the chunk."""
        counts = dict.fromkeys(("k", "drafted", "accepted", "emitted"), 0)
        times = {"draft_ms": 0.0, "verify_ms": reading_ms, "other_ms": after_ms}
        self.record_step(step=step, row=np.array([row]), kind="prefill", kv_length=read, **counts, **times)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One line per (step, row). `step` counts the session's steps, prefills included. `kind` is prefill or decode;
        a chunk of a long prompt is a prefill without emitted tokens. `k` is the planned draft length. `drafted` and
        `accepted` count the row's draft tokens and accepted tokens. `emitted` is accepted + 1, or fewer at an EOS, stop
        string or limit. `kv_length` is the row's length before the step. Times are of the whole step, in ms."""
        return _frame(self._step_parts, STEP_COLUMNS)

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """One line per token. `kind` is accepted, recovered (after a rejection), bonus (after full acceptance), regular
        (no draft) or rejected (a draft token that is not in the text, at its proposed position). `p` and `q` are the
        processed target and draft probabilities of the token. If all rows are greedy, both are at temperature 1; a
        greedy row among sampled rows has 1 or 0. `q` is NaN without a draft or draft distribution. `p` is NaN if the
        target's logits are NaN."""
        if self.level != "tokens":
            raise ValueError(f"trace={self.level!r} does not record tokens; use trace='tokens'")
        return _frame(self._token_parts, TOKEN_COLUMNS)

    def summary(self) -> Summary:
        """Return `meta` and figures over all rows and steps. Raises ValueError with trace="off"."""
        if self.level == "off":
            raise ValueError("trace='off' does not record steps; use trace='steps'")
        steps = self.steps
        decode = steps[(steps.kind == "decode") & (steps.emitted > 0)]  # without failed rows
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
        """Write the trace as JSON, gzipped if the file name ends in .gz."""
        document = {"level": self.level, "meta": self.meta, "steps": self.steps.to_dict("list")}
        if self.level == "tokens":
            tokens = self.tokens.to_dict("list")
            for name in PROBABILITIES:
                tokens[name] = [None if np.isnan(each) else each for each in tokens[name]]  # JSON has no NaN
            document["tokens"] = tokens
        text = json.dumps(document, allow_nan=False)
        write_whole(path, gzip.compress(text.encode()) if Path(path).suffix == ".gz" else text)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file written by `save`."""
        data = Path(path).read_bytes()
        document = json.loads(gzip.decompress(data) if Path(path).suffix == ".gz" else data)
        trace = cls(document["level"], **document["meta"])
        trace._step_parts = [document["steps"]]
        if "tokens" in document:
            numbers = {name: np.array(document["tokens"][name], dtype=float) for name in PROBABILITIES}  # null is NaN
            trace._token_parts = [document["tokens"] | numbers]
        return trace


def alpha(drafted: np.ndarray, accepted: np.ndarray) -> float:
    """Return the acceptance probability of a draft token if all draft tokens before it in the step were accepted.

    drafted, accepted: int arrays of equal shape, for instance columns of `Trace.steps`. NaN without draft tokens.
    """
    tried = int(accepted.sum() + (accepted < drafted).sum())
    return int(accepted.sum()) / tried if tried else float("nan")


def token_columns(step: int, lengths: np.ndarray, draft: Draft, p: Tensor, commit: Commit) -> dict[str, np.ndarray]:
    """Return a step's tokens as columns of `Trace.tokens`. Each row lists emitted tokens, then rejected draft tokens.

    lengths: [B], committed tokens before the step. p: [B, K + 1, V], target distributions.
    """
    k, new = draft.tokens.shape[1], torch.from_numpy(commit.new_tokens).to(p.device)
    slots, is_new = np.r_[: k + 1, :k], np.r_[: 2 * k + 1] <= k  # [2K + 1]: new tokens, then draft tokens
    submitted, accepted = draft.lengths_host[:, None], commit.accepted[:, None]
    shown = np.where(is_new, slots < commit.emitted[:, None], (slots >= accepted) & (slots < submitted))  # [B, 2K + 1]
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
    """Return probs [B, J, V] at tokens [B, J]."""
    return probs.gather(-1, tokens[..., None])[..., 0].double().cpu().numpy()


def _frame(parts: list[dict], columns: tuple[str, ...]) -> pd.DataFrame:
    """Stack parts into a data frame. Scalars are repeated to the length of the part's arrays."""
    if not parts:
        return pd.DataFrame({name: [] for name in columns})
    sizes = [max(np.size(value) for value in part.values()) for part in parts]
    stacked = {
        name: np.concatenate([np.broadcast_to(part[name], size) for part, size in zip(parts, sizes, strict=True)])
        for name in columns
    }
    return pd.DataFrame(stacked)
