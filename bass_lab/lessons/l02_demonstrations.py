"""Many sequences at once: lock-step against rows at their own pace, and what that leaves in the cache.

In greedy decoding one pass of the draft over a finished text tells what any schedule would have accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bass_core.loading.model_pair import ModelPair
from bass_core.policies.protocol import expected_tokens
from bass_core.prompts import token_ids
from bass_core.session import Session
from bass_lab.pairs import require_draft_model


def expected_speed(alpha: float, k: int, batch: int = 1, draft_cost: float = 0.05) -> float:
    """Modelled speed over regular decoding where a step ends at the first rejection in any of `batch` rows.

    alpha: chance that a draft is accepted if all before it were, independently in every row. batch=1 is a row at its
    own pace. A pass of the target takes 1, a pass of the draft `draft_cost`.
    """
    return float(expected_tokens(alpha**batch, k)[k] / (1 + k * draft_cost))


@torch.inference_mode()
def agreement(pair: ModelPair, prompts: Sequence[str | Tensor], sequences: Sequence[Tensor]) -> list[np.ndarray]:
    """bool [T] per row: the draft would have chosen each generated token. Raises ValueError without a draft model."""
    require_draft_model(pair)
    agreed = []
    for ids, sequence in zip(token_ids(pair, prompts), sequences, strict=True):
        text = torch.cat([ids, sequence])[None].to(pair.device)
        choices = pair.draft(input_ids=text, use_cache=False).logits[0, len(ids) - 1 : -1].argmax(-1)
        agreed.append((choices.cpu() == sequence).numpy())
    return agreed


def replay(agreed: Sequence[np.ndarray], k: int, lock_step: bool) -> pd.DataFrame:
    """Accepted drafts per row (down) and step (across) until all texts are written; NaN once a row has ended.

    agreed: of `agreement`. lock_step: every row keeps as many as the row that keeps least.
    """
    lengths = np.array([len(row) for row in agreed])
    at = np.ones_like(lengths)  # the next token of each row
    steps = []
    while (at < lengths).any():
        live = at < lengths
        accepted = np.zeros(len(agreed))
        for row in np.flatnonzero(live):
            drafted = min(k, lengths[row] - at[row] - 1)
            accepted[row] = agreed[row][at[row] : at[row] + drafted].cumprod().sum()
        if lock_step:
            accepted[:] = accepted[live].min()
        at = np.where(live, at + accepted.astype(int) + 1, at)
        steps.append(np.where(live, accepted, np.nan))
    table = pd.DataFrame(np.array(steps).T)
    return table.rename_axis("row").rename(columns=lambda step: step + 1)


def tokens_per_step(accepted: pd.DataFrame) -> float:
    """Mean over all steps of all rows of accepted + 1. accepted: rows down, steps across, NaN where none."""
    return float(np.nanmean(accepted.to_numpy())) + 1


def cache_states(steps: pd.DataFrame) -> pd.DataFrame:
    """The target's cache after each decode step, from `Trace.steps`: one line per (step, row), in slots of the row.

    The step wrote slots first … written - 1; those below kept are committed now, kept … stale_end - 1 are stale.
    overwritten: slots written that were stale before. read: slots that attention reads for the row.
    """
    decode = steps[steps.kind == "decode"].sort_values(["row", "step"])
    first = decode.kv_length - 1  # the last committed token enters the cache in this pass
    written = decode.kv_length + decode.drafted
    stale_end = written.groupby(decode.row).cummax()
    stale_before = stale_end.groupby(decode.row).shift(fill_value=0)
    table = {
        "step": decode.step,
        "row": decode.row,
        "first": first,
        "kept": decode.kv_length + decode.accepted,
        "written": written,
        "stale_end": stale_end,
        "overwritten": (np.minimum(written, stale_before) - first).clip(lower=0),
        "read": written,
    }
    return pd.DataFrame(table).sort_values(["step", "row"], ignore_index=True)


def slots_read(states: pd.DataFrame) -> pd.DataFrame:
    """Key slots that each kind of attention reads over a run (per layer and KV head), and launches per layer and pass.
    pad reads every row of a step up to the longest."""
    by_step = states.groupby("step").read
    own, padded = int(states.read.sum()), int((by_step.max() * by_step.size()).sum())
    launches = by_step.size().mean()
    lines = [("pad", 1.0, padded, padded - own), ("split", launches, own, 0), ("ragged", 1.0, own, 0)]
    columns = ["attention", "launches per layer and pass", "key slots read", "of these in vain"]
    return pd.DataFrame(lines, columns=columns).set_index("attention")


@torch.inference_mode()
def over_poison(
    pair: ModelPair, prompts: Sequence[str], attention: str, poison: float, max_new_tokens: int = 48, **options
) -> list[Tensor] | None:
    """Generated ids when every slot beyond a row's length holds `poison` before each decode step, in both models'
    caches; None where logits become NaN. options: of `Session`."""
    # On a GPU the next step would be under way already, whose keys are no poison's place.
    with Session(pair, max_batch_size=len(prompts), attention=attention, compile="off", **options) as session:
        handles = [session.submit(prompt, max_new_tokens=max_new_tokens) for prompt in prompts]
        while not session.idle:
            try:
                session.step()
            except FloatingPointError:
                return None
            _poison(session, poison)
        return [session.result(handle).sequence for handle in handles]


def _poison(session: Session, poison: float) -> None:
    live = len(session.rows.live)
    known_of_draft = session.drafter.runner, session.drafter.cached
    for runner, known in ((session.target, session.rows.lengths_host - 1), known_of_draft):
        for buffer in runner.cache.buffers():
            for place in range(live):
                buffer[place, :, known[place] :] = poison
