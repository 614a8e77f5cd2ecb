"""Lesson 10: bytes of a pass, distance of a lossy rule, and time and accuracy of each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from bass_core.loading.model_pair import ModelPair
from bass_core.loading.quantization import QuantizedLinear, kind_of, quantized
from bass_core.policies.costs import CostModel
from bass_lab.evaluation import Problem, compare, scores
from bass_lab.evaluation.scores import drawn, interval
from bass_lab.kept_session import KeptSession
from bass_lab.lessons.l10_lossy import lossy
from bass_lab.measure.modelled_costs import OVERHEAD, SHARE, modelled_costs
from bass_lab.measure.ratios import Ratio
from bass_lab.measure.roofline import H100, Roofline, StepWork
from bass_lab.named_pairs import SHAPES, named_config
from bass_lab.study.written import Written

FULL = "full"
KINDS = (FULL, "int8", "int4")
LAUNCH = 5e-4, 1e-4  # launch seconds of a target pass and a draft pass, as in `modelled_h100`


def pass_bytes(model: PreTrainedModel) -> dict[str, int]:
    """Return bytes of weights read per pass: linear layers that `quantized` changes, and the rest."""
    head = model.get_output_embeddings()
    linear = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Linear | QuantizedLinear) and module is not head
        for parameter in module.parameters()
    }
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)} - {id(head.weight)}
    read = [each for each in model.parameters() if id(each) not in tables]
    layers = sum(each.nbytes for each in read if id(each) in linear)
    return {"linear layers": layers, "the rest": sum(each.nbytes for each in read) - layers}


def copies(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """Return the model and its quantized copies, by kind."""
    return {kind: model if kind == FULL else quantized(model, kind) for kind in KINDS}


def paper_models(role: str) -> dict[str, PreTrainedModel]:
    """Return a model of the paper's sizes in bfloat16 and its quantized copies, without memory for weights."""
    shape = SHAPES["paper-7.8b"]
    with torch.device("meta"):
        config = named_config(shape.target if role == "target" else shape.draft, role)
        return copies(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def bytes_table(models: Mapping[tuple[str, str], Mapping[str, PreTrainedModel]]) -> pd.DataFrame:
    """Return MB per pass by pair, role and kind of weights, and the reduction relative to full weights."""
    lines = []
    for (pair, role), kinds in models.items():
        full = sum(pass_bytes(kinds[FULL]).values())
        for kind, model in kinds.items():
            parts = pass_bytes(model)
            total = sum(parts.values())
            line = {"pair": pair, "role": role, "weights": kind}
            line |= {f"{name}, MB": size / 1e6 for name, size in parts.items()}
            lines.append(line | {"a pass, MB": total / 1e6, "times fewer": full / total})
    return pd.DataFrame(lines).set_index(["pair", "role", "weights"])


def step_bytes(table: pd.DataFrame, draft_length: int) -> pd.DataFrame:
    """Return MB of weights of a speculative step with full weights, an INT4 draft, and an INT4 target (`bytes_table` of
    one pair)."""
    size = table["a pass, MB"]
    ways = {"both full": (FULL, FULL), "draft in int4": (FULL, "int4"), "target in int4": ("int4", FULL)}
    lines = {
        name: {"target": size["target", target], "drafts": draft_length * size["draft", draft]}
        for name, (target, draft) in ways.items()
    }
    found = pd.DataFrame.from_dict(lines, orient="index").assign(step=lambda each: each.target + each.drafts)
    return found.assign(fewer=found.step.iloc[0] / found.step)


def lossy_law(p: Tensor, q: Tensor, epsilon: float) -> Tensor:
    """Return the output distribution [T, V] of the lossy rule: likely draft tokens, and a draw from p for all other
    draft tokens."""
    kept = q * _likely(p, epsilon)
    return kept + (1 - kept.sum(-1, keepdim=True)) * p


class Positions(NamedTuple):
    """Distributions [T, V] at every position of the target's text, per prompt. target: of the target; drafts: of draft
    models, by name."""

    target: list[Tensor]
    drafts: dict[str, list[Tensor]]


def positions(
    pair: ModelPair,
    drafts: Mapping[str, PreTrainedModel],
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
) -> Positions:
    """Return the distributions of the target and each draft model on texts that the target writes."""
    written = Written.by(pair, prompts, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    return Positions(written.p, {name: written.read_by(draft) for name, draft in drafts.items()})


def acceptances(found: Positions) -> pd.DataFrame:
    """Return per draft model: α = Σ min(p, q), mean over positions with 95% interval (bootstrap over prompts), and the
    paired change from the first draft model (change, from, to)."""
    sums = [
        [float(torch.minimum(p, q).sum()) for p, q in zip(found.target, each, strict=True)]
        for each in found.drafts.values()
    ]
    value, low, high = _means(np.array(sums).T, found.target)
    change, least, most = _means(np.array(sums).T - np.array(sums)[0][:, None], found.target)
    columns = {"α": value, "low": low, "high": high, "change": change, "from": least, "to": most}
    return pd.DataFrame(columns, index=list(found.drafts))


def lossy_distances(found: Positions, epsilons: Sequence[float]) -> pd.DataFrame:
    """Return TV of the lossy rule's next token from the target, with the first draft model, and α. The lines are the
    exact rule and each ε. tv: mean with 95% interval (bootstrap over prompts)."""
    q = next(iter(found.drafts.values()))
    together = list(zip(found.target, q, strict=True))
    tv = [[0.0] * len(together)]
    kept = [[float(torch.minimum(*each).sum()) for each in together]]
    for epsilon in epsilons:
        tv.append([float((lossy_law(p, q, epsilon) - p).abs().sum() / 2) for p, q in together])
        kept.append([float((q * _likely(p, epsilon)).sum()) for p, q in together])
    value, low, high = _means(np.array(tv).T, found.target)
    alpha, *_ = _means(np.array(kept).T, found.target)
    names = ["exact", *(f"ε = {each}" for each in epsilons)]
    return pd.DataFrame({"tv": value, "low": low, "high": high, "α": alpha}, index=names)


def _likely(p: Tensor, epsilon: float) -> Tensor:
    return p >= epsilon * p.amax(-1, keepdim=True)


def _means(sums: np.ndarray, texts: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return means over positions, and intervals over prompts. sums: [P, M], per prompt; texts: for the counts."""
    counts, times = np.array([len(text) for text in texts], float), drawn(len(texts))
    low, high = interval(times @ sums / (times @ counts)[:, None])
    return sums.sum(0) / counts.sum(), low, high


@dataclass(frozen=True)
class Variant:
    """Decoding method. epsilon: of the lossy rule, None for the exact rule. draft_length: 0 is regular decoding."""

    pair: ModelPair
    draft_length: int
    epsilon: float | None = None


def ways(pair: ModelPair, draft_length: int, epsilon: float) -> dict[str, Variant]:
    """Return the compared methods by name."""
    return {
        "regular": Variant(pair, 0),
        "draft": Variant(pair, draft_length),
        "draft int8": Variant(pair.quantized({"draft": "int8"}), draft_length),
        "draft int4": Variant(pair.quantized({"draft": "int4"}), draft_length),
        "own int4 copy drafts": Variant(replace(pair, draft=quantized(pair.target, "int4")), draft_length),
        "target int8": Variant(pair.quantized({"target": "int8"}), draft_length),
        "target int4": Variant(pair.quantized({"target": "int4"}), draft_length),
        f"lossy, ε = {epsilon}": Variant(pair, draft_length, epsilon),
    }


def timed(ways: Mapping[str, Variant], prompts: Sequence[str], *, repeats: int, **options) -> pd.DataFrame:
    """Return per method: ms between two tokens of a row (median over interleaved repeats), tokens per step, α, and the
    speed relative to the first method (median of paired ratios with 95% interval). Texts continue past EOS. options: as
    in `generate`."""
    lines, new = [], options.pop("max_new_tokens", 128)
    decoding: dict[str, KeptSession] = {}
    with ExitStack() as sessions:
        for repeat in range(repeats + 1):
            for name, way in ways.items():
                with lossy(way.epsilon):
                    if name not in decoding:
                        how = options | {"draft_length": way.draft_length, "eos_token_id": ()}
                        decoding[name] = sessions.enter_context(KeptSession(way.pair, len(prompts), **how))
                    trace = decoding[name].settled(prompts, max_new_tokens=new, seed=repeat).trace
                decode = trace.steps.query("kind == 'decode'")
                steps = decode.groupby("step")[["draft_ms", "verify_ms", "other_ms"]].first()
                per_token = len(prompts) * steps.to_numpy().sum() / decode.emitted.sum()
                summary = trace.summary()
                line = {"repeat": repeat, "way": name, "ms": per_token}
                lines.append(line | {"tokens per step": summary["tokens_per_step"], "α": summary["alpha"]})
    runs = pd.DataFrame(lines).query("repeat > 0")
    found = runs.groupby("way", sort=False)[["ms", "tokens per step", "α"]].median()
    base = runs[runs.way == next(iter(ways))].ms.to_numpy()
    ratios = {name: Ratio.of(part.ms, base) for name, part in runs.groupby("way", sort=False)}
    return found.join(pd.DataFrame.from_dict(ratios, orient="index", columns=["speed", "low", "high"]))


def passed(ways: Mapping[str, Variant], problems: Sequence[Problem], *, samples: int, seed: int) -> pd.DataFrame:
    """Return per method: pass@1 with 95% interval, and the paired change from the first method (change, from, to)."""
    runs = {}
    for name, way in ways.items():
        with lossy(way.epsilon):
            how = {"methods": ["batched"], "n": samples, "draft_length": way.draft_length, "seed": seed}
            runs[name] = compare(way.pair, problems, **how)["batched"].samples
    first, lines = next(iter(runs.values())), {}
    for name, run in runs.items():
        value = scores.score(run).set_index("metric").loc["pass@1"]
        change = scores.difference(run, first, [np.inf]).set_index("metric").loc["pass@1"]
        line = {"pass@1": value.value, "low": value.low, "high": value.high}
        lines[name] = line | {"change": change.value, "from": change.low, "to": change.high}
    return pd.DataFrame.from_dict(lines, orient="index")


def h100_costs(table: pd.DataFrame, target: str, draft: str, *, own_copy: bool = False) -> CostModel:
    """Return MODELLED H100 costs of the paper's models with bytes of `table`. own_copy: the target's copy drafts."""
    device = replace(H100, bandwidth=SHARE * H100.bandwidth, flops=SHARE * H100.flops)
    drafts = "target" if own_copy else "draft"

    def roofline(role: str, kind: str) -> Roofline:
        work = StepWork.of(named_config(getattr(SHAPES["paper-7.8b"], role), role), torch.bfloat16)
        size = table.loc[(role, kind), "a pass, MB"]
        return Roofline(replace(work, weights=round(1e6 * size / work.element)), device)

    launch, small = LAUNCH
    return modelled_costs(
        roofline("target", target),
        roofline(drafts, draft),
        target_launch=launch,
        draft_launch=launch if own_copy else small,
        overhead=OVERHEAD,
    )


def on_h100(
    table: pd.DataFrame, found: pd.DataFrame, ways: Mapping[str, Variant], batch: int, kv: int = 512
) -> pd.Series:
    """Return MODELLED ms between two tokens of a row on an H100: step time / tokens per step measured here."""
    lines = {}
    for name, way in ways.items():
        own = name.startswith("own")
        draft = (kind_of(way.pair.draft) if isinstance(way.pair.draft, PreTrainedModel) else None) or FULL
        cost = h100_costs(table, kind_of(way.pair.target) or FULL, draft, own_copy=own)
        lines[name] = 1e3 * float(cost.step(batch, way.draft_length, kv)) / found.loc[name, "tokens per step"]
    return pd.Series(lines, name="H100 (modelled), ms")
