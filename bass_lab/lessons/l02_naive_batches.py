"""Naive batched speculative decoding, with six classic bugs to switch on.

After each pass a row keeps the cache slots of its committed tokens. Then all rows are aligned at the right edge again,
with a copy of the whole cache. "Batch Speculative Decoding Done Right" (EQSPEC, arXiv 2510.22876) found these bugs in
public implementations. Each bug is one or two lines here: search for `bug ==`.
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
    "pads": "(d) padding accumulates",
    "bonus": "(e) the target's token has no cache entry",
    "behind": "(f) the draft is one token behind",
}


@dataclass
class NaiveRun:
    """sequences: generated ids per row. accepted: accepted lengths [step][row], -1 after a row's end. slots: slots per
    row of the target's cache after each step, with holes. missing: committed tokens without cache entry at the end."""

    draft_length: int
    sequences: list[Tensor] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    missing: int = 0

    @property
    def alpha(self) -> float:
        """Acceptance probability of a draft token if all before it in the step were accepted."""
        counts = np.array([count for step in self.accepted for count in step if count >= 0])
        return trace.alpha(np.full_like(counts, self.draft_length), counts)


class PaddedModel:
    """Model with a rectangular cache. own: bool [B, S], True for slots with the row's tokens."""

    def __init__(self, model: PreTrainedModel, rows: int, bug: str | None):
        self.model, self.bug = model, bug
        self.cache = DynamicCache()
        self.own = torch.zeros(rows, 0, dtype=torch.bool, device=model.device)

    def feed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Append tokens [B, Q] at these positions (negative: padding) to the cache, and return logits [B, Q, V]."""
        self.own = torch.cat([self.own, positions >= 0], 1)
        mask = torch.ones_like(self.own) if self.bug == "mask" else self.own
        positions = None if self.bug == "positions" else positions.clamp(min=0)  # None: the model counts slots
        options = {"attention_mask": mask.long(), "position_ids": positions, CACHE: self.cache}
        return self.model(input_ids=ids, **options).logits

    def keep(self, kept: Tensor) -> None:
        """Keep only the given slots (bool [B, Q]) of the last Q, and align all rows at the right edge again."""
        self.own[:, -kept.shape[1] :] &= kept
        if self.bug == "pads":
            return  # the mask hides rejected tokens, but their slots stay
        order = self.own.long().argsort(dim=1, stable=True)  # the row's own slots last, in order
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
    """Continue every prompt (two tokens or more) greedily. No row stops before `max_new_tokens`.

    bug: None, or a key of `BUGS`. Raises ValueError for another name, a draft length below 1, or a pair without a draft
    model.
    """
    if bug is not None:
        checks.one_of("bug", bug, BUGS)
    checks.integer("draft_length", draft_length, least=1)
    require_draft_model(pair)
    rows = [ids.tolist() for ids in token_ids(pair, prompts)]  # committed tokens, prompt included
    limits = [len(row) + max_new_tokens for row in rows]
    target, draft = (PaddedModel(model, len(rows), bug) for model in (pair.target, pair.draft))
    # The draft model reads the last two tokens when it drafts, because after full acceptance it has not read its own
    # last draft token.
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
        accepted[ended] = -1  # an ended row commits nothing, and its tokens are fed again
        run.accepted.append(accepted.tolist())
        target.keep(kept_entries(accepted, draft_length + 1, bug, is_target=True))
        draft.keep(kept_entries(accepted, draft_length - 1 + unread, bug, is_target=False))
        for row, tokens, count in zip(rows, choices.tolist(), run.accepted[-1], strict=True):
            row += tokens[: count + 1]  # accepted draft tokens equal the target's choices; then one more
        run.slots.append(target.own.shape[1])
    run.missing = sum(len(row) - 1 for row in rows) - int(target.own.sum())
    run.sequences = [torch.tensor(row[limit - max_new_tokens : limit]) for row, limit in zip(rows, limits, strict=True)]
    return run


def kept_entries(accepted: Tensor, fed: int, bug: str | None, is_target: bool) -> Tensor:
    """Return True for slots of committed tokens among the step's `fed` slots: bool [B, fed]. (Slot 0 was committed.)"""
    slots = torch.arange(fed, device=accepted.device)
    kept = slots <= accepted[:, None]
    if bug == "cut":
        kept &= slots <= accepted[accepted >= 0].min()
    if bug == "bonus" and is_target:
        kept[:, 0] = False  # keeps accepted draft tokens only, and drops the target's own token
    return kept


def _draft(draft: PaddedModel, rows: list[list[int]], k: int, unread: int) -> Tensor:
    """Return the draft model's next k choices, [B, k], after feeding `unread` + k - 1 tokens."""
    device, tokens = draft.own.device, []
    logits = draft.feed(_last(rows, unread, device), _following(rows, -unread, unread, device))
    for slot in range(k):
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))
        if slot + 1 < k:
            logits = draft.feed(tokens[-1], _following(rows, slot, 1, device))
    return torch.cat(tokens, 1)


def _last(rows: list[list[int]], count: int, device: torch.device) -> Tensor:
    return torch.tensor([row[-count:] for row in rows], device=device)


def _following(rows: list[list[int]], offset: int, count: int, device: torch.device) -> Tensor:
    """Return `count` positions from each row's length + offset, [B, count]."""
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return lengths[:, None] + offset + torch.arange(count, device=device)


def _left_padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the prompts [B, P] with padding on the left, and positions (negative for padding)."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    return ids, _following(rows, -longest, longest, device)


def right_tokens(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[int]:
    """Return the number of right tokens in each row before the first wrong token."""
    pairs = zip(found, wanted, strict=True)
    return [int((row[: len(right)] == right[: len(row)]).long().cumprod(0).sum()) for row, right in pairs]


def differing(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[int]:
    """Return the rows with wrong tokens."""
    return [row for row, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)]


def symptom_table(
    runs: dict[str | None, NaiveRun], twins: dict[str | None, NaiveRun], alone: Sequence[Tensor]
) -> pd.DataFrame:
    """Return one line per bug. runs: of the pair; twins: target as its own draft; alone: right texts."""
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
