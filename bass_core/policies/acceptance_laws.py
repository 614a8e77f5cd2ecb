"""How many of a step's drafts are accepted, learnt as steps go by: posteriors over a grid of laws, in common or by row.

Text has easy and hard places: a draft whose predecessors were accepted is likelier to be accepted, too. So a law says
that each step draws a chance of acceptance of its own from a Beta distribution of mean m and concentration c. The
chance S_j that j drafts in a row are accepted is then Π (m c + i) / (c + i) over i < j (for large c: m^j). A step is as
likely under a law as its accepted counts are; older steps count less (`DECAY` per step). Unlike a frequency per slot
this learns from slot 1 what to expect of slot 9, and from the first steps how sure to be.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

DECAY = 0.96  # of the weight of what was seen, per step
MEANS = np.append(np.linspace(0.02, 0.98, 25), 0.995)
CONCENTRATIONS = np.array([0.1, 3.0, 8.0, 24.0])  # of drafts all or none of which are accepted, to equal ones
ALL_OR_NONE = 0.05  # chance of the first, before anything was seen
USELESS = 0.1  # chance, before anything was seen, that hardly a draft is accepted
UNLIKE = 0.2  # chance that a text is like none of those that calibration has met
ROUNDS = 3  # of fitting a mixture of laws to the texts that calibration has met; many would leave one law per text
OWN = 0.7  # what a row's step counts for the row itself: steps of a text are not independent of each other
OTHERS = 0.4  # of that, what it counts for another row
MOST_OTHERS = 2  # rows that all others together count as at most
UNLIKE_OTHERS = 0.02  # chance that a row is not like the others: a loop among essays


class Laws(NamedTuple):
    """The grid, for steps of up to `slots` drafts."""

    survival: np.ndarray  # [laws, slots + 1], S_j
    tokens: np.ndarray  # [laws, slots + 1], 1 + S_1 + … + S_j: what a step with j drafts yields, the target's included
    likelihoods: np.ndarray  # [2 (slots + 1), laws], log: j accepted drafts and none refused (even lines), one (odd)
    prior: np.ndarray  # [laws], chance of each before anything was seen

    def likelihood(self, tried: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        """Log-likelihood [B, laws] of rows that had `accepted` of their `tried` drafts accepted, [B] each."""
        return self.likelihoods.take(2 * accepted + (accepted < tried), 0)

    def expected_tokens(self, prior: np.ndarray, evidence: np.ndarray) -> np.ndarray:
        """Tokens [..., slots + 1] of a step with each number of drafts, under laws that were so likely before (> 0) and
        make what was seen so likely (log): [..., laws] each."""
        found = prior * np.exp(evidence - evidence.max(-1, keepdims=True)) @ self.tokens
        return found / found[..., :1]  # without drafts it is one token under all laws


@functools.cache  # a decode begins with posteriors of its own
def laws(slots: int) -> Laws:
    """The grid of laws: `MEANS` × `CONCENTRATIONS`."""
    m, c = (each.reshape(-1, 1) for each in np.meshgrid(MEANS, CONCENTRATIONS))
    chance = (m * c + np.arange(slots)) / (c + np.arange(slots))  # [laws, slots], given all drafts before
    survival = np.concatenate([np.ones_like(m), chance.cumprod(1)], 1)
    refused = -np.diff(survival, axis=1, append=0)  # S_j - S_{j + 1}
    likelihoods = np.log(np.stack([survival.T, refused.T], 1)).reshape(-1, len(survival))
    useful, useless = m / m.sum(), (m < 0.1) / (m < 0.1).sum()
    kind = np.where(c == c.min(), ALL_OR_NONE, (1 - ALL_OR_NONE) / (len(CONCENTRATIONS) - 1))
    prior = (kind * ((1 - USELESS) * useful + USELESS * useless))[:, 0]
    return Laws(survival, survival.cumsum(1), likelihoods, prior / prior.sum())


@functools.cache
def prior_of_texts(slots: int, before: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """The prior [laws] of a text that is like some of these, or (`UNLIKE`) like none of them.

    before: of each text's steps with K drafts, how many had 0, 1, … K accepted (`CostModel.accepted`).
    """
    grid, tried = laws(slots), len(before[0]) - 1
    accepted = np.minimum(np.arange(tried + 1), slots)
    texts = np.array(before) @ grid.likelihood(np.full(tried + 1, min(tried, slots)), accepted)  # [texts, laws]
    texts = np.exp(texts - texts.max(1, keepdims=True))
    share = grid.prior
    for _ in range(ROUNDS):  # of expectation maximization: which law is each text's, then how frequent each law is
        found = texts * share
        share = (found / found.sum(1, keepdims=True)).mean(0)
    return (1 - UNLIKE) * share + UNLIKE * grid.prior


class Acceptance:
    """One posterior for all rows."""

    def __init__(self, slots: int):
        self.laws = laws(slots)
        self.evidence = np.zeros(len(self.laws.prior))  # log-likelihood of the laws

    def tokens(self) -> np.ndarray:
        """[slots + 1]: what a step with 0, 1, … `slots` drafts is expected to yield, the target's token included."""
        return self.laws.expected_tokens(self.laws.prior, self.evidence)

    def survival(self) -> np.ndarray:
        """[slots + 1]: the chance that the first j drafts are all accepted."""
        return np.diff(self.tokens(), prepend=0)

    def update(self, tried: np.ndarray, accepted: np.ndarray, weights: np.ndarray) -> None:
        """One step's rows [B]: how many drafts each tried, how many of them were accepted, and how much it counts."""
        self.evidence = DECAY * self.evidence + weights @ self.laws.likelihood(tried, accepted)


class AcceptanceByRow:
    """A posterior for each live row, which learns from its own steps and, less, from those of the others.

    What the others show is only a prior, and may be wrong (`UNLIKE_OTHERS`): a row that accepts everything, since it
    repeats itself, makes nobody expect much of those that accept nothing.

    seen: drafts whose fate is known, of all rows, older ones counting less.
    """

    def __init__(self, slots: int, before: tuple[tuple[int, ...], ...] | None = None):
        """before: what became of the drafts of other texts (`CostModel.accepted`)."""
        self.laws = laws(slots)
        self.prior = self.laws.prior if before is None else prior_of_texts(slots, before)
        self.ids = np.zeros(0, np.int64)
        self.evidence = np.zeros((0, len(self.prior)))  # log-likelihood of the laws, by row
        self.seen = 0.0

    def follow(self, ids: np.ndarray) -> None:
        """These rows are live now, in this order: rows that ended are forgotten, new ones have shown nothing yet."""
        if ids.tolist() != self.ids.tolist():
            self.evidence = (ids[:, None] == self.ids) @ self.evidence
            self.ids = ids

    def tokens(self) -> np.ndarray:
        """As `Acceptance.tokens`, of each row: [B, slots + 1]."""
        prior = self.prior if len(self.evidence) == 1 else self._like_others()
        return self.laws.expected_tokens(prior, self.evidence)

    def _like_others(self) -> np.ndarray:
        """What is to be expected of each row by what was seen of the others, [B, laws]."""
        share = OTHERS * min(1, MOST_OTHERS / (len(self.evidence) - 1))
        others = share * (self.evidence.sum(0) - self.evidence)
        others = self.prior * np.exp(others - others.max(1, keepdims=True))
        return (1 - UNLIKE_OTHERS) * others / others.sum(1, keepdims=True) + UNLIKE_OTHERS * self.prior

    def survival(self) -> np.ndarray:
        """As `Acceptance.survival`, of each row: [B, slots + 1]."""
        return np.diff(self.tokens(), axis=1, prepend=0)

    def update(self, tried: np.ndarray, accepted: np.ndarray) -> None:
        """One step of the rows [B]: how many drafts each tried, and how many of them were accepted."""
        self.learn(self.laws.likelihood(tried, accepted))
        self.seen += sum(map(min, (accepted + 1).tolist(), tried.tolist()))

    def learn(self, likelihood: np.ndarray) -> None:
        """One step of the rows, as likely under the laws as this says: log [B, laws]."""
        self.evidence = DECAY * self.evidence + OWN * likelihood
        self.seen *= DECAY

    def forget(self, weight: float) -> None:
        """Let all drafts that were seen count as at most so many."""
        share = weight / max(weight, self.seen)
        self.seen, self.evidence = share * self.seen, share * self.evidence
