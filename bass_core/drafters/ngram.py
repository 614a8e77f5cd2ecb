"""Drafts looked up in the row's own text."""

from __future__ import annotations

import numpy as np
import torch

from bass_core.draft_length import DraftLengthPolicy
from bass_core.drafters.protocol import Context, Draft, Drafter


class NgramDrafter(Drafter):
    """Drafts without a model: what followed the last time the row's current ending occurred in it.

    The longest of the endings of `longest` … `shortest` tokens with an earlier occurrence decides (the most recent
    occurrence); rows without one draft nothing. (Prompt-lookup decoding, Saxena 2023.) q is one-hot.
    """

    name = "n-gram draft"

    def __init__(self, longest: int = 3, shortest: int = 1):
        if not 1 <= shortest <= longest:
            raise ValueError(f"NgramDrafter needs 1 <= shortest <= longest, got {shortest} and {longest}")
        self.longest, self.shortest = longest, shortest

    def draft(self, context: Context, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        tokens, n = context.tokens, context.lengths[:, None]  # [B, S], [B, 1]
        start = torch.zeros_like(n)  # where the continuation begins; 0 = no match
        for size in range(self.shortest, min(self.longest, tokens.shape[1] - 1) + 1):  # longer matches overwrite
            windows = tokens.unfold(1, size, 1)  # [B, S - size + 1, size]
            ending = tokens.gather(1, (n - size + torch.arange(size, device=n.device)).clamp(min=0))  # [B, size]
            ends = torch.arange(size, tokens.shape[1] + 1, device=n.device)  # [S - size + 1], one past each window
            found = (windows == ending[:, None]).all(-1) & (ends < n) & (n > size)
            last = (found * ends).amax(1, keepdim=True)
            start = torch.where(last > 0, last, start)
        available = torch.where(start > 0, n - start, 0)[:, 0]
        wanted = torch.minimum(torch.as_tensor(lengths, device=n.device), available)
        lengths_host = wanted.cpu().numpy()
        most = int(lengths_host.max())
        places = (start + torch.arange(most, device=n.device)).clamp(max=tokens.shape[1] - 1)
        return Draft.of(tokens.gather(1, places), lengths_host)
