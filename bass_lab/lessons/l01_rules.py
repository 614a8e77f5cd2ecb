"""Lesson 01: exact output distributions of three acceptance rules, one right and two wrong, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor

Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # p, q [V] -> acceptance probabilities [V], redraw [V]
Model = Callable[[tuple[int, ...]], Tensor]  # text -> distribution of the next token [V]


def total_variation(p: Tensor, q: Tensor) -> float:
    """Return half the sum of |p - q|: 0 for equal distributions, 1 for distributions without a common outcome."""
    return float((p - q).abs().sum() / 2)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Return min(1, p/q) per id [V]; 1 if q is 0, because such an id is never drafted."""
    return torch.where(q > 0, (p / q).clamp(max=1), 1.0)


def exact(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Redraw from norm(max(0, p - q)): the exact rule (Leviathan et al. 2023, algorithm 1). q = p is never rejected."""
    left = (p - q).clamp(min=0)
    return acceptance(p, q), left / left.sum() if left.sum() > 0 else p


def redraw_from_p(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: replace a rejected token by a draw from p."""
    return acceptance(p, q), p


def likely_enough(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: accept every token with at least a third of the target's largest probability."""
    return (p >= p.max() / 3).double(), p


RULES: dict[str, Rule] = {"the rule": exact, "redraw from p": redraw_from_p, "accept the likely": likely_enough}


def emitted_law(p: Tensor, q: Tensor, rule: Rule) -> Tensor:
    """Return the distribution [V] of the token at one position: drafted and accepted, or redrawn."""
    accept, redraw = rule(p, q)
    kept = q * accept
    return kept + (1 - kept.sum()) * redraw


def text_law(target: Model, draft: Model, k: int, rule: Rule, text: tuple[int, ...] = ()) -> dict[tuple, float]:
    """Return the probability of every text of k + 1 more tokens: a step with draft length k, then regular decoding."""
    p = target(text)
    if k == 0:
        return {(*text, x): float(p[x]) for x in range(len(p))}
    accept, redraw = rule(p, draft(text))
    kept = draft(text) * accept  # drafted and accepted
    replaced = (1 - kept.sum()) * redraw
    found: dict[tuple, float] = {}
    for x in range(len(p)):
        after = (*text, x)
        for mass, rest in ((kept, text_law(target, draft, k - 1, rule, after)), (replaced, regular(target, k, after))):
            for longer, chance in rest.items():
                found[longer] = found.get(longer, 0.0) + float(mass[x]) * chance
    return found


def regular(target: Model, tokens: int, text: tuple[int, ...] = ()) -> dict[tuple, float]:
    """Return the probability of every text of `tokens` more tokens, with one target pass per token."""
    if tokens == 0:
        return {text: 1.0}
    p = target(text)
    parts = [(float(p[x]), regular(target, tokens - 1, (*text, x))) for x in range(len(p))]
    return {longer: mass * chance for mass, rest in parts for longer, chance in rest.items()}


def distances(count: int = 200, seed: int = 0) -> pd.DataFrame:
    """Return the largest total variation from the target over `count` pairs p, q of each kind, one column per rule. The
    last line uses a tenth as many pairs of models over 3 ids."""
    generator, lines = torch.Generator().manual_seed(seed), {}
    for kind in ("p and q at random", "with zeros", "q certain of one token", "q = p"):
        pairs = [_pair(kind, generator) for _ in range(count)]
        lines[f"one token, {kind}"] = {
            name: max(total_variation(p, emitted_law(p, q, rule)) for p, q in pairs) for name, rule in RULES.items()
        }
    models = [(_random_model(generator), _random_model(generator)) for _ in range(count // 10)]
    lines["texts of 3 tokens, k = 2"] = {
        name: max(_text_distance(target, draft, 2, rule) for target, draft in models) for name, rule in RULES.items()
    }
    return pd.DataFrame.from_dict(lines, orient="index")


def _pair(kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    size = int(torch.randint(2, 7, (), generator=generator))
    p, q = _random_law(size, generator), _random_law(size, generator)
    if kind == "with zeros":
        for law in (p, q):
            law[torch.randperm(size, generator=generator)[: size // 2]] = 0
            law /= law.sum()
    if kind == "q certain of one token":
        q = torch.eye(size, dtype=torch.float64)[int(torch.randint(size, (), generator=generator))]
    return (p, p) if kind == "q = p" else (p, q)


def _random_law(size: int, generator: torch.Generator) -> Tensor:
    mass = torch.rand(size, generator=generator, dtype=torch.float64) ** 3 + 1e-9  # cubed, for likely and unlikely ids
    return mass / mass.sum()


def _random_model(generator: torch.Generator) -> Model:
    texts = itertools.chain.from_iterable(itertools.product(range(3), repeat=n) for n in range(3))
    return {text: _random_law(3, generator) for text in texts}.__getitem__


def _text_distance(target: Model, draft: Model, k: int, rule: Rule) -> float:
    wanted, found = regular(target, k + 1), text_law(target, draft, k, rule)
    return sum(abs(wanted[text] - found[text]) for text in wanted) / 2
