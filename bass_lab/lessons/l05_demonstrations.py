"""Lesson 05: drafts side by side: cost, acceptance, what each keeps, what an alignment gains."""

from __future__ import annotations

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

from bass_core.drafters import Drafter, FeatureDrafter, Setting
from bass_core.loading.model_pair import ModelPair, load_pair
from bass_core.loading.quantization import SELF_DRAFTS, parameter_count, quantized
from bass_core.loop.trace import Trace
from bass_lab import drafters
from bass_lab.drafters.layer_skip import LayerSkipDrafter, first_layers
from bass_lab.evaluation.scores import drawn, interval
from bass_lab.kept_session import KeptSession
from bass_lab.measure.modelled_costs import OVERHEAD, SHARE, best_fixed_length, modelled_costs
from bass_lab.measure.ratios import Ratio
from bass_lab.measure.roofline import DRAFT_310M, H100, TARGET_8B, Roofline
from bass_lab.pair.alignment import align
from bass_lab.pairs import require_draft_model
from bass_lab.study.written import Written
from bass_lab.texts import corpus

REGULAR = "regular"
PHASES = ("draft", "verify", "other")  # of a step
WARM_UP = 4  # tokens
LAUNCHES = {"every kernel launched": 10.0, "a recorded graph": 0.5}  # ms to launch a pass of the modelled target
PAPERS_LAYERS = 4  # of the paper's draft, 2048 wide


def pairs(drafts: Sequence[str], dtype: str | None = None, device: str | None = None) -> dict[str, ModelPair]:
    """The embedded target with each of these drafts (names of `load_pair`, or "layers:N"), by the last part of their
    names.

    Raises ValueError where none is named, and as `load_pair`.
    """
    if not drafts:
        raise ValueError('name at least one draft, such as ["draft"]; got none')
    where = {"dtype": dtype or "float32", "device": device}
    found = {Path(name).name: load_pair(draft=drafters.named(name) or name, **where) for name in drafts}
    target = next(iter(found.values())).target  # one for all
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
    """Every draft, and regular decoding, on the same prompts past EOS: a line per prompt set, batch, repeat and draft.

    They take turns after a run of few tokens. Columns: prompts, batch, repeat, draft; accepted and judged: drafted
    tokens; row_steps: decode steps of all rows; tokens: emitted; draft_ms: of a drafted token of every row; pass_ms: of
    a target pass; ms: of a token of the batch. Times are of decode steps. options: as in `generate`.
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
    """A line per prompt set, batch and draft of `runs`: α and tokens per step, medians of the times, and the speed over
    regular decoding as median of paired ratios with its 95% interval (low, high)."""
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
    """How much faster one draft of `runs` is than another, from the pairs of all prompt sets, batches and repeats."""
    times = runs.pivot(index=["prompts", "batch", "repeat"], columns="draft", values="ms")
    return Ratio.of(times[draft], times[other])


def shapes(ladder: Mapping[str, ModelPair]) -> pd.DataFrame:
    """Layers, width and parameters of each draft. Raises ValueError for one that is no model."""
    lines = {}
    for name, pair in ladder.items():
        require_draft_model(pair)
        config = pair.draft.config
        line = {"layers": config.num_hidden_layers, "width": config.hidden_size}
        lines[name] = line | {"parameters": parameter_count(pair.draft)}
    return pd.DataFrame.from_dict(lines, orient="index")


def modelled_ladder(alphas: Mapping[int, float], batch: int) -> pd.DataFrame:
    """Modelled H100 costs of drafts of 310M parameters by layers, beside a target of 7.8B, and their worth at that α.

    Passes take their bytes or operations, at `SHARE` of the data sheet, and launches by layers (`LAUNCHES`; a draft of
    `PAPERS_LAYERS` has a fifth of the target's). Columns: launches, layers, α, draft ms, best k, ms (per token of a
    row), over regular.
    """
    device = replace(H100, bandwidth=SHARE * H100.bandwidth, flops=SHARE * H100.flops)
    lines = []
    for how, launch_ms in LAUNCHES.items():
        for layers, alpha in alphas.items():
            heads = round(DRAFT_310M.heads * (PAPERS_LAYERS / layers) ** 0.5)  # parameters: layers × width²
            draft = replace(DRAFT_310M, layers=layers, heads=heads, kv_heads=heads)
            launches = {"target_launch": launch_ms / 1e3, "draft_launch": launch_ms / 5e3 * layers / PAPERS_LAYERS}
            rooflines = Roofline(TARGET_8B, device), Roofline(draft, device)
            cost = modelled_costs(*rooflines, overhead=OVERHEAD, **launches)
            k, speed = best_fixed_length(cost, batch, alpha)
            line = {"launches": how, "layers": layers, "α": alpha, "draft ms": 1e3 * float(cost.draft(batch, 1, 256))}
            regular_ms = 1e3 * float(cost.step(batch, 0, 256))
            lines.append(line | {"best k": k, "ms": regular_ms / speed, "over regular": speed})
    return pd.DataFrame(lines)


def aligned(pair: ModelPair, tokens: int, seed: int) -> ModelPair:
    """`align` on functions of the standard library alone, with a progress bar; few tokens have fewer own texts."""
    with tqdm(total=1.0, disable=None, bar_format="{desc}: {percentage:.0f}%|{bar}| {elapsed}") as bar:

        def tell(stage: str, share: float) -> None:
            bar.set_description_str(stage)
            bar.n = share
            bar.refresh()

        own_texts = min(96, max(1, tokens // 5_000))
        texts = corpus.library_functions()
        return align(pair, texts, tokens=tokens, own_texts=own_texts, seed=seed, progress=tell)


def judged(draft: PreTrainedModel, texts: Written) -> pd.DataFrame:
    """Per text: tokens judged were all drafted after those before, and the mean number accepted: Σ min(p, q)."""
    accepted = [float(torch.minimum(p, q).sum()) for p, q in zip(texts.p, texts.read_by(draft), strict=True)]
    return pd.DataFrame({"accepted": accepted, "judged": list(map(len, texts.p))})


def alphas(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """α of two drafts on the same prompts (`judged`), and the gain: value with its 95% interval (low, high), percentile
    bootstrap over prompts."""
    rows = len(before)
    times = np.concatenate([np.ones((1, rows)), drawn(rows)])  # first the prompts as they are
    first, second = (times @ each.accepted / (times @ each.judged) for each in (before, after))
    lines = {}
    for name, found in {"before": first, "after": second, "gain": second - first}.items():
        low, high = interval(found[1:])
        lines[name] = {"value": found[0], "low": low, "high": high}
    return pd.DataFrame.from_dict(lines, orient="index")


def keeps(pairs: Mapping[str, ModelPair]) -> pd.DataFrame:
    """Of each drafter: parameters of its own, and the bytes that it has kept on the device for each token of a row."""
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
    """What goes over a cache of rows to draft."""
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
    """Those that are not the target's tensors."""
    shared = {id(parameter) for parameter in target.parameters()}
    return parameter_count(model) - sum(each.numel() for each in model.parameters() if id(each) in shared)


class BigramTable(Drafter):
    """A base for drafters that go by the last token alone. logits: [V, V], by token: logarithms of what follows."""

    name = "bigram draft"

    def __init__(self, logits: Tensor):
        self.logits = logits

    def begin(self, setting: Setting) -> Self:
        mine = super().begin(setting)
        mine.logits = self.logits[: setting.vocabulary, : setting.vocabulary].to(setting.target.device)
        return mine


def bigram_logits(tokenizer: PreTrainedTokenizerBase, functions: int = 500) -> Tensor:
    """Logits [V, V] of what follows each token in functions that the embedded models were trained on."""
    texts = corpus.generated_functions(functions) + corpus.library_functions()[:functions]
    counts = np.full((len(tokenizer), len(tokenizer)), 1e-3)
    for ids in tokenizer(texts)["input_ids"]:
        np.add.at(counts, (ids[:-1], ids[1:]), 1.0)
    return torch.from_numpy(np.log(counts))
