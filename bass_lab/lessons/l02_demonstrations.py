"""Lesson 02: lock-step against rows at their own pace, and the slots of the ragged cache.

In greedy decoding, one draft pass over a finished text gives the accepted lengths of every schedule.
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
    """Return the modelled speed relative to regular decoding if a step ends at the first rejection in any row.

    alpha: acceptance probability of a draft token if all before it were accepted, independent between rows. batch=1 is
    a row at its own pace. A target pass takes 1, a draft pass takes `draft_cost`.
    """
    return float(expected_tokens(alpha**batch, k)[k] / (1 + k * draft_cost))


@torch.inference_mode()
def agreement(pair: ModelPair, prompts: Sequence[str | Tensor], sequences: Sequence[Tensor]) -> list[np.ndarray]:
    """Return bool [T] per row: the draft model's choice equals the token. Raises ValueError without a draft model."""
    require_draft_model(pair)
    agreed = []
    for ids, sequence in zip(token_ids(pair, prompts), sequences, strict=True):
        text = torch.cat([ids, sequence])[None].to(pair.device)
        choices = pair.draft(input_ids=text, use_cache=False).logits[0, len(ids) - 1 : -1].argmax(-1)
        agreed.append((choices.cpu() == sequence).numpy())
    return agreed


def replay(agreed: Sequence[np.ndarray], k: int, lock_step: bool) -> pd.DataFrame:
    """Return the accepted lengths [row, step] until all texts are written; NaN after a row's end.

    agreed: of `agreement`. lock_step: all rows accept the minimum over the rows.
    """
    lengths = np.array([len(row) for row in agreed])
    at = np.ones_like(lengths)  # index of each row's next token
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
    """Return the mean of accepted + 1 over all rows and steps. accepted: [row, step], NaN without a step."""
    return float(np.nanmean(accepted.to_numpy())) + 1


def cache_states(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the target's cache after each decode step, from `Trace.steps`: one line per (step, row), in KV slots.

    The step wrote slots first … written - 1. Slots below kept are committed; slots kept … stale_end - 1 are stale.
    overwritten: number of written slots that were stale before. read: number of slots in the row's attention.
    """
    decode = steps[steps.kind == "decode"].sort_values(["row", "step"])
    first = decode.kv_length - 1  # this pass writes the last committed token
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
    """Return key slots read in a run (per layer and KV head) and launches per layer and pass, for each attention path.
    pad reads all rows of a step up to the longest row."""
    by_step = states.groupby("step").read
    own, padded = int(states.read.sum()), int((by_step.max() * by_step.size()).sum())
    launches = by_step.size().mean()
    lines = [("pad", 1.0, padded, padded - own), ("split", launches, own, 0), ("ragged", 1.0, own, 0)]
    columns = ["attention", "launches per layer and pass", "key slots read", "of these wasted"]
    return pd.DataFrame(lines, columns=columns).set_index("attention")


@torch.inference_mode()
def over_poison(
    pair: ModelPair, prompts: Sequence[str], attention: str, poison: float, max_new_tokens: int = 48, **options
) -> list[Tensor] | None:
    """Return the generated ids if all slots beyond each row's length contain `poison` before each decode step, in both
    models' caches. Return None if logits become NaN. options: of `Session`."""
    # compile="off", because on a GPU the next step would already run, and poison would overwrite its keys.
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
