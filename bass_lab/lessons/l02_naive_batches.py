"""Batched speculative decoding as one would first write it, with six classic bugs to switch on.

After each pass a row keeps the cache slots of what it committed, and all rows are aligned at the right edge again,
which copies the whole cache. The bugs are those that "Batch Speculative Decoding Done Right" (EQSPEC, arXiv 2510.22876)
finds in public implementations, each one or two lines here: search for `bug ==`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from bass_core import checks
from bass_core.loading.model_pair import ModelPair
from bass_core.loop import trace
from bass_core.model.transformers_internals import CACHE
from bass_core.prompts import token_ids
from bass_lab.pairs import require_draft_model

BUGS = {
    "positions": "(a) position ids drift",
    "mask": "(b) the mask reveals padding",
    "cut": "(c) caches are cut to the batch minimum",
    "pads": "(d) pads pile up",
    "bonus": "(e) the bonus token has no cache entry",
    "behind": "(f) the draft is one token behind",
}


@dataclass
class NaiveRun:
    """sequences: generated ids per row. accepted: per step, of each row (-1: it had ended). slots: per step, the target
    cache's per row, holes included. missing: committed tokens whose entry the target's cache lacks in the end."""

    draft_length: int
    sequences: list[Tensor] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    missing: int = 0

    @property
    def alpha(self) -> float:
        """Chance that a draft token is accepted if all before it in its step were."""
        counts = np.array([count for step in self.accepted for count in step if count >= 0])
        return trace.alpha(np.full_like(counts, self.draft_length), counts)


class PaddedModel:
    """A model with a rectangular cache, and which of its slots are each row's own: `own`, bool [B, S]."""

    def __init__(self, model: PreTrainedModel, rows: int, bug: str | None):
        self.model, self.bug = model, bug
        self.cache = DynamicCache()
        self.own = torch.zeros(rows, 0, dtype=torch.bool, device=model.device)

    def feed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Append tokens [B, Q] at these positions (negative: padding) to the cache. Logits [B, Q, V]."""
        self.own = torch.cat([self.own, positions >= 0], 1)
        mask = torch.ones_like(self.own) if self.bug == "mask" else self.own
        positions = None if self.bug == "positions" else positions.clamp(min=0)  # None: the model counts slots
        options = {"attention_mask": mask.long(), "position_ids": positions, CACHE: self.cache}
        return self.model(input_ids=ids, **options).logits

    def keep(self, kept: Tensor) -> None:
        """Of the last slots, keep only these, bool [B, Q]; then align all rows at the right edge again."""
        self.own[:, -kept.shape[1] :] &= kept
        if self.bug == "pads":
            return  # the mask hides what was rejected, and its slots stay
        order = self.own.long().argsort(dim=1, stable=True)  # a row's own slots last, in their order
        order = order[:, -int(self.own.sum(1).max()) :]  # [B, S'], as wide as the longest row
        self.own = self.own.gather(1, order)
        for layer in self.cache.layers:
            slots = order[:, None, :, None]  # of all heads and their dimensions
            layer.keys, layer.values = layer.keys.take_along_dim(slots, 2), layer.values.take_along_dim(slots, 2)


@torch.inference_mode()
def naive_generate(
    pair: ModelPair,
    prompts: Sequence[str | Tensor],
    bug: str | None = None,
    draft_length: int = 4,
    max_new_tokens: int = 48,
) -> NaiveRun:
    """Continue every prompt (two tokens or more) greedily; no row stops before `max_new_tokens`.

    bug: None, or one of `BUGS`. Raises ValueError for another name, a draft length below 1, and a draft that is no
    model.
    """
    if bug is not None:
        checks.one_of("bug", bug, BUGS)
    checks.integer("draft_length", draft_length, least=1)
    require_draft_model(pair)
    rows = [ids.tolist() for ids in token_ids(pair, prompts)]  # committed tokens, prompt included
    limits = [len(row) + max_new_tokens for row in rows]
    target, draft = (PaddedModel(model, len(rows), bug) for model in (pair.target, pair.draft))
    # The draft stays behind by the last two tokens and reads both when it drafts: after full acceptance it has not
    # seen its own last token yet.
    unread = 1 if bug == "behind" else 2
    ids, positions = _left_padded(rows, pair.device)
    draft.feed(ids[:, : ids.shape[1] + 1 - unread], positions[:, : ids.shape[1] + 1 - unread])
    first = target.feed(ids, positions)[:, -1].argmax(-1)
    for row, token in zip(rows, first.tolist(), strict=True):
        row.append(token)
    run = NaiveRun(draft_length)
    while any(len(row) < limit for row, limit in zip(rows, limits, strict=True)):
        drafted = _draft(draft, rows, draft_length, unread)  # [B, K]
        fed = torch.cat([_last(rows, 1, pair.device), drafted], 1)
        choices = target.feed(fed, _following(rows, -1, draft_length + 1, pair.device)).argmax(-1)  # [B, K + 1]
        accepted = (choices[:, :-1] == drafted).long().cumprod(1).sum(1)  # [B]
        ended = torch.tensor([len(row) >= limit for row, limit in zip(rows, limits, strict=True)], device=pair.device)
        accepted[ended] = -1  # an ended row commits and keeps nothing, and is fed the same again
        run.accepted.append(accepted.tolist())
        target.keep(kept_entries(accepted, draft_length + 1, bug, is_target=True))
        draft.keep(kept_entries(accepted, draft_length - 1 + unread, bug, is_target=False))
        for row, tokens, count in zip(rows, choices.tolist(), run.accepted[-1], strict=True):
            row += tokens[: count + 1]  # accepted drafts equal the target's choices; then one more of the target's
        run.slots.append(target.own.shape[1])
    run.missing = sum(len(row) - 1 for row in rows) - int(target.own.sum())
    run.sequences = [torch.tensor(row[limit - max_new_tokens : limit]) for row, limit in zip(rows, limits, strict=True)]
    return run


def kept_entries(accepted: Tensor, fed: int, bug: str | None, is_target: bool) -> Tensor:
    """Which of a step's `fed` slots hold committed tokens: bool [B, fed]. (The first of them was committed before.)"""
    slots = torch.arange(fed, device=accepted.device)
    kept = slots <= accepted[:, None]
    if bug == "cut":
        kept &= slots <= accepted[accepted >= 0].min()
    if bug == "bonus" and is_target:
        kept[:, 0] = False  # "keep what was accepted": the target's own token was never drafted
    return kept


def _draft(draft: PaddedModel, rows: list[list[int]], k: int, unread: int) -> Tensor:
    """The draft's next k choices, [B, k]. It feeds `unread` + k - 1 tokens."""
    device, tokens = draft.own.device, []
    logits = draft.feed(_last(rows, unread, device), _following(rows, -unread, unread, device))
    for slot in range(k):
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))
        if slot + 1 < k:
            logits = draft.feed(tokens[-1], _following(rows, slot, 1, device))
    return torch.cat(tokens, 1)


def _last(rows: list[list[int]], count: int, device: torch.device) -> Tensor:
    """The last committed tokens, [B, count]."""
    return torch.tensor([row[-count:] for row in rows], device=device)


def _following(rows: list[list[int]], offset: int, count: int, device: torch.device) -> Tensor:
    """`count` positions from each row's length + offset on, [B, count]."""
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return lengths[:, None] + offset + torch.arange(count, device=device)


def _left_padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as one rectangle [B, P] with padding on the left, and their positions (negative there)."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    return ids, _following(rows, -longest, longest, device)


def right_tokens(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[int]:
    """How many tokens of each row are right before the first wrong one; all of them where none is wrong."""
    pairs = zip(found, wanted, strict=True)
    return [int((row[: len(right)] == right[: len(row)]).long().cumprod(0).sum()) for row, right in pairs]


def differing(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[int]:
    """The rows whose tokens are not the wanted ones."""
    return [row for row, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)]


def symptom_table(
    runs: dict[str | None, NaiveRun], twins: dict[str | None, NaiveRun], alone: Sequence[Tensor]
) -> pd.DataFrame:
    """One line per bug. runs: of the pair; twins: with the target as its own draft; alone: the right texts."""
    lines = [
        {
            "bug": BUGS.get(bug, "none"),
            f"rows wrong (of {len(alone)})": len(differing(run.sequences, alone)),
            "rows wrong, draft = target": len(differing(twins[bug].sequences, alone)),
            "α, draft = target": twins[bug].alpha,
            "slots per row": run.slots[-1],
            "entries missing": run.missing,
        }
        for bug, run in runs.items()
    ]
    return pd.DataFrame(lines).set_index("bug")
