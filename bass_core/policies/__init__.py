"""How many tokens to draft: the policies that go by costs, by the draft's own distributions, or by what a task taught.

The interface, a fixed length and the paper's Algorithm 1 are in `draft_length`. A new policy is a file here.
"""

from __future__ import annotations

from bass_core.draft_length import DraftLengthPolicy, as_policy
from bass_core.loading.model_pair import ModelPair
from bass_core.policies.costs import costs_like
from bass_core.policies.goodput import Goodput


def policy_for(pair: ModelPair, draft_length: int | DraftLengthPolicy | None) -> DraftLengthPolicy:
    """The policy that `generate`'s argument means for this pair; raises as `as_policy` does.

    None: `Goodput` where the pair's costs are known (`bass calibrate` measures them, once per device; the embedded
    pair's, with its draft model or its feature head, ship with the library), a fixed length elsewhere.
    """
    cost = costs_like(pair) if draft_length is None else None
    return as_policy(draft_length) if cost is None else Goodput(cost)
