"""What a draft model would have had accepted, text position by text position: recorded once, replayed under any policy.

Token verification at one position: the draft proposes x ~ q; it is kept with probability min(1, p(x)/q(x)), or else
replaced by a draw from norm(max(0, p - q)). So the token y is emitted by acceptance with probability
q(y) · min(1, p(y)/q(y)) = min(p(y), q(y)), and emitted at all with probability p(y). Hence, for the token that stands
in the text,

    P(accepted | y emitted) = min(p(y), q(y)) / p(y) = min(1, q(y)/p(y)),

and given y nothing about acceptance depends on what follows, nor on the decisions at other positions, which have random
numbers of their own. (Where nothing was drafted y ~ p as well: the text's law is the target's whatever was drafted.) So
the joint law of text and accepted counts can be drawn in this order: a text from the target alone, a coin per position
with the probability above, and then any draft lengths that depend on the past: a step that drafts k tokens from
position t on accepts as many as there are heads in a row, at most k. One teacher-forced pass of each model over texts
of the target's says all that is needed, before any policy is known. (The mean of the coin over y is the sum of
min(p, q): Leviathan et al. 2023, theorem 3.5.)

Temperature 0 is the special case of one-hot p and q: the coin is certain.

Policies that look at the draft's distributions need one thing more. After a rejected draft the draft model goes on from
a token that is not in the text. Given a rejection, that token has the law norm(max(0, q - p)), independent of y: one
such token per position, and what the draft model would draft after it, are recorded as a *rollout*. Policies that
choose among drafts by the drafted tokens' own probabilities find these beside the distributions' maxima.
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
    """Texts of the target's, and the draft's chances at each of their tokens. N sequences of T generated tokens.

    p, q: float32 [N, T], probabilities of the text's token under target and draft, processed (temperature 0: 1 and 1 or
    0). entropy (nats), maximum, chance: float32 [N, T], of the draft's distribution at temperature 1, as `Signals` and
    `HiddenDraft` have them; chance: of the text's token (0 for the target's own ids). rejected_chance: float16 [N, T],
    of a draft rejected there, drawn once. rollout_*: float16 [N, T, R], the same of the next R drafts. NaN: none can
    be. prompt_lengths, lengths: int64 [N]; a text ends at lengths, EOS included, and goes on for drafts beyond. meta:
    how it was recorded.
    """

    p: np.ndarray
    q: np.ndarray
    entropy: np.ndarray
    maximum: np.ndarray
    chance: np.ndarray
    rejected_chance: np.ndarray
    rollout_entropy: np.ndarray
    rollout_maximum: np.ndarray
    rollout_chance: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    meta: dict = field(default_factory=dict)

    def __post_init__(self):
        n, t = self.p.shape
        rollouts = (n, t, self.rollout_entropy.shape[-1])
        wanted = dict.fromkeys(("q", "entropy", "maximum", "chance", "rejected_chance"), (n, t))
        wanted |= dict.fromkeys(("rollout_entropy", "rollout_maximum", "rollout_chance"), rollouts)
        wanted |= {"prompt_lengths": (n,), "lengths": (n,)}
        for name, shape in wanted.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} must have the shape {shape}, got {getattr(self, name).shape}")
        if n == 0 or rollouts[-1] == 0 or ((self.lengths < 1) | (self.lengths > t)).any():
            raise ValueError("a trace has at least one sequence and rollouts of a token or more, and 1 <= lengths <= T")

    @property
    def accept(self) -> np.ndarray:
        """float64 [N, T]: the chance that a draft was accepted, given the token that stands there."""
        p, q = self.p.astype(float), self.q.astype(float)
        return np.divide(q, p, out=np.ones_like(p), where=q < p)

    @property
    def alpha(self) -> float:
        """Mean of `accept` over the texts, first tokens left out (the prefill's)."""
        places = np.arange(self.p.shape[1])
        return float(self.accept[(places >= 1) & (places < self.lengths[:, None])].mean())

    def past_eos(self) -> AcceptanceTrace:
        """The same texts, going on to their last recorded token: what a benchmark decodes."""
        return replace(self, lengths=np.full_like(self.lengths, self.p.shape[1]))

    def save(self, path: str | Path) -> None:
        """Write as a compressed .npz, whatever the name."""
        arrays = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "meta"}
        packed = io.BytesIO()
        np.savez_compressed(packed, **arrays, meta=np.array(json.dumps(self.meta)))
        write_whole(path, packed.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> AcceptanceTrace:
        """Read what `save` wrote. Raises ValueError for another file, and for one that lacks an array."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
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
        """Made-up texts on which each draft is accepted with chance alpha.

        regimes (spread, duration): the chance switches between alpha - spread and alpha + spread, in spells of
        geometric length, mean `duration`. The draft knows: its largest probability is the chance and its entropy that
        of such a coin. Accepted drafts are its favourites; a rejected one has the smaller of 1 - m and m. Raises
        ValueError for chances outside [0, 1] and spells shorter than a token.
        """
        spread, duration = regimes or (0.0, 1.0)
        if not (abs(spread) <= alpha <= 1 - abs(spread) and duration >= 1):
            raise ValueError(f"chances must be in [0, 1], spells >= 1 token; got alpha={alpha}, regimes={regimes}")
        generator = np.random.default_rng(seed)
        shape = sequences, length + rollout
        switches = generator.random(shape) < np.where(np.arange(shape[1]) == 0, 0.5, 1 / duration)
        chance = alpha + spread * np.where(switches.cumsum(1) % 2, 1.0, -1.0)  # [N, T + R]
        certain = (chance <= 0) | (chance >= 1)
        inner = np.where(certain, 0.5, chance)
        entropy = np.where(certain, 0.0, -inner * np.log(inner) - (1 - inner) * np.log(1 - inner))
        after = np.arange(length)[:, None] + np.arange(1, rollout + 1)  # [T, R]
        other = np.minimum(chance, 1 - chance)
        favourite = generator.random((sequences, length, rollout)) < chance[:, after]
        return cls(
            p=np.ones((sequences, length), np.float32),
            q=chance[:, :length].astype(np.float32),
            entropy=entropy[:, :length].astype(np.float32),
            maximum=chance[:, :length].astype(np.float32),
            chance=chance[:, :length].astype(np.float32),
            rejected_chance=other[:, :length].astype(np.float16),
            rollout_entropy=entropy[:, after].astype(np.float16),
            rollout_maximum=chance[:, after].astype(np.float16),
            rollout_chance=np.where(favourite, chance[:, after], other[:, after]).astype(np.float16),
            prompt_lengths=np.full(sequences, prompt_length),
            lengths=np.full(sequences, length),
            meta={"synthetic": True, "alpha": alpha, "regimes": regimes and list(regimes), "seed": seed},
        )


def shipped(name: str) -> AcceptanceTrace:
    """Load the embedded pair's 96 texts of 128 tokens at temperature 0.2, of "mini" or "library". Raises ValueError for
    others."""
    checks.one_of("prompt_set", name, PROMPT_SETS)
    return AcceptanceTrace.load(SHIPPED / f"{name}.npz")
