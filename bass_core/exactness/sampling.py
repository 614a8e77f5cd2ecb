"""Logits -> probabilities, in transformers' order: temperature, top-k, top-p, min-p, after the row's processors.

Target and draft logits are processed alike. Exactness refers to the *processed* target distribution (Leviathan et al.
2023, section 2.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from bass_core.exactness import randomness


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, applied in transformers' order. temperature 0 is greedy decoding.

    top_k 0, top_p 1 and min_p 0 switch the respective step off. Raises ValueError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        require_number("temperature", self.temperature, lambda t: t >= 0, "a finite number >= 0 (0 = greedy)")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be an integer >= 0 (0 = off), got {self.top_k!r}")
        require_number("top_p", self.top_p, lambda p: 0 < p <= 1, "in (0, 1] (1 = off)")
        require_number("min_p", self.min_p, lambda p: 0 <= p <= 1, "in [0, 1] (0 = off)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_cold(self) -> bool:
        """True if logits / temperature may overflow float32."""
        return self.temperature < 1e-6

    def changed(self, **own: float | None) -> SamplingParams:
        """Return a copy with these values; None keeps a value. Returns `self` if nothing changes."""
        given = {name: value for name, value in own.items() if value is not None}
        return replace(self, **given) if given else self

    @property
    def only_temperature(self) -> bool:
        """True if no other parameter than the temperature changes the model's distribution."""
        return self == SamplingParams(self.temperature)


@dataclass(frozen=True, eq=False)
class MixedParams:
    """Sampling parameters that differ between the rows of a batch. Greedy rows draw from a one-hot distribution.

    groups: pairs of parameters and the int64 [n] indices of the rows with these parameters.
    """

    groups: tuple[tuple[SamplingParams, Tensor], ...]
    greedy: ClassVar[bool] = False
    only_temperature: ClassVar[bool] = False


def of_rows(params: Sequence[SamplingParams], device: torch.device) -> SamplingParams | MixedParams:
    """Return the parameters of a batch from the parameters of each row."""
    first = params[0]
    if all(each is first for each in params):  # the common case; identity is cheaper than equality
        return first
    rows: dict[SamplingParams, list[int]] = {}
    for row, each in enumerate(params):
        rows.setdefault(each, []).append(row)
    if len(rows) == 1:
        return first
    return MixedParams(tuple((each, torch.tensor(found, device=device)) for each, found in rows.items()))


def require_number(name: str, value: float, in_range: Callable[[float], bool], accepted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be {accepted}, got {value!r}")
    if not in_range(value) or not math.isfinite(value):  # NaN fails every comparison
        raise ValueError(f"{name} must be {accepted}, got {value!r}")


def wide(logits: Tensor) -> Tensor:
    """Return half-precision logits as float32, since rounding would create ties. float64 logits stay float64."""
    return logits if logits.dtype == torch.float64 else logits.float()


def probabilities(logits: Tensor, params: SamplingParams | MixedParams) -> Tensor:
    """Return the processed distribution [..., V], one-hot at temperature 0. float64 for float64 logits, else float32.

    logits: [..., V], after the processors. `MixedParams` index the first dimension.
    """
    if isinstance(params, MixedParams):
        probs = torch.empty_like(logits, dtype=torch.promote_types(logits.dtype, torch.float32))
        for each, rows in params.groups:
            probs[rows] = probabilities(logits[rows], each)
        return probs
    logits = wide(logits)
    if params.greedy:
        return one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    if params.is_cold:  # subtract the maximum against overflow; divide in float64, where the temperature is not 0
        colder = (logits - logits.amax(-1, keepdim=True)).double() / params.temperature
        logits = colder.to(logits.dtype)
    elif params.temperature != 1:
        logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        smallest_kept = logits.topk(params.top_k, dim=-1).values[..., -1:]  # [..., 1]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if params.top_p < 1:
        logits = _keep_top_p(logits, params.top_p)
    probs = logits.softmax(-1)
    if params.min_p > 0:
        probs = probs.where(probs >= params.min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Mask all ids except the smallest set of most probable ids with mass top_p (Holtzman et al. 2020)."""
    ordered, ids = logits.sort(dim=-1, descending=False, stable=True)
    # Add in float64 and round: a GPU's order of summation varies, and the rounded mass must not depend on this order.
    mass = randomness.added_up(ordered.softmax(-1)).to(ordered.dtype)
    dropped = mass <= 1 - top_p
    dropped[..., -1].fill_(False)
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, ids, dropped), -torch.inf)


def one_hot(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return the one-hot encoding, bool [..., V]. On a CPU, `torch.nn.functional.one_hot` first checks all values."""
    return tokens[..., None] == torch.arange(vocabulary, device=tokens.device)
