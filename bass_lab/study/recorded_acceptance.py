"""Acceptance recorded at each position of a text, for replays under any draft-length policy.

Token verification at one position: the draft model proposes x ~ q. The token x is accepted with probability
min(1, p(x)/q(x)), or else replaced by a draw from norm(max(0, p - q)). So a token y is emitted by acceptance with
probability q(y) · min(1, p(y)/q(y)) = min(p(y), q(y)), and is emitted at all with probability p(y). Hence, for the
token y in the text,

    P(accepted | y emitted) = min(p(y), q(y)) / p(y) = min(1, q(y)/p(y)),

and given y, acceptance depends neither on later tokens nor on other positions, because each position has its own
random numbers. (Without a draft token, y ~ p as well: the text always has the target's distribution.) So text and
accepted lengths can be drawn in this order: a text from the target alone, a coin per position with the probability
above, and then any draft lengths that depend on the past. A step with draft length k at position t accepts the
following run of heads, at most k tokens. One teacher-forced pass of each model over the target's texts gives all
probabilities, before a policy is chosen. (The mean of the coin over y is the sum of min(p, q): Leviathan et al. 2023,
theorem 3.5.)

Temperature 0 is the special case of one-hot p and q: the coin is certain.

Policies that read the draft's distributions need more data. After a rejection, the draft model continues from a token
outside the text. Given the rejection, this token has the distribution norm(max(0, q - p)), independent of y. The trace
contains one such token per position, and the draft model's continuation, as a *rollout*. For policies that choose among
draft tokens, the trace also contains the probability of each draft token.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from bass_core import checks
from bass_core.environment import write_whole
from bass_core.loading.model_pair import ASSETS
from bass_lab.texts.prompt_sets import PROMPT_SETS

SHIPPED = ASSETS / "acceptance"


@dataclass(frozen=True, eq=False)
class AcceptanceTrace:
    """N texts of the target with T generated tokens each, and the probabilities of both models at each token.

    p, q: float32 [N, T], processed probabilities of the text's token under target and draft (at temperature 0: p = 1, q
    = 0 or 1). entropy (nats), maximum: float32 [N, T], of the draft's distribution at temperature 1, as in `Signals`.
    rollout_*: float16 [N, T, R], of the next R draft tokens after a draft token that was rejected at this position,
    drawn once. NaN: no such draft token is possible. prompt_lengths, lengths: int64 [N]. A text ends at lengths, EOS
    included. The arrays continue past the end for draft tokens there. meta: settings of the recording.
    """

    p: np.ndarray
    q: np.ndarray
    entropy: np.ndarray
    maximum: np.ndarray
    rollout_entropy: np.ndarray
    rollout_maximum: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    meta: dict = field(default_factory=dict)

    def __post_init__(self):
        n, t = self.p.shape
        rollouts = (n, t, self.rollout_entropy.shape[-1])
        wanted = dict.fromkeys(("q", "entropy", "maximum"), (n, t))
        wanted |= dict.fromkeys(("rollout_entropy", "rollout_maximum"), rollouts)
        wanted |= {"prompt_lengths": (n,), "lengths": (n,)}
        for name, shape in wanted.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} must have the shape {shape}, got {getattr(self, name).shape}")
        if n == 0 or rollouts[-1] == 0 or ((self.lengths < 1) | (self.lengths > t)).any():
            raise ValueError("a trace needs sequences, rollouts of at least one token, and 1 <= lengths <= T")

    @property
    def accept(self) -> np.ndarray:
        """Acceptance probability of a draft token, given the text's token at the position: float64 [N, T]."""
        p, q = self.p.astype(float), self.q.astype(float)
        return np.divide(q, p, out=np.ones_like(p), where=q < p)

    @property
    def alpha(self) -> float:
        """Mean of `accept` over the texts, without the first tokens (from the prefill)."""
        places = np.arange(self.p.shape[1])
        return float(self.accept[(places >= 1) & (places < self.lengths[:, None])].mean())

    def past_eos(self) -> AcceptanceTrace:
        """Return the same texts up to the last recorded token, as in benchmarks."""
        return replace(self, lengths=np.full_like(self.lengths, self.p.shape[1]))

    def save(self, path: str | Path) -> None:
        """Write a compressed .npz file under any name."""
        arrays = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "meta"}
        packed = io.BytesIO()
        np.savez_compressed(packed, **arrays, meta=np.array(json.dumps(self.meta)))
        write_whole(path, packed.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> AcceptanceTrace:
        """Read a file of `save`. Raises ValueError for other files and for missing arrays."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {each.name: stored[each.name] for each in fields(cls) if each.name in stored.files}
        except (ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
            raise ValueError(f"{path} holds no trace; `bass record` makes one") from error
        if missing := [each.name for each in fields(cls) if each.name not in arrays]:
            raise ValueError(f"{path} holds no trace: it lacks {', '.join(missing)}; record it anew with `bass record`")
        return cls(**arrays | {"meta": json.loads(str(arrays["meta"]))})

    @classmethod
    def synthetic(
        cls,
        *,
        alpha: float,
        length: int,
        sequences: int,
        seed: int = 0,
        regimes: tuple[float, float] | None = None,
        prompt_length: int = 128,
        rollout: int = 8,
    ) -> AcceptanceTrace:
        """Return a trace of made-up texts with acceptance probability alpha at each position.

        regimes (spread, duration): the probability switches between alpha - spread and alpha + spread, in spells of
        geometric length with mean `duration`. The draft model is calibrated: its largest probability m is the
        acceptance probability, and its entropy is that of the coin. Raises ValueError for invalid probabilities and
        spells below one token.
        """
        spread, duration = regimes or (0.0, 1.0)
        if not (abs(spread) <= alpha <= 1 - abs(spread) and duration >= 1):
            raise ValueError(f"alpha ± spread must be in [0, 1], duration >= 1; got alpha={alpha}, regimes={regimes}")
        generator = np.random.default_rng(seed)
        shape = sequences, length + rollout
        switches = generator.random(shape) < np.where(np.arange(shape[1]) == 0, 0.5, 1 / duration)
        chance = alpha + spread * np.where(switches.cumsum(1) % 2, 1.0, -1.0)  # [N, T + R]
        certain = (chance <= 0) | (chance >= 1)
        inner = np.where(certain, 0.5, chance)
        entropy = np.where(certain, 0.0, -inner * np.log(inner) - (1 - inner) * np.log(1 - inner))
        after = np.arange(length)[:, None] + np.arange(1, rollout + 1)  # [T, R]
        return cls(
            p=np.ones((sequences, length), np.float32),
            q=chance[:, :length].astype(np.float32),
            entropy=entropy[:, :length].astype(np.float32),
            maximum=chance[:, :length].astype(np.float32),
            rollout_entropy=entropy[:, after].astype(np.float16),
            rollout_maximum=chance[:, after].astype(np.float16),
            prompt_lengths=np.full(sequences, prompt_length),
            lengths=np.full(sequences, length),
            meta={"synthetic": True, "alpha": alpha, "regimes": regimes and list(regimes), "seed": seed},
        )


def shipped(name: str) -> AcceptanceTrace:
    """Return the recorded trace of the embedded pair for "mini" or "library": 96 texts of 128 tokens at temperature
    0.2. Raises ValueError for other names."""
    checks.one_of("prompt_set", name, PROMPT_SETS)
    return AcceptanceTrace.load(SHIPPED / f"{name}.npz")
