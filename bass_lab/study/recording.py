"""Record an `AcceptanceTrace`: the target writes texts, and one teacher-forced pass of each model reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bass_core import checks, options
from bass_core.drafters import Context, ModelDrafter, Setting
from bass_core.exactness import randomness, sampling
from bass_core.exactness.randomness import Key, Purpose, StepKeys
from bass_core.exactness.sampling import SamplingParams
from bass_core.generation import generate
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.trace import StepEvent
from bass_core.model import probe
from bass_core.policies.protocol import DraftLengthPolicy, RowsView, Signals
from bass_core.prompts import prompt_list, token_ids
from bass_lab.pairs import require_draft_model
from bass_lab.study.recorded_acceptance import AcceptanceTrace

ROWS_AT_ONCE = 64  # rows of a pass
WRITING = 0.5  # approximate share of the time for writing texts


def record(
    pair: ModelPair,
    prompts: str | Sequence[str] | Sequence[Tensor],
    *,
    samples: int = 1,
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
    rollout: int = 8,
    progress: Callable[[str, float], None] = lambda doing, share: None,
) -> AcceptanceTrace:
    """Return the acceptance trace of `samples` texts per prompt (prompt-major), written by the target alone.

    rollout: recorded draft tokens after a rejection. progress: receives the current stage and the finished share of the
    work, 0 to 1. Raises ValueError for a pair without a draft model, and the errors of `generate`.
    """
    prompts = prompt_list(prompts)
    require_draft_model(pair)
    written = 0

    def on_step(event: StepEvent) -> None:
        nonlocal written
        written += sum(map(len, event.new_tokens))
        progress("writing texts", WRITING * written / (len(prompts) * samples * max_new_tokens))

    texts = generate(
        pair,
        prompts,
        num_return_sequences=checks.integer("samples", samples, least=1),
        max_new_tokens=checks.integer("max_new_tokens", max_new_tokens, least=1),
        temperature=temperature,
        seed=seed,
        draft_length=0,
        max_batch_size=min(len(prompts) * samples, ROWS_AT_ONCE),
        eos_token_id=(),
        on_step=on_step,
        trace="off",
    ).sequences
    repeated = [prompt for prompt in prompts for _ in range(samples)]

    def read(share: float) -> None:
        progress("reading the texts with both models", WRITING + (1 - WRITING) * share)

    return teacher_forced(pair, repeated, texts, temperature=temperature, seed=seed, rollout=rollout, progress=read)


@torch.inference_mode()
def teacher_forced(
    pair: ModelPair,
    prompts: Sequence[str | Tensor],
    texts: Sequence[Tensor],
    *,
    temperature: float,
    seed: int = 0,
    rollout: int = 8,
    progress: Callable[[float], None] = lambda share: None,
) -> AcceptanceTrace:
    """Return the acceptance trace of given texts, one per prompt. texts: of equal length, written at `temperature` past
    EOS (`generate(…, eos_token_id=())`, with any draft). progress: receives the finished share."""
    require_draft_model(pair)
    if len({len(text) for text in texts}) != 1:
        raise ValueError(f"texts must have equal lengths, got {sorted({len(text) for text in texts})}")
    params = SamplingParams(temperature)
    vocabulary = pair.target.config.get_text_config().vocab_size
    ids = token_ids(pair, prompts)
    eos = sorted(options.eos_ids(options.generation_config(pair.target, None), None, vocabulary))
    paths = [probe.resolve(model) for model in pair.models]
    drafter = pair.drafter.begin(Setting(pair.target, paths, ROWS_AT_ONCE, vocabulary))
    lines = []
    with drafter.runner:
        drafter.grow(max(map(len, ids)) + len(texts[0]))
        for row, (prompt, text) in enumerate(zip(ids, texts, strict=True)):
            progress(row / len(texts))
            # The text may have used the streams of (seed, row), so rollouts use others.
            stream = randomness.stream(seed, len(texts) + row)
            most = checks.integer("rollout", rollout, least=1)
            lines.append(_recorded(pair, drafter, params, prompt, text, stream, most))
    ends = [torch.isin(text, torch.tensor(eos, dtype=torch.int64)).nonzero()[:1, 0] for text in texts]
    meta = {"temperature": temperature, "seed": seed, "rows": len(texts), "max_new_tokens": len(texts[0])}
    return AcceptanceTrace(
        **{name: np.stack([line[name] for line in lines]) for name in lines[0]},
        prompt_lengths=np.array([len(prompt) for prompt in ids]),
        lengths=np.array([int(end[0]) + 1 if len(end) else len(texts[0]) for end in ends]),
        meta=meta,
    )


def _recorded(
    pair: ModelPair,
    drafter: ModelDrafter,
    params: SamplingParams,
    prompt: Tensor,
    text: Tensor,
    stream: int,
    rollout: int,
) -> dict[str, np.ndarray]:
    """Return the line of one text in each array of the trace."""
    ids = torch.cat([prompt, text]).to(pair.device)
    written = ids[len(prompt) :, None]  # [T, 1]
    known = ids.clamp(max=drafter.draft_vocabulary - 1)  # replaces ids that only the target has, as in ModelDrafter
    logits = pair.draft(input_ids=known[None], use_cache=False).logits[0, len(prompt) - 1 : -1, : drafter.vocabulary]
    q = _law(logits, params, logits.argmax(-1))
    q = F.pad(q, (0, drafter.vocabulary - q.shape[-1]))  # [T, V]
    own = logits.double().softmax(-1)  # at temperature 1
    entropy, maximum = torch.special.entr(own).sum(-1), own.amax(-1)  # [T] each
    logits = pair.target(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    p = _law(logits, params, written[:, 0])
    p_text, q_text = p.gather(-1, written)[:, 0], q.gather(-1, written)[:, 0]
    after = np.full((2, len(text), rollout), np.nan, np.float16)
    # The first token comes from the prefill. The last token is never drafted: a step ends with the target's token.
    rejected = (q_text < p_text).nonzero()[:, 0]
    rejected = rejected[(rejected >= 1) & (rejected <= len(text) - 3)]
    if len(rejected):
        excess = (q[rejected] - p[rejected]).clamp(min=0)
        excess = torch.where(excess.sum(-1, keepdim=True) > 0, excess, q[rejected])  # p = q up to rounding
        keys = Key(torch.full_like(rejected, stream), rejected, Purpose.TARGET)
        drawn = randomness.draw(excess, keys)[:, None]
        at = len(prompt) + rejected
        tokens = known.repeat(len(at), 1).scatter(1, at[:, None], drawn)
        lengths = (len(text) - 2 - rejected).clamp(max=rollout)
        found = _rollouts(drafter, params, known, tokens, at.cpu().numpy(), lengths.cpu().numpy(), stream)
        after[:, rejected.cpu().numpy(), : found.shape[-1]] = found
    line = {"p": p_text, "q": q_text, "entropy": entropy, "maximum": maximum}
    line = {name: each.float().cpu().numpy() for name, each in line.items()}
    return line | dict(zip(("rollout_entropy", "rollout_maximum"), after, strict=True))


def _law(logits: Tensor, params: SamplingParams, chosen: Tensor) -> Tensor:
    """Return the processed distribution [T, V]; at temperature 0, one-hot at the chosen ids [T]."""
    if params.greedy:
        return F.one_hot(chosen, logits.shape[-1]).float()
    return sampling.probabilities(logits, params)


class _Listener(DraftLengthPolicy):
    """Record the signals before each draft token, and never stop."""

    def __init__(self):
        self.heard: list[Tensor] = []

    def plan(self, rows: RowsView) -> int:
        raise NotImplementedError("this policy records a drafter and cannot plan steps of an engine")

    def keep_drafting(self, signals: Signals) -> Tensor:
        self.heard.append(torch.stack([signals.entropy, signals.maximum]).cpu())
        return torch.ones_like(signals.drafting)


def _rollouts(
    drafter: ModelDrafter,
    params: SamplingParams,
    text: Tensor,
    tokens: Tensor,
    at: np.ndarray,
    lengths: np.ndarray,
    stream: int,
) -> np.ndarray:
    """Return entropy and maximum before each draft token after position at[n] of row n: [2, n, R], NaN beyond lengths.
    text: ids [S] shared by all rows [n, S] up to `at`. The draft model reads them once."""
    found = np.full((2, len(at), int(lengths.max())), np.nan)
    drafter.prefill(text[None], [len(text)], range(1))
    cached = drafter.save_row(0, len(text))
    for first in range(0, len(at), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        ends = torch.as_tensor(at[rows] + 1, device=text.device)
        for place, end in enumerate(at[rows].tolist()):
            drafter.load_row(range(place, place + 1), cached, end)
        keys = StepKeys(torch.full_like(ends, stream), ends, int(lengths[rows].max()))
        listener = _Listener()
        context = Context(
            range(len(ends)), tokens[rows], tokens[rows].cpu().numpy(), ends, at[rows] + 1, keys, params, prompts=ends
        )
        drafter.draft(context, lengths[rows], listener)
        heard = torch.stack(listener.heard, -1).numpy()  # [2, rows, slots]
        beyond = np.arange(heard.shape[-1]) >= lengths[rows, None]
        found[:, rows, : heard.shape[-1]] = np.where(beyond, np.nan, heard)
    return found
