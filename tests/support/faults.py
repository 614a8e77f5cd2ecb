"""Models with a planted fault: the output for a row depends on other rows.

`FAULTS` maps each fault to a function that makes a tiny faulty model. tests/exactness/test_planted_faults.py checks
whether the probe (module `bass_core.model.probe`) and `bass verify` find each fault.
"""

import copy
import math
from collections.abc import Callable
from unittest import mock

import torch
from tiny import tiny_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

import bass_core as bass
import bass_lab as lab
from bass_core.model import probe
from bass_core.model.transformers_internals import CACHE
from bass_lab.checks import exactness


class BatchMean(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 0.3 * hidden.mean((0, 1))


class Dropout(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(hidden, 0.1, training=True)


class State(nn.Module):
    """A layer that adds a hidden state from the previous call."""

    last: Tensor | float = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        before, self.last = self.last, 0.3 * hidden[-1, -1].detach().clone()
        return hidden + before


class PassCounter(nn.Module):
    passes = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.passes += 1
        return hidden.flip(-1) if self.passes % 50 == 0 else hidden


class FirstRow(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        bonus = torch.zeros_like(hidden)
        bonus[0, :, ::2] = 0.3 * hidden.abs().mean()
        return hidden + bonus


class TokenCapacity(nn.Module):
    """A layer that skips all tokens of a pass after the first 64."""

    def __init__(self, served: nn.Module):
        super().__init__()
        self.served = served

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.served(hidden)
        places = torch.arange(out.shape[0] * out.shape[1], device=out.device).view(*out.shape[:2], 1)
        return torch.where(places < 64, out, 0.0)


class ExpertCapacity(nn.Module):
    """Four experts. Each serves 5/4 of its share of a pass's tokens, first come first served."""

    def __init__(self, size: int):
        super().__init__()
        torch.manual_seed(3)
        self.router = nn.Linear(size, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        chosen = nn.functional.one_hot(self.router(tokens).argmax(-1), 4)  # [T, 4]
        served = chosen * (chosen.cumsum(0) <= math.ceil(1.25 * len(tokens) / 4))
        out = sum(served[:, e : e + 1] * expert(tokens) for e, expert in enumerate(self.experts))
        return out.view_as(hidden)


class LogScaling(nn.Module):
    """Attention sharpened by log n for n beyond a number of keys, with n the length of the longest row."""

    def __init__(self, rotary: nn.Module, beyond: int):
        super().__init__()
        self.rotary, self.beyond = rotary, beyond

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        scale = max(1.0, math.log(int(position_ids.max()) + 1) / math.log(self.beyond)) ** 4
        return tuple(scale * part for part in self.rotary(hidden, position_ids))


class PositionsOfTheCache(LlamaForCausalLM):
    """A model that ignores `position_ids` and derives positions from the cache's length."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **options):
        return super().forward(input_ids, attention_mask, None, **options)


class FourQueries(LlamaForCausalLM):
    """A model that fails for more than four new tokens per row over a filled cache."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **options):
        cache = options.get(CACHE)
        if cache is not None and cache.layers and cache.layers[0].is_initialized:
            width = input_ids.shape[1] if position_ids is None else position_ids.shape[1]
            if 4 < width < 8:
                raise RuntimeError(f"a decoding step takes four queries at most, got {width}")
        return super().forward(input_ids, attention_mask, position_ids, **options)


def healthy() -> PreTrainedModel:
    return copy.deepcopy(tiny_model("llama", max_position_embeddings=512))


def _after_the_layers(fault: nn.Module) -> PreTrainedModel:
    model = healthy()
    model.model.norm = nn.Sequential(model.model.norm, fault)
    return model


def _of_class(kind: type[LlamaForCausalLM]) -> PreTrainedModel:
    model = healthy()
    model.__class__ = kind
    return model


def _serving(make: Callable[[PreTrainedModel], nn.Module]) -> PreTrainedModel:
    model = healthy()
    model.model.layers[0].mlp = make(model)
    return model


def log_scaling(beyond: int = 64) -> PreTrainedModel:
    model = healthy()
    model.model.rotary_emb = LogScaling(model.model.rotary_emb, beyond)
    return model


FAULTS: dict[str, Callable[[], PreTrainedModel]] = {
    "batch mean": lambda: _after_the_layers(BatchMean()),
    "dropout": lambda: _after_the_layers(Dropout()),
    "positions from the cache's length": lambda: _of_class(PositionsOfTheCache),
    "state across calls": lambda: _after_the_layers(State()),
    "expert capacity": lambda: _serving(lambda model: ExpertCapacity(model.config.hidden_size)),
    "token capacity": lambda: _serving(lambda model: TokenCapacity(model.model.layers[0].mlp)),
    "pass counter": lambda: _after_the_layers(PassCounter()),
    "log-n scaling beyond 64": log_scaling,
    "bonus for row 0": lambda: _after_the_layers(FirstRow()),
    "error for more than four queries": lambda: _of_class(FourQueries),
}


COLUMNS = ("fault", "probe", "failing checks of `bass verify`")


def verified_without_the_probe(model: PreTrainedModel) -> exactness.Report:
    torch.manual_seed(0)
    with mock.patch.object(probe, "probe", lambda model, path: None):
        return lab.verify(bass.ModelPair(model), max_new_tokens=16, samples=1000)


def found(fault: str) -> tuple[str, str, str]:
    try:
        by_probe = f"accepts ({probe.resolve(FAULTS[fault]())})"
    except ValueError:
        by_probe = "refuses"
    report = verified_without_the_probe(FAULTS[fault]())
    return fault, by_probe, ", ".join(check.name for check in report.checks if not check.passed) or "none"
