"""Accepted counts drawn instead of earned: what decoding would cost at some acceptance.

Each step runs whole, verification included; then each row draws how many drafts it keeps. The text means nothing, and
whatever is made with it is labelled synthetic.
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


class SyntheticAcceptance:
    """Chances [N, T] that a drafted token is accepted. A row repeats one of the texts from the place of its length."""

    def __init__(self, chances: Tensor, name: str = "synthetic"):
        self.chances, self.name = chances.double(), name

    @classmethod
    def named(cls, name: str) -> SyntheticAcceptance:
        """Return what a command's `--acceptance` asks for.

        "synthetic:0.8": each draft is accepted with chance α = 0.8 where those before it were, independent of all else.
        "synthetic:trace": with the chances of the embedded pair along its own texts (library prompts), where easy and
        hard stretches follow one another; or "synthetic:FILE.npz", a recording of `bass record`. Raises ValueError for
        anything else.
        """
        what = name.removeprefix(PREFIX) if isinstance(name, str) and name.startswith(PREFIX) else ""
        if what == "trace" or what.endswith(".npz"):
            file = ASSETS / "acceptance" / "library.npz" if what == "trace" else Path(what)
            if not file.is_file():
                raise ValueError(f"acceptance={name!r}: there is no file {file}")
            with np.load(file) as recorded:  # what `bass record` wrote: chances of the target and of the draft [N, T]
                p, q = (recorded[part].astype(float) if part in recorded else np.zeros(0) for part in "pq")
                ends = recorded["lengths"] if "lengths" in recorded else np.zeros(0)
            if p.ndim != 2 or p.shape != q.shape or p.shape[1] < 2 or ends.shape != p.shape[:1]:
                raise ValueError(f"acceptance={name!r}: {file} holds no recording; make it anew with `bass record`")
            chances = np.divide(q, p, out=np.ones_like(p), where=q < p)
            chances = chances[:, 1:]  # the first token is the prefill's
            within = np.arange(chances.shape[1]) % np.maximum(ends - 1, 1)[:, None]  # behind its end a text begins anew
            return cls(torch.from_numpy(np.take_along_axis(chances, within, 1)), name)
        try:
            alpha = float(what)
        except ValueError:
            alpha = -1.0
        if not 0 <= alpha <= 1:
            raise ValueError(
                'acceptance must be "synthetic:A" with a chance A from 0 to 1, "synthetic:trace" or '
                f'"synthetic:FILE.npz"; got {name!r}'
            )
        return cls(torch.tensor([[alpha]], device="cpu"), name)

    def on(self, device: torch.device) -> SyntheticAcceptance:
        """Return the same chances on a device."""
        return SyntheticAcceptance(self.chances.to(device), self.name)

    def impose(self, verified: Verified, draft: Draft, context: Context) -> Verified:
        """Return the outcome with drawn counts and verification's own next token; log-probabilities are NaN."""
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
