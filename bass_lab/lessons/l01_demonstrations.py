"""Lesson 01: cost, decisions and tokens of one step of speculative decoding."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bass_core.exactness import randomness, sampling
from bass_core.exactness.randomness import Key, Purpose
from bass_core.exactness.sampling import SamplingParams
from bass_core.generation import generate
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.trace import alpha
from bass_core.policies.costs import CostModel
from bass_core.policies.protocol import DraftLengthPolicy, RowsView, expected_tokens
from bass_core.prompts import token_ids
from bass_core.session import Session
from bass_lab.checks import plain_decoding
from bass_lab.gpu.recorded import GpuRecord
from bass_lab.measure import benchmark
from bass_lab.measure.ratios import half_width
from bass_lab.measure.roofline import DRAFT_310M, H100, TARGET_8B, StepWork
from bass_lab.pairs import require_draft_model
from bass_lab.show import token_views


class _Cycle(DraftLengthPolicy):
    """Cycle through draft lengths 0, 1, …, most, so that all lengths are timed on the same rows."""

    def __init__(self, most: int):
        self.lengths = itertools.cycle(range(most + 1))

    def plan(self, rows: RowsView) -> int:
        return next(self.lengths)


def measured_costs(
    pair: ModelPair, prompts: Sequence[str], temperature: float, most: int = 8, repeats: int = 7
) -> pd.DataFrame:
    """Return median times of interleaved decode steps with n = 1 … most + 1 submitted tokens per row.

    Columns: n, target_ms (a target pass over n tokens of every row), draft_ms (n - 1 draft passes).
    """
    require_draft_model(pair)
    limit = (repeats + 1) * (most + 1) * (most + 2) // 2  # no row ends before the last repeat
    options = {"temperature": temperature, "draft_length": _Cycle(most), "eos_token_id": ()}
    with Session(pair, max_batch_size=len(prompts), **options) as session, session.prepared():
        for prompt in prompts:
            session.submit(prompt, max_new_tokens=limit + 1)
        session.step()  # prefill
        for _ in range((repeats + 1) * (most + 1)):
            session.step()
    steps = session.trace.steps.query("kind == 'decode'").drop_duplicates("step").iloc[most + 1 :]  # minus warm-up
    found = steps.groupby("drafted")[["verify_ms", "draft_ms"]].median().reset_index()
    draft_ms = found.draft_ms.where(found.drafted > 0, 0.0)
    return pd.DataFrame({"n": found.drafted + 1, "target_ms": found.verify_ms, "draft_ms": draft_ms})


def roofline_ms(work: StepWork, rows: int, n: int, context: int) -> float:
    """Return the least milliseconds of a bf16 pass over n new tokens per row on an H100, by bytes and FLOPs.

    Launches and the new keys and values are not counted, so a memory-bound pass does not depend on n.
    """
    read = work.bytes(rows, 0, context)
    return 1e3 * max(read / H100.bandwidth, work.flops(rows, n, context) / H100.flops)


def h100_costs(rows: int, most: int = 8, context: int = 512) -> pd.DataFrame:
    """Return the table of `measured_costs` for `TARGET_8B` and `DRAFT_310M` on an H100, by `roofline_ms`."""
    n = np.arange(1, most + 2)
    target = [roofline_ms(TARGET_8B, rows, tokens, context) for tokens in n.tolist()]
    draft = (n - 1) * roofline_ms(DRAFT_310M, rows, 1, context)
    return pd.DataFrame({"n": n, "target_ms": target, "draft_ms": draft})


def recorded_costs(record: GpuRecord | None, rows: int, most: int = 8, context: int = 512) -> dict[str, pd.DataFrame]:
    """Return the table of `measured_costs` by curve name, from recorded costs of a GPU. Empty without a record. The
    number of rows is limited to the measured batch sizes."""
    if record is None:
        return {}
    cost: CostModel = record.content
    rows, n = min(rows, int(cost.target_passes.axes["batch"][-1])), np.arange(1, most + 2)
    target_ms, draft_ms = 1e3 * cost.target(rows, n, context), 1e3 * cost.draft(rows, n - 1, context)
    curve = pd.DataFrame({"n": n, "target_ms": target_ms, "draft_ms": draft_ms})
    return {f"{record.name}, {rows} rows": curve}


def predicted(curves: Mapping[str, pd.DataFrame], k: int, tokens_per_step: float) -> pd.DataFrame:
    """Return T(1), T(k + 1), k draft passes (ms), step cost (T(1)), speed-up. Raises ValueError if k was not timed."""
    lines = {}
    for name, costs in curves.items():
        if not 0 <= k < len(costs):
            raise ValueError(f"k must be from 0 to {len(costs) - 1} (the timed draft lengths), got {k}")
        by_n = costs.set_index("n")
        one, many, draft = by_n.target_ms[1], by_n.target_ms[k + 1], by_n.draft_ms[k + 1]
        cost = (many + draft) / one
        line = {"T(1), ms": one, f"T({k + 1}), ms": many, f"{k} drafts, ms": draft, "step cost": cost}
        lines[name] = line | {"tokens per step": tokens_per_step, "speed-up": tokens_per_step / cost}
    return pd.DataFrame.from_dict(lines, orient="index")


@dataclass(frozen=True)
class Story:
    """One decoded sequence with the decision on every draft token.

    prompt: ids. lines: step, slot (from 1; 0 in the prefill), position, token, text, p, q, accept (min(1, p/q)), u,
    verdict. Verdicts of draft tokens: accepted, rejected, not reached. Verdicts of the step's last token: recovered,
    bonus, regular.
    """

    prompt: Tensor
    lines: pd.DataFrame

    def before(self, position: int) -> Tensor:
        """Return the ids of the text before this position."""
        generated = self.committed[self.committed.position < position].token
        return torch.cat([self.prompt, torch.tensor(generated.to_numpy(), dtype=torch.int64)])

    @property
    def committed(self) -> pd.DataFrame:
        """Lines of the committed tokens, in text order."""
        return self.lines[~self.lines.verdict.isin(["rejected", "not reached"])].sort_values("position")

    @property
    def disagreement(self) -> pd.Series:
        """Line of the first rejected draft token, or of the first draft token without rejections."""
        drafts = self.lines.dropna(subset="u")
        return drafts.loc[(drafts.verdict == "rejected").idxmax()]

    def telling_steps(self) -> list[int]:
        """Return the first step with a late rejection, the first with a rejection at slot 1, the first without any."""
        steps = self.lines[self.lines["slot"] > 0].groupby("step").verdict.agg(list)
        wanted = (
            lambda verdicts: verdicts[0] == "accepted" and "rejected" in verdicts,
            lambda verdicts: verdicts[0] == "rejected",
            lambda verdicts: verdicts[-1] == "bonus",
        )
        return sorted(int(step) for want in wanted for step in steps.index[steps.map(want)][:1])


def story(
    pair: ModelPair, prompt: str, *, draft_length: int, max_new_tokens: int, temperature: float, seed: int = 0
) -> Story:
    """Decode one prompt by token verification, and return every decision. u is hashed again from its key.

    Raises ValueError at temperature 0 (no random decisions) and without a draft model.
    """
    require_draft_model(pair)
    if not temperature > 0:
        raise ValueError(f"the story needs temperature > 0 (greedy decoding is deterministic), got {temperature!r}")
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "trace": "tokens"}
    lines = token_views.outcomes(generate(pair, [prompt], draft_length=draft_length, **options).trace)
    lines = lines.rename(columns={"outcome": "verdict"}).assign(own=~lines.kind.isin(["accepted", "rejected"]))
    ends = ~lines.own.groupby(lines.step).transform("any")  # steps that end with an accepted EOS
    lines = lines[~(ends & (lines.kind == "rejected"))].reset_index(drop=True)
    lines["slot"] = np.where(lines.step > 0, lines.groupby("step").cumcount() + 1, 0)
    lines["accept"] = (lines.p / lines.q).clip(upper=1).mask(lines.own)
    lines["u"] = np.where(lines.own, np.nan, _acceptance_numbers(seed, lines.step, lines["slot"]))
    lines["text"] = [pair.tokenizer.decode([token]) for token in lines.token]
    columns = ["step", "slot", "position", "token", "text", "p", "q", "accept", "u", "verdict"]
    return Story(token_ids(pair, [prompt])[0], lines[columns])


def _acceptance_numbers(seed: int, steps: pd.Series, slots: pd.Series) -> np.ndarray:
    """Return u of row 0 at each step and slot (from 1). With one row, its steps are the session's steps."""
    counter = torch.tensor(steps.to_numpy(), dtype=torch.int64)
    slot = torch.tensor(slots.to_numpy() - 1, dtype=torch.int64)
    stream = torch.full_like(counter, randomness.stream(seed, 0))
    return randomness.uniform(Key(stream, counter, Purpose.ACCEPT, slot[:, None]))[:, 0].numpy()


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, ids: Tensor, count: int, vocabulary: int) -> Tensor:
    """Return the logits [count, vocabulary] after each of the last `count` ids, from one pass without a cache. Ids
    outside the model's vocabulary get -inf. As input, such ids are replaced by the model's last id."""
    known = ids.clamp(max=model.config.get_text_config().vocab_size - 1).to(model.device)
    with plain_decoding.plain(model):
        logits = model(input_ids=known[None], use_cache=False).logits[0, -count:, :vocabulary]
    return torch.nn.functional.pad(sampling.wide(logits).cpu(), (0, vocabulary - logits.shape[-1]), value=-torch.inf)


def next_logits(pair: ModelPair, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits [V] of target and draft after these ids, as `plain_logits`."""
    require_draft_model(pair)
    vocabulary = pair.target.config.get_text_config().vocab_size
    target, draft = (plain_logits(model, ids, 1, vocabulary)[0] for model in (pair.target, pair.draft))
    return target, draft


def laws(logits: tuple[Tensor, Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    """Return p and q at this temperature, float64 [V]. logits: of `next_logits`."""
    params = SamplingParams(temperature=temperature)
    return tuple(sampling.probabilities(part.double(), params) for part in logits)


def acceptance_runs(
    pair: ModelPair, prompt_sets: Mapping[str, Sequence[str]], lengths: Sequence[int], **options
) -> pd.DataFrame:
    """Return the accepted length of each decode step and row: columns prompts, k, row, step, accepted. Rows do not stop
    at EOS. Steps with a shorter draft at a row's end are left out. options: as in `generate`."""
    parts = []
    for (name, prompts), k in itertools.product(prompt_sets.items(), lengths):
        out = generate(pair, prompts, draft_length=k, eos_token_id=(), **options)
        steps = out.trace.steps.query("kind == 'decode' and drafted == @k")
        parts.append(steps[["row", "step", "accepted"]].assign(prompts=name, k=k))
    return pd.concat(parts, ignore_index=True)


def tokens_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return acceptance rate, α, and tokens per step (measured with 95% half-width, formula) per prompt set and k."""
    lines = {}
    for name, part in runs.groupby("prompts", sort=False):
        formula = expected_tokens(alpha(part.k, part.accepted), part.k.max())
        for k, steps in part.groupby("k"):
            mean, error = steps.accepted.mean(), half_width(steps.accepted)
            line = {"acceptance rate": mean / k, "α": alpha(steps.k, steps.accepted), "measured": mean + 1}
            lines[name, k] = line | {"error": error, "formula": formula[k]}
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis(["prompts", "k"])


def acceptance_by_slot(runs: pd.DataFrame) -> pd.DataFrame:
    """Return per prompt set and slot: reached (steps with all earlier slots accepted, any k), accepted (share)."""
    lines = {}
    for name, part in runs.groupby("prompts", sort=False):
        for slot in range(1, int(part.k.max()) + 1):
            reached = part[(part.k >= slot) & (part.accepted >= slot - 1)]
            lines[name, slot] = {"reached": len(reached), "accepted": float((reached.accepted >= slot).mean())}
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis(["prompts", "slot"])


def speed_table(
    pair: ModelPair, prompt_sets: Mapping[str, Sequence[str]], lengths: Sequence[int], costs: pd.DataFrame, **options
) -> pd.DataFrame:
    """Return the speed relative to regular decoding per prompt set and k: expected and measured.

    expected: tokens per step ÷ step cost. costs: from `measured_costs`, for as many rows. options: as in
    `benchmark.compare`. Columns: prompts, k, tokens per step, step cost, expected, measured, low, high (95% interval).
    """
    lines = []
    for name, prompts in prompt_sets.items():
        found = benchmark.compare(pair, prompts, methods=("regular",), other_lengths=lengths, **options).summary()
        for run in found[found.method != "regular"].itertuples():
            cost = predicted({"here": costs}, int(run.k), run.tokens_per_step).loc["here"]
            line = {"prompts": name, "k": int(run.k), **cost[["tokens per step", "step cost"]]}
            line |= {"expected": cost["speed-up"], "measured": run.over_regular, "low": run.low, "high": run.high}
            lines.append(line)
    return pd.DataFrame(lines)
