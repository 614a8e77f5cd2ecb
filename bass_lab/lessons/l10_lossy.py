"""Lesson 10: a lossy acceptance rule, only for this lesson, and its distance from the target's distribution.

A draft token x is accepted if p(x) >= ε · max p (typical acceptance: Medusa, Cai et al. 2024). Otherwise a draw from p
replaces x. The rules of `bass_core` are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pandas as pd
import torch
from torch import Tensor

from bass_core.exactness import randomness, verification
from bass_core.exactness.randomness import StepKeys
from bass_core.exactness.verification import Outcome
from bass_core.model import kernel_ops
from bass_core.policies.protocol import FixedLength
from bass_lab.checks.enumeration import PROMPT, exact_law, law_of_engine
from bass_lab.checks.tabular import tabular, total_variation

EPSILONS = (1.0, 0.5, 0.3, 0.1, 0.0)


def likely_enough(epsilon: float):
    """Return the LOSSY rule in the form of `verification.token`. ε = 0 accepts every token, ε = 1 only favourites."""

    def rule(drafted: Tensor, lengths: Tensor, q: Tensor, p: Tensor, keys: StepKeys) -> Outcome:
        count = drafted.shape[1]
        p_x = p[:, :count].gather(-1, drafted[..., None])[..., 0]  # [B, K]
        slots = torch.arange(count, device=drafted.device)
        kept = (p_x >= epsilon * p[:, :count].amax(-1)) & (slots < lengths[:, None])
        accepted = verification.leading(kept)
        rows = torch.arange(len(p), device=p.device)
        return Outcome(accepted, randomness.draw(p[rows, accepted], keys.target()))

    return rule


@contextmanager
def lossy(epsilon: float | None) -> Iterator[None]:
    """Replace token verification by the LOSSY rule in every thread, without fused verification kernels. None is exact.
    Sessions must start inside this context. Raises ValueError unless 0 <= epsilon <= 1."""
    if epsilon is None:
        yield
        return
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon must be from 0 to 1, got {epsilon!r}")
    with (
        mock.patch.dict(verification.RULES, token=likely_enough(epsilon)),
        mock.patch.object(kernel_ops, "can_fuse", lambda logits, q: False),
    ):
        yield


def exact_distances(epsilons=EPSILONS, *, pairs: int = 3, new: int = 3, draft_length: int = 2) -> pd.DataFrame:
    """Return the exact TV of texts of `new` tokens from the target, by enumeration, on tabular targets of three tokens.
    Lines: the exact rule and each ε; mean and largest over `pairs`."""
    lines = {}
    for epsilon in (None, *epsilons):
        found = []
        for seed in range(pairs):
            target, draft = tabular(3, seed), tabular(3, seed + 100)
            with lossy(epsilon):
                law = law_of_engine(target, draft, new, lambda: FixedLength(draft_length), [PROMPT])
            found.append(total_variation(law, exact_law(target, new, [PROMPT])))
        lines["exact" if epsilon is None else f"ε = {epsilon}"] = {
            "mean tv": sum(found) / pairs,
            "largest tv": max(found),
        }
    return pd.DataFrame.from_dict(lines, orient="index")
