"""Synthetic acceptance: draw accepted lengths to measure the cost of decoding at a chosen acceptance rate.

Each step runs completely, verification included. Then each row draws an accepted length. The generated text has no
meaning, and every result is labelled synthetic.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bass_core.drafters import Context, Draft
from bass_core.exactness import randomness, verification
from bass_core.exactness.verification import Verified
from bass_core.loading.model_pair import ASSETS

PREFIX = "synthetic:"


def expected_tokens_per_step(alpha: float, k: int, tokens: int) -> float:
    """Return the expected tokens per step of a row of `tokens` tokens after the prefill, with draft length k.

    A step near the end drafts one token less than are left. A run draws its accepted lengths, so its own mean differs.
    """
    steps = [0.0]  # expected steps of a row with 0, 1, … tokens left
    for left in range(1, tokens + 1):
        most = min(k, left - 1)
        fewer = sum(alpha**n * (1 - alpha) * steps[left - n - 1] for n in range(most))
        steps.append(1 + fewer + alpha**most * steps[left - most - 1])
    return tokens / steps[tokens]


class SyntheticAcceptance:
    """Acceptance probabilities [N, T] by text and position. A row cycles through a text, from the row's length on."""

    def __init__(self, chances: Tensor, name: str = "synthetic"):
        self.chances, self.name = chances.double(), name

    @classmethod
    def named(cls, name: str) -> SyntheticAcceptance:
        """Parse the value of a command's `--acceptance`.

        "synthetic:0.8": accept each draft token with probability α = 0.8 if all before it were accepted.
        "synthetic:trace": use the probabilities of the embedded pair along its own texts (library prompts), with easy
        and hard stretches. "synthetic:FILE.npz": use a trace of `bass record`. Raises ValueError for other values.
        """
        what = name.removeprefix(PREFIX) if isinstance(name, str) and name.startswith(PREFIX) else ""
        if what == "trace" or what.endswith(".npz"):
            file = ASSETS / "acceptance" / "library.npz" if what == "trace" else Path(what)
            if not file.is_file():
                raise ValueError(f"acceptance={name!r}: the file {file} does not exist")
            with np.load(file) as recorded:  # `bass record` wrote target and draft probabilities p, q [N, T]
                p, q = (recorded[part].astype(float) if part in recorded else np.zeros(0) for part in "pq")
                ends = recorded["lengths"] if "lengths" in recorded else np.zeros(0)
            if p.ndim != 2 or p.shape != q.shape or p.shape[1] < 2 or ends.shape != p.shape[:1]:
                raise ValueError(f"acceptance={name!r}: {file} is no trace of `bass record`; record the file again")
            chances = np.divide(q, p, out=np.ones_like(p), where=q < p)
            chances = chances[:, 1:]  # the prefill produces the first token
            within = np.arange(chances.shape[1]) % np.maximum(ends - 1, 1)[:, None]  # a text repeats after the end
            return cls(torch.from_numpy(np.take_along_axis(chances, within, 1)), name)
        try:
            alpha = float(what)
        except ValueError:
            alpha = -1.0
        if not 0 <= alpha <= 1:
            raise ValueError(
                'acceptance must be "synthetic:A" with a probability A from 0 to 1, "synthetic:trace" or '
                f'"synthetic:FILE.npz"; got {name!r}'
            )
        return cls(torch.tensor([[alpha]], device="cpu"), name)

    def on(self, device: torch.device) -> SyntheticAcceptance:
        """Return the same probabilities on another device."""
        return SyntheticAcceptance(self.chances.to(device), self.name)

    def impose(self, verified: Verified, draft: Draft, context: Context) -> Verified:
        """Return `verified` with drawn accepted lengths and its own last token. Log-probabilities are NaN."""
        slots = torch.arange(draft.tokens.shape[1], device=self.chances.device)
        texts, places = self.chances.shape
        text = context.keys.stream.remainder(texts)[:, None]
        chance = self.chances[text, (context.lengths[:, None] + slots) % places]  # [B, K]
        kept = randomness.accept(chance, context.keys.accept(slots)) & (slots < draft.lengths[:, None])
        accepted = verification.leading(kept)
        following = verified.tokens[:, -1:]
        tokens = torch.cat([draft.tokens, following], 1).scatter(1, accepted[:, None], following)
        return verified._replace(
            accepted=accepted,
            tokens=tokens,
            logprobs=torch.full_like(verified.logprobs, torch.nan),
        )
