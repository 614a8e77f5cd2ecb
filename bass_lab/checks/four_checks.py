"""The four checks of a pair: greedy, sampled, coupled and half-precision text, each compared with its reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bass_core.drafters import NgramDrafter
from bass_core.exactness.sampling import SamplingParams
from bass_core.generation import generate
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.trace import StepEvent
from bass_core.model import attention, probe
from bass_core.model.encoder_decoder import FEATURES
from bass_core.policies.protocol import DraftLengthPolicy, RowsView
from bass_lab.checks import plain_decoding
from bass_lab.checks.goodness_of_fit import POWER, detectable, g_test, holm
from bass_lab.pairs import context_of, in_dtype

ALPHA = 1e-4  # probability that exact models fail the sampled check
TOKENS, TOP_K = 5, 3  # new tokens and top_k of the sampled check: 3^5 = 243 outcomes
ALONE = "temperature alone"
TEMPERATURES = (0.7, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0)  # not 1: raw and processed distributions would be too similar
COOLER = (0.4, 0.7, 1.5, 2.0)  # without top_k: a low temperature leaves few likely tokens

Finding = tuple[bool, str, dict]  # passed, tested, details
Law = dict[tuple[int, ...], float]


@dataclass(frozen=True)
class Subject:
    """Input of a check. new: tokens to generate per row. The second list of prompts is for the greedy check alone;
    `switches` describes these prompts. tell: receives the finished share of the check, 0 to 1."""

    original: ModelPair
    dtype: torch.dtype
    prompts: list[Tensor]
    new: int
    samples: int
    seed: int
    compile: str
    beside: list[Tensor]
    switches: str
    tell: Callable[[float], None] = lambda share: None

    @cached_property
    def pair(self) -> ModelPair:
        """The pair in `dtype`, copied if a model has another dtype."""
        return in_dtype(self.original, self.dtype)

    @property
    def note(self) -> str:
        if self.pair is self.original:
            return name_of_dtype(self.dtype)
        return f"{name_of_dtype(self.dtype)} copies (the target is {name_of_dtype(self.original.target.dtype)})"


def name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _divergences(found: Sequence[Tensor], alone: Sequence[tuple[Tensor, Tensor]]) -> list[dict]:
    """Return the first difference of each row from the single row. gap: best logit minus the found token's logit."""
    lines = []
    for row, (tokens, (expected, logits)) in enumerate(zip(found, alone, strict=True)):
        differing = (tokens != expected).nonzero()
        if len(differing):
            first = int(differing[0])
            best = logits[first].topk(2).values
            gap, top2 = float(best[0] - logits[first, tokens[first]]), float(best[0] - best[1])
            lines.append({"row": row, "position": first, "gap": gap, "top2_gap": top2})
    return lines


def greedy(subject: Subject) -> Finding:
    """Check that every row of every batch equals `transformers.generate` of the single row, token for token."""
    pair, prompts = subject.pair, subject.prompts + subject.beside
    rows, alone = len(prompts), [plain_decoding.greedy(pair.target, prompt, subject.new) for prompt in prompts]
    paths, refused = _paths(pair)
    runs = []
    cases = [("auto", k) for k in (1, 3, 8, None)] + [(path, 3) for path in paths]
    for done, (path, k) in enumerate(cases):
        subject.tell(done / len(cases))
        options = {"attention": path, "compile": "off" if path == "split" else subject.compile, "eos_token_id": ()}
        out = generate(pair, prompts, max_new_tokens=subject.new, draft_length=k, **options)
        different = _divergences(out.sequences, alone)
        meta = out.trace.meta
        run = {"attention": path, "path": meta["attention"], "compile": meta["compile"], "draft_length": k}
        runs.append(run | _counts(out.trace.steps) | {"identical": rows - len(different), "divergences": different})
    identical, of = sum(run["identical"] for run in runs), rows * len(runs)
    tested = (
        f"{identical} of {of} rows equal transformers.generate of the single row; {_sizes(prompts)}, "
        f"{subject.new} new tokens, {_total(runs)}; draft lengths 1, 3, 8 and default; attention "
        f"auto (= {runs[0]['path']}) and {', '.join(paths)}; {subject.note}"
    )
    tested += f"; {subject.switches}" if subject.switches else ""
    return identical == of, tested, {"rows": rows, "runs": runs, "refused": refused}


def _sizes(prompts: Sequence[Tensor]) -> str:
    """Describe the number of prompts and their lengths."""
    if prompts[0].is_floating_point():
        return f"{len(prompts)} audio inputs"
    lengths = sorted(map(len, prompts))
    if len(prompts) == 1:
        return f"one prompt of {lengths[0]} tokens"
    return f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens"


def _paths(pair: ModelPair) -> tuple[list[str], dict[str, str]]:
    """Return the attention paths that all models support, and the reason against each other path."""
    paths, refused = [], {}
    for path in attention.PATHS:
        try:
            for model in pair.models:
                probe.resolve(model, path)
            paths.append(path)
        except ValueError as error:
            refused[path] = str(error)
    return paths, refused


def _counts(steps: pd.DataFrame) -> dict[str, int]:
    """Count tokens by origin. Every step emitted accepted + 1 tokens, because no row ended early."""
    drafting, full = steps.drafted > 0, steps.accepted == steps.drafted
    counts = {"accepted": steps.accepted, "recovered": ~full, "bonus": drafting & full, "regular": ~drafting}
    return {kind: int(count.sum()) for kind, count in counts.items()}


def _total(runs: Sequence[dict]) -> str:
    return ", ".join(f"{sum(run[kind] for run in runs)} {kind}" for kind in ("accepted", "recovered", "bonus"))


class _ByRow(DraftLengthPolicy):
    """Mix draft lengths 1, 2 and 3 in one batch."""

    def plan(self, rows: RowsView) -> Tensor:
        return torch.from_numpy(1 + rows.ids % 3)


def sampled(subject: Subject) -> Finding:
    """Test the joint distribution of the first tokens: G-tests with Holm's correction. The tests cover token and block
    verification with top_k, and temperature alone (GPUs have kernels for this case). Outcomes are texts."""
    pair, samples = subject.pair, subject.samples
    beginnings = _beginnings(subject)
    prompt, heat, law = _spread_law(beginnings, TEMPERATURES, partial(_of_few, pair.target))
    likely_law = partial(plain_decoding.likely_law, pair.target, most=TOP_K)
    beginning, cool, likely = _spread_law(beginnings, COOLER, likely_law)
    batch = min(samples, 512, max(8, 2**24 // pair.target.config.get_text_config().vocab_size))
    options = {"max_new_tokens": TOKENS, "eos_token_id": (), "draft_length": _ByRow(), "compile": subject.compile}
    options |= {"num_return_sequences": samples, "max_batch_size": batch}
    few = {"temperature": heat, "top_k": TOP_K}
    ways = {rule: (prompt, law, few | {"verification": rule}) for rule in ("token", "block")}
    ways[ALONE] = beginning, likely, {"temperature": cool}
    tests = {}
    for number, (name, (start, expected, how)) in enumerate(ways.items()):
        on_step = _telling(subject, number / len(ways), len(ways) * samples * TOKENS)
        out = generate(pair, [start], seed=subject.seed + number, on_step=on_step, **how, **options)
        texts = [tuple(row.tolist()) for row in out.sequences]
        texts = plain_decoding.as_likely(texts, expected) if name == ALONE else texts
        tests[name] = g_test(texts, expected) | _counts(out.trace.steps)
    p_values = {rule: test["p_value"] for rule, test in tests.items()}
    rejected = holm(p_values, ALPHA)
    tested = (
        f"G-test of the first {TOKENS} tokens, {len(law)} outcomes ({ALONE} {len(likely)}), {samples} rows each: "
        f"{', '.join(f'{rule} p = {p:.2g}' for rule, p in p_values.items())} (alpha {ALPHA:g}, Holm); "
        f"{_total(list(tests.values()))}; temperature {heat:g}, top_k {TOP_K} for both models, or {cool:g} alone; "
        f"draft lengths 1, 2, 3 in one batch, {_sizes([prompt])}; a total variation of "
        f"{detectable(law, samples, ALPHA / len(tests)):.3f} is detected with probability {POWER:.0%}; {subject.note}"
    )
    return not rejected, tested, {"rejected": rejected, "temperature": heat, "tests": tests}


def _telling(subject: Subject, before: float, tokens: int) -> Callable[[StepEvent], None]:
    """Return a callback that reports the finished share after every step. before: share at the start; tokens: total."""
    emitted = 0

    def on_step(event: StepEvent) -> None:
        nonlocal emitted
        emitted += sum(map(len, event.new_tokens))
        subject.tell(before + emitted / tokens)

    return on_step


def _beginnings(subject: Subject) -> list[Tensor]:
    """Return short candidate prompts. For n-gram drafting, the prompt repeats its beginning."""
    if subject.pair.target.main_input_name == FEATURES:
        return subject.prompts[:4]  # audio inputs have one length
    room = int(min(context_of(subject.pair), 64)) - TOKENS
    if isinstance(subject.pair.draft, PreTrainedModel):
        return [prompt[: min(size, room)] for prompt in subject.prompts[:4] for size in (1, 2, 4, 8)]
    start = subject.prompts[0][: min(6, max(1, room // 3))]
    follows, _ = plain_decoding.greedy(subject.pair.target, start, max(1, min(5, room - 2 * len(start))))
    return [torch.cat([start, follows, start])]


def _of_few(target: PreTrainedModel, prompt: Tensor, temperature: float, tokens: int) -> Law:
    return plain_decoding.exact_law(target, prompt, SamplingParams(temperature=temperature, top_k=TOP_K), tokens)


def _spread_law(
    beginnings: Sequence[Tensor], temperatures: Sequence[float], law_of: Callable[[Tensor, float, int], Law]
) -> tuple[Tensor, float, Law]:
    """Return a prompt, a temperature and the target's distribution over continuations. The temperature is the lowest
    with an entropy of one bit per token, else the temperature of the widest distribution. (A nearly certain or a flat
    distribution tests nothing.)"""
    widest, best, chosen = -1.0, temperatures[0], beginnings[0]
    for temperature in temperatures:
        for prompt in beginnings:
            entropy = -sum(p * math.log(p) for p in law_of(prompt, temperature, 3).values() if p > 0)  # nats
            if entropy > widest:
                widest, best, chosen = entropy, temperature, prompt
        if widest >= 3 * math.log(2):
            break
    return chosen, best, law_of(chosen, best, TOKENS)


def coupled(subject: Subject) -> Finding:
    """Check that coupled verification samples the text of draft length 0, for all drafters, lengths and batches."""
    pair, rows = subject.pair, len(subject.prompts)
    other = NgramDrafter() if isinstance(pair.draft, PreTrainedModel) else pair.target
    pairs = {"own": pair, "other": replace(pair, draft=other)}
    options = {"max_new_tokens": subject.new, "temperature": 0.8, "verification": "coupled", "eos_token_id": ()}
    options |= {"compile": subject.compile, "seed": subject.seed}
    regular = generate(pair, subject.prompts, draft_length=0, **options).sequences
    runs = []
    cases = [("own", 1, rows), ("own", 3, rows), ("own", None, rows), ("own", 5, 1), ("own", 2, 3)]
    cases += [("other", 3, rows), ("other", 4, 3)]
    for done, (draft, k, batch) in enumerate(cases):
        subject.tell(done / len(cases))
        out = generate(pairs[draft], subject.prompts, draft_length=k, max_batch_size=batch, **options)
        same = sum(map(torch.equal, out.sequences, regular))
        run = {"draft": draft, "draft_length": k, "batch": batch, "identical": same}
        runs.append(run | _counts(out.trace.steps))
    identical, of = sum(run["identical"] for run in runs), rows * len(runs)
    tested = (
        f"{identical} of {of} rows equal draft length 0; temperature 0.8, {subject.new} new tokens, {_total(runs)}; "
        f"draft lengths 1 to 5 and default; batches of 1, 3 and {rows}; the pair's draft and "
        f"{'an n-gram lookup' if isinstance(other, NgramDrafter) else 'the target itself'}; {subject.note}"
    )
    return identical == of, tested, {"rows": rows, "runs": runs}


def half(subject: Subject) -> Finding:
    """Check that half-precision rows diverge from the single row only where two logits are closer than the noise.

    The noise is the largest change of a top logit between three computations of transformers: decoding, one pass over
    the row, and one over the padded batch. Two logits change order if both move by half the gap: twice is allowed.
    """
    pair, prompts = subject.pair, subject.prompts
    alone = [plain_decoding.greedy(pair.target, prompt, subject.new) for prompt in prompts]
    allowed = 2 * plain_decoding.numeric_noise(pair.target, prompts, alone)
    lines = []
    for done, (decoding, k) in enumerate((("no speculation", 0), ("draft length 3", 3), ("default policy", None))):
        subject.tell((1 + done) / 4)
        options = {"max_new_tokens": subject.new, "compile": subject.compile, "eos_token_id": (), "trace": "off"}
        out = generate(pair, prompts, draft_length=k, **options)
        lines += [{"decoding": decoding} | line for line in _divergences(out.sequences, alone)]
    beyond = sum(line["gap"] > allowed for line in lines)
    control = sum(line["decoding"] == "no speculation" for line in lines)
    tested = (
        f"{len(lines) - control} of {2 * len(prompts)} speculative rows diverge from the single row, without "
        f"speculation {control} of {len(prompts)}; {beyond} divergences have a gap beyond the noise (largest gap "
        f"{max((line['gap'] for line in lines), default=0):.3g}, allowed {allowed:.3g}: twice the difference between "
        f"transformers' own passes); {subject.new} new tokens; {subject.note}"
    )
    return beyond == 0, tested, {"allowed_gap": allowed, "divergences": lines}
