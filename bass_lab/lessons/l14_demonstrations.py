"""Lesson 14: results for the paper's claims, its two kernels without fusion, and modelled speeds of its models."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pandas as pd
import torch
from IPython.display import DisplayHandle
from pandas.io.formats.style import Styler
from torch import Tensor

from bass_core import checks
from bass_core.model import attention
from bass_core.model.patching import changed
from bass_core.policies.costs import CostModel
from bass_core.policies.protocol import DraftLengthPolicy
from bass_lab.evaluation import Evaluation
from bass_lab.measure.modelled_costs import OVERHEAD, SHARE, modelled_costs
from bass_lab.measure.roofline import A100_BANDWIDTH, DRAFT_310M, TARGET_8B, Device, Roofline, StepWork
from bass_lab.named_pairs import SHAPES, named_config
from bass_lab.study import simulator
from bass_lab.study.recorded_acceptance import AcceptanceTrace

WIDTH = 100  # characters of a printed line; slides break longer lines within a word


STATES = {  # state: background in the table
    "measured": "#CDE7F5",
    "recorded": "#D5EFDF",
    "modelled": "#FFF1C9",
    "reconstructed": "#E4DAF0",
    "not reproduced": "#F3D9CC",
}
NOT_YET = "not yet"


@dataclass
class Claim:
    """A line of the table. source: source of the paper's words."""

    claim: str
    source: str
    state: str = ""
    ours: str = ""


ABSTRACT, SUMMARY, CAPTION, REBUILT = "abstract", "a published summary", "a figure's caption", "reconstructed"
CLAIMS = (
    ("5.8 ms per token of a sequence: 7.8B, one A100, batch 8", ABSTRACT),
    ("2.15 times optimised regular decoding there", ABSTRACT),
    ("1.1K tokens/s there", ABSTRACT),
    ("GPU utilisation of 15.8% at its peak", ABSTRACT),
    ("that is over 3 times regular decoding's best, about 10 times single-sequence speculation's", ABSTRACT),
    ("HumanEval in a time budget: Pass@First 43%, Pass@All 61%", ABSTRACT),
    ("two phases: context encoding and decoding", REBUILT),
    ("rows accept different numbers of tokens, so the batch is ragged", REBUILT),
    ("BASS-PAD: one product for QKᵀ and one for PV, padded", CAPTION),
    ("BASS-SPLIT: the products of each sequence by themselves", CAPTION),
    ("Algorithm 1: one draft length, from the most that a row accepted", REBUILT),
    ("adaptive lengths against fixed ones", REBUILT),
    ("a table: OPT-13B + 125M on XSum, with ROUGE-2", REBUILT),
    ("a table: CodeGen-16B + 350M on HumanEval", REBUILT),
    ("a table: the 7.8B model + 310M", REBUILT),
    ("three drafts: wide and shallow beats deep", REBUILT),
    ("quality against the time budget", SUMMARY),
    ("up to 2.94 times regular decoding, over three models", SUMMARY),
)


@dataclass
class Paper:
    """Table of all claims. Displayed tables update as cells settle claims."""

    claims: list[Claim] = field(default_factory=lambda: [Claim(*each) for each in CLAIMS])
    _shown: list[DisplayHandle] = field(default_factory=list)

    def settle(self, number: int, state: str, ours: str) -> None:
        """Set the result of a claim (numbers from 1), after the assertions of its cell.

        state: of `STATES`. Raises ValueError for another state or an unknown number.
        """
        checks.one_of("state", state, tuple(STATES))
        if not 1 <= number <= len(self.claims):
            raise ValueError(f"claims have the numbers 1 to {len(self.claims)}, got {number}")
        claim = self.claims[number - 1]
        claim.state, claim.ours = state, ours
        for handle in self._shown:
            handle.update(self.styled())
        indent = " " * 4
        told = textwrap.fill(f"{state}: {ours}", WIDTH, initial_indent=indent, subsequent_indent=indent)
        print(f"{number} · {claim.claim}\n{told}")

    @property
    def open(self) -> list[int]:
        """Numbers of the claims without a result."""
        return [number for number, each in enumerate(self.claims, 1) if not each.state]

    def table(self) -> pd.DataFrame:
        """Return a line per claim, by number: the paper's claim, its source, the state, our result."""
        lines = [(each.claim, each.source, each.state or NOT_YET, each.ours) for each in self.claims]
        numbers = pd.RangeIndex(1, len(lines) + 1)
        return pd.DataFrame(lines, numbers, ["the paper", "from", "state", "here"])

    def styled(self) -> Styler:
        """Return the table with states marked by word and colour."""
        left = [{"selector": "th, td", "props": "text-align: left; vertical-align: top"}]
        shown = self.table().style.set_table_styles(left).set_table_attributes('class="paper"')
        return shown.map(lambda state: f"background: {STATES.get(state, '#FFFFFF')}; color: black", subset="state")

    def show(self) -> None:
        """Display the table. It updates below this cell."""
        self._shown.append(DisplayHandle())
        self._shown[-1].display(self.styled())


# The paper's A100 is this model or the 40 GB model.
A100 = Device("NVIDIA A100 80GB (data sheet)", bandwidth=A100_BANDWIDTH[1], flops=312e12)
PAPER_PAIR = TARGET_8B, DRAFT_310M
LAUNCH = 5e-4  # launch seconds of a target pass, as in `modelled_h100`; a draft pass takes a fifth


def modelled_pair(name: str) -> tuple[StepWork, StepWork]:
    """Return target and draft of one of `SHAPES` in 16 bits."""
    configs = SHAPES[name].target, SHAPES[name].draft
    return tuple(StepWork.of(named_config(config, name), torch.float16) for config in configs)


def costs_on(device: Device, works: Sequence[StepWork] = PAPER_PAIR) -> CostModel:
    """Return modelled costs: the roofline at `SHARE` of the data sheet, plus launches and overhead."""
    reached = replace(device, bandwidth=SHARE * device.bandwidth, flops=SHARE * device.flops)
    rooflines = [Roofline(work, reached) for work in works]
    return modelled_costs(*rooflines, target_launch=LAUNCH, draft_launch=LAUNCH / 5, overhead=OVERHEAD)


class Speed(NamedTuple):
    """tokens_per_s: of the batch until its last row ends; first, last, every: ms per token of the first row, the last
    row, and the mean."""

    tokens_per_s: float
    first: float
    last: float
    every: float


def replayed_speed(
    trace: AcceptanceTrace, policy: int | DraftLengthPolicy, cost: CostModel, batch: int, **options
) -> Speed:
    """Return means over replays. All rows of the trace must have equal lengths (`past_eos`)."""
    runs = simulator.simulate(trace, policy, cost, batch=batch, **options)
    per_row = 1e3 * batch / runs.tokens
    times = (float((runs[name] * per_row).mean()) for name in ("first_s", "last_s", "mean_s"))
    return Speed(float(runs.tokens.sum() / runs.seconds.sum()), *times)


def two_products(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | float, scaling: float) -> Tensor:
    """Return attention as QKᵀ, softmax, PV. query: [..., Q, D]; key, value: [..., S, D]; bias: [..., Q, S]."""
    scores = query @ key.transpose(-1, -2) * scaling + bias
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return weights @ value


@contextmanager
def unfused() -> Iterator[None]:
    """Compute attention of the paths "pad" and "split" by `two_products` inside this context, on a CPU."""
    with changed([(vars(attention), "_attend", _unfused)]):
        yield


def _unfused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, group: int, options: dict) -> Tensor:
    """Replacement of `bass_core.model.attention._attend` with `two_products`."""
    packed = query.reshape(len(query), query.shape[1] // group, -1, query.shape[-1])
    key, value = (x.repeat_interleave(packed.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scaling = query.shape[-1] ** -0.5 if options.get("scaling") is None else options["scaling"]
    return two_products(packed, key, value, 0.0 if bias is None else bias, scaling).view(*query.shape[:3], -1)


def attention_bytes(lengths: Sequence[int], queries: int, work: StepWork) -> pd.DataFrame:
    """Return the counted launches and MB of a layer's attention on a GPU at these KV lengths, by method.

    products: launches of QKᵀ and PV. MB: keys and values once, and unfused scores four times.
    """
    rows, own, padded = len(lengths), sum(lengths), len(lengths) * max(lengths)
    per_key = work.cache_bytes(1) / work.layers
    per_score = 4 * work.heads * queries * work.element
    ways = {
        "PAD, as in the paper": (2, padded, padded),
        "PAD, fused": (1, padded, 0),
        "SPLIT, as in the paper": (2 * rows, own, own),
        "SPLIT, fused": (rows, own, 0),
        "ragged (ours)": (1, own, 0),
    }
    lines = {
        way: {"products": products, "keys and values": keys * per_key / 1e6, "scores": scores * per_score / 1e6}
        for way, (products, keys, scores) in ways.items()
    }
    return pd.DataFrame.from_dict(lines, orient="index").astype({"products": int})


def table_lines(runs: Mapping[str, Evaluation], **about) -> list[dict]:
    """Return lines of the paper's table from graded samples: ms per token since the call (prefill included) of the row
    with the lowest latency, the highest, and the mean over rows; shares that pass."""
    lines = []
    for method, run in runs.items():
        samples = run.samples.assign(ms=1e3 * run.samples.finish_seconds / run.samples.tokens)
        by_problem = samples.groupby("problem").ms
        speed = {"first": by_problem.min().mean(), "last": by_problem.max().mean(), "all": by_problem.mean().mean()}
        right = {"Pass@All": samples.groupby("problem").passed.any().mean(), "passed": samples.passed.mean()}
        lines.append(about | {"method": method} | speed | right)
    return lines


def modelled_lines(
    works: Sequence[StepWork], trace: AcceptanceTrace, batches: Sequence[int], k: int, **options
) -> list:
    """Return modelled lines for models on an A100: batch × precision, without quality."""
    lines = []
    for precision, element in (("16 bits", 2), ("8 bits", 1)):
        cost = costs_on(A100, [replace(work, element=element) for work in works])  # of weights and cache
        for batch in batches:
            regular = replayed_speed(trace, 0, cost, batch, **options)
            speed = replayed_speed(trace, k, cost, batch, **options)
            line = {"batch": batch, "precision": precision, "regular": regular.every, "first": speed.first}
            line |= {"last": speed.last, "all": speed.every}
            lines.append(line | {"over_regular_mean": regular.every / speed.every})
    return lines
