"""Lesson 05: drafters compared by cost, acceptance and memory, and the gain of an alignment."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bass_core.drafters import Drafter, FeatureDrafter, NgramDrafter, Setting
from bass_core.generation import generate
from bass_core.loading.model_pair import ModelPair, load_pair
from bass_core.loading.quantization import SELF_DRAFTS, parameter_count, quantized
from bass_core.loop.trace import Trace
from bass_lab import drafters
from bass_lab.drafters.layer_skip import LayerSkipDrafter, first_layers
from bass_lab.evaluation.scores import drawn, interval
from bass_lab.kept_session import KeptSession
from bass_lab.measure.clocks import Elapsed
from bass_lab.measure.modelled_costs import OVERHEAD, SHARE, best_fixed_length, modelled_costs
from bass_lab.measure.ratios import Ratio
from bass_lab.measure.roofline import DRAFT_310M, H100, TARGET_8B, Roofline
from bass_lab.pair.alignment import align
from bass_lab.pairs import require_draft_model
from bass_lab.study.written import Written
from bass_lab.texts import corpus
from bass_lab.texts.prompt_sets import CHATS, prompt_set

REGULAR = "regular"
PHASES = ("draft", "verify", "other")  # phases of a step
WARM_UP = 4  # tokens
LAUNCHES = {"single launches": 10.0, "CUDA graph": 0.5}  # launch ms of a modelled target pass
PAPERS_LAYERS = 4  # layers of the paper's draft model, 2048 wide


def pairs(drafts: Sequence[str], dtype: str | None = None, device: str | None = None) -> dict[str, ModelPair]:
    """Return the embedded target with each draft, by the last part of the draft's name.

    drafts: names of `load_pair`, or "layers:N". Raises ValueError if empty, and the errors of `load_pair`.
    """
    if not drafts:
        raise ValueError('drafts is empty; name at least one draft, such as ["draft"]')
    where = {"dtype": dtype or "float32", "device": device}
    found = {Path(name).name: load_pair(draft=drafters.named(name) or name, **where) for name in drafts}
    target = next(iter(found.values())).target  # shared by all pairs
    own = {name: quantized(target, kind) for name, kind in SELF_DRAFTS.items() if name in found}
    return {name: replace(pair, target=target, draft=own.get(name, pair.draft)) for name, pair in found.items()}


def runs(
    pairs: Mapping[str, ModelPair],
    prompts: Mapping[str, Sequence[str]],
    batches: Sequence[int],
    *,
    repeats: int,
    draft_length: int,
    seed: int = 0,
    **options,
) -> pd.DataFrame:
    """Return one line per prompt set, batch, repeat and draft, from interleaved runs on the same prompts past EOS.

    Regular decoding is one of the runs, and a short run warms up. Columns: prompts, batch, repeat, draft; accepted and
    judged: draft tokens; row_steps: decode steps of all rows; tokens: emitted; draft_ms: per draft token of every row;
    pass_ms: per target pass; ms: per token of the batch. Times are from decode steps. options: as in `generate`.
    """
    turns = {REGULAR: (next(iter(pairs.values())), 0)} | {name: (pair, draft_length) for name, pair in pairs.items()}
    lines, first, new = {}, next(iter(prompts)), options.pop("max_new_tokens", 128)
    for batch in batches:
        with ExitStack() as sessions:
            decoding = {
                draft: sessions.enter_context(KeptSession(pair, batch, draft_length=k, eos_token_id=(), **options))
                for draft, (pair, k) in turns.items()
            }
            for name, texts in prompts.items():
                found = lines[name, batch] = []
                for repeat in range(0 if name == first else 1, repeats + 1):
                    for draft, decode in decoding.items():
                        how = {"max_new_tokens": new if repeat else WARM_UP, "seed": seed + repeat}
                        trace = decode.settled(texts[:batch], **how).trace
                        line = {"prompts": name, "batch": batch, "repeat": repeat, "draft": draft}
                        found.append(line | _counted(trace))
    ordered = [line for name in prompts for batch in batches for line in lines[name, batch]]
    return pd.DataFrame(ordered).query("repeat > 0")


def earned(
    dtypes: Sequence[str], batches: Sequence[int], *, repeats: int, draft_length: int, most: int, questions: int = 4
) -> pd.DataFrame:
    """Return the speed of n-gram drafts with SmolLM2 relative to regular decoding, a line per dtype, prompt set, batch
    size and draft length (a fixed one, and the default policy). Repeats are interleaved; every text ends at its EOS.

    A batch of 1 decodes the first `questions` prompts one after the other. Columns: tokens per step, speed (median of
    paired ratios), low, high, identical (texts equal to regular decoding's). Raises ValueError if the model is not
    installed.
    """
    lines = []
    for dtype in dtypes:
        pair = load_pair("smollm2", draft=NgramDrafter(), dtype=dtype)
        for name, batch in itertools.product(CHATS, batches):
            prompts = prompt_set(name)[: questions if batch == 1 else batch]
            seconds, found = {0: [], draft_length: [], None: []}, {}
            for _ in range(repeats + 1):  # the first repeat warms up
                for k, taken in seconds.items():
                    with Elapsed(pair.device) as elapsed:
                        options = {"max_new_tokens": most, "draft_length": k, "max_batch_size": batch}
                        found[k] = generate(pair, prompts, **options)
                    taken.append(elapsed.seconds)
            for k in (draft_length, None):
                speed = Ratio.of(seconds[k][1:], seconds[0][1:])
                same = sum(map(torch.equal, found[0].sequences, found[k].sequences))
                line = {"dtype": dtype, "prompts": name, "batch": batch, "k": "default" if k is None else str(k)}
                line |= {"speed": speed.median, "low": speed.low, "high": speed.high}
                steps = found[k].trace.summary()["tokens_per_step"]
                lines.append(line | {"tokens per step": steps, "identical": f"{same} of {len(prompts)}"})
    return pd.DataFrame(lines).set_index(["dtype", "prompts", "batch", "k"])


def _counted(trace: Trace) -> dict[str, float]:
    decode = trace.steps.query("kind == 'decode'")
    times = {name: (f"{name}_ms", "first") for name in PHASES}
    steps = decode.groupby("step").agg(drafted=("drafted", "max"), **times)
    return {
        "accepted": int(decode.accepted.sum()),
        "judged": int(np.minimum(decode.accepted + 1, decode.drafted).sum()),
        "row_steps": len(decode),
        "tokens": int(decode.emitted.sum()),
        "draft_ms": steps.draft.sum() / steps.drafted.sum() if steps.drafted.any() else np.nan,
        "pass_ms": steps.verify.mean(),
        "ms": steps[list(PHASES)].to_numpy().sum() / decode.emitted.sum(),
    }


def compared(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one line per prompt set, batch and draft of `runs`: α, tokens per step, median times, and the speed
    relative to regular decoding, a median of paired ratios with 95% interval (low, high)."""
    lines = []
    for (prompts, batch), part in runs.groupby(["prompts", "batch"], sort=False):
        regular = part[part.draft == REGULAR].ms.to_numpy()
        for draft, each in part.groupby("draft", sort=False):
            total = each[["accepted", "judged", "row_steps"]].sum()
            line = {"prompts": prompts, "batch": batch, "draft": draft}
            line["alpha"] = total.accepted / total.judged if total.judged else np.nan
            line["tokens_per_step"] = 1 + total.accepted / total.row_steps
            line |= each[["draft_ms", "pass_ms", "ms"]].median().to_dict()
            speed, low, high = Ratio.of(each.ms, regular)
            lines.append(line | {"over_regular": speed, "low": low, "high": high})
    return pd.DataFrame(lines)


def over(runs: pd.DataFrame, draft: str, other: str) -> Ratio:
    """Return the speed of one draft of `runs` relative to another, paired over all prompt sets, batches and repeats."""
    times = runs.pivot(index=["prompts", "batch", "repeat"], columns="draft", values="ms")
    return Ratio.of(times[draft], times[other])


def shapes(ladder: Mapping[str, ModelPair]) -> pd.DataFrame:
    """Return layers, width and parameters of each draft model. Raises ValueError for a pair without a draft model."""
    lines = {}
    for name, pair in ladder.items():
        require_draft_model(pair)
        config = pair.draft.config
        line = {"layers": config.num_hidden_layers, "width": config.hidden_size}
        lines[name] = line | {"parameters": parameter_count(pair.draft)}
    return pd.DataFrame.from_dict(lines, orient="index")


def modelled_ladder(alphas: Mapping[int, float], batch: int) -> pd.DataFrame:
    """Return modelled H100 costs and speeds of 310M draft models by number of layers, with a 7.8B target.

    alphas: α by layers. A pass takes its roofline time at `SHARE` of the data sheet, plus a launch time proportional to
    layers (`LAUNCHES`; a fifth of the target's for `PAPERS_LAYERS`). Columns: launches, layers, α, draft ms, best k, ms
    (per token of a row), over_regular.
    """
    device = replace(H100, bandwidth=SHARE * H100.bandwidth, flops=SHARE * H100.flops)
    lines = []
    for how, launch_ms in LAUNCHES.items():
        for layers, alpha in alphas.items():
            heads = round(DRAFT_310M.heads * (PAPERS_LAYERS / layers) ** 0.5)  # parameters ~ layers × width²
            draft = replace(DRAFT_310M, layers=layers, heads=heads, kv_heads=heads)
            launches = {"target_launch": launch_ms / 1e3, "draft_launch": launch_ms / 5e3 * layers / PAPERS_LAYERS}
            rooflines = Roofline(TARGET_8B, device), Roofline(draft, device)
            cost = modelled_costs(*rooflines, overhead=OVERHEAD, **launches)
            k, speed = best_fixed_length(cost, batch, alpha)
            line = {"launches": how, "layers": layers, "α": alpha, "draft ms": 1e3 * float(cost.draft(batch, 1, 256))}
            regular_ms = 1e3 * float(cost.step(batch, 0, 256))
            lines.append(line | {"best k": k, "ms": regular_ms / speed, "over_regular": speed})
    return pd.DataFrame(lines)


def aligned(pair: ModelPair, tokens: int, seed: int) -> ModelPair:
    """Return the pair after `align` on functions of the standard library, with a progress bar."""
    with tqdm(total=1.0, disable=None, bar_format="{desc}: {percentage:.0f}%|{bar}| {elapsed}") as bar:

        def tell(stage: str, share: float) -> None:
            bar.set_description_str(stage)
            bar.n = share
            bar.refresh()

        own_texts = min(96, max(1, tokens // 10_000))
        texts = corpus.library_functions()
        return align(pair, texts, tokens=tokens, own_texts=own_texts, seed=seed, progress=tell)


def judged(draft: PreTrainedModel, texts: Written) -> pd.DataFrame:
    """Return per text: judged (tokens), and accepted, the mean number of accepted draft tokens Σ min(p, q)."""
    accepted = [float(torch.minimum(p, q).sum()) for p, q in zip(texts.p, texts.read_by(draft), strict=True)]
    return pd.DataFrame({"accepted": accepted, "judged": list(map(len, texts.p))})


def alphas(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """Return α of two draft models on the same prompts (`judged`), and the gain: value with 95% interval (low, high),
    percentile bootstrap over prompts."""
    rows = len(before)
    times = np.concatenate([np.ones((1, rows)), drawn(rows)])  # the first line is the original sample
    first, second = (times @ each.accepted / (times @ each.judged) for each in (before, after))
    lines = {}
    for name, found in {"before": first, "after": second, "gain": second - first}.items():
        low, high = interval(found[1:])
        lines[name] = {"value": found[0], "low": low, "high": high}
    return pd.DataFrame.from_dict(lines, orient="index")


def keeps(pairs: Mapping[str, ModelPair]) -> pd.DataFrame:
    """Return per drafter: its own parameters, and its device memory in bytes per token of a row."""
    lines = {}
    for name, pair in pairs.items():
        model, drafter, element = _model_of(pair), pair.drafter, pair.target.dtype.itemsize
        kept = 0 if model is None else _cache_bytes(model, element)
        if drafter.wants_hidden:
            kept += pair.target.config.get_text_config().hidden_size * element
        own = 0 if model is None else _own_parameters(model, pair.target)
        lines[name] = {"drafter": type(drafter).__name__, "own parameters": own, "bytes per token": kept}
    return pd.DataFrame.from_dict(lines, orient="index")


def _model_of(pair: ModelPair) -> PreTrainedModel | None:
    """Return the drafter's model with a KV cache, or None."""
    drafter = pair.drafter
    if isinstance(drafter, LayerSkipDrafter):
        return first_layers(pair.target, drafter.layers)
    if isinstance(drafter, FeatureDrafter):
        return drafter.head
    return next(iter(drafter.models), None)


def _cache_bytes(model: PreTrainedModel, element: int) -> int:
    config = model.config.get_text_config()
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * element


def _own_parameters(model: PreTrainedModel, target: PreTrainedModel) -> int:
    """Return the number of parameters that are not shared with the target."""
    shared = {id(parameter) for parameter in target.parameters()}
    return parameter_count(model) - sum(each.numel() for each in model.parameters() if id(each) in shared)


class BigramTable(Drafter):
    """Base of drafters that use only the last token. logits: [V, V], [x] for the token after x."""

    name = "bigram draft"

    def __init__(self, logits: Tensor):
        self.logits = logits

    def begin(self, setting: Setting) -> Self:
        mine = super().begin(setting)
        mine.logits = self.logits[: setting.vocabulary, : setting.vocabulary].to(setting.target.device)
        return mine


def bigram_logits(tokenizer: PreTrainedTokenizerBase, functions: int = 500) -> Tensor:
    """Return logits [V, V] of the token after each token, from functions of the embedded models' training set."""
    texts = corpus.generated_functions(functions) + corpus.library_functions()[:functions]
    counts = np.full((len(tokenizer), len(tokenizer)), 1e-3)
    for ids in tokenizer(texts)["input_ids"]:
        np.add.at(counts, (ids[:-1], ids[1:]), 1.0)
    return torch.from_numpy(np.log(counts))
