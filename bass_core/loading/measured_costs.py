"""Find the measured costs of a pair on its device, from `bass calibrate` or from the library's assets."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bass_core.environment import processor
from bass_core.loading.model_pair import ASSETS, ModelPair, fingerprint
from bass_core.policies.costs import CostModel, file_name, models_code
from bass_core.policies.goodput import Goodput
from bass_core.policies.protocol import DraftLengthPolicy, as_policy

SHIPPED = ASSETS / "costs"
_MARKS: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()  # fingerprints by model


def policy_for(pair: ModelPair, draft_length: int | DraftLengthPolicy | None) -> DraftLengthPolicy:
    """Return the policy for `generate`'s draft_length argument; raises as `as_policy` does.

    None selects `Goodput` if the pair's costs are known, and a fixed length otherwise. `bass calibrate` measures costs,
    once per device. Costs of the embedded pair, with its draft model or feature head, ship with the library.
    """
    cost = costs_like(pair) if draft_length is None else None
    return as_policy(draft_length) if cost is None else Goodput(cost)


def costs_for(pair: ModelPair) -> CostModel | None:
    """Return the measured (`bass calibrate`) or shipped costs of this pair on its device, or None.

    Models are identified by fingerprint, CPUs by name and threads. An unreadable file is skipped with a warning. Raises
    ValueError for a file with the costs of another pair.
    """
    name = file_name(device_name(pair.device), *_marks(pair).values())
    for path in (cache_folder() / name, SHIPPED / name):
        try:
            cost = _loaded(path, path.stat().st_mtime_ns)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            warnings.warn(f"decoding without measured costs: {error}", stacklevel=2)
            continue
        check_costs(cost, pair)
        return cost
    return None


def costs_like(pair: ModelPair) -> CostModel | None:
    """Return `costs_for` the pair, or shipped costs of the same models on another device of the same type, or None.

    The relation between draft lengths is similar on another device, although times differ.
    """
    if (own := costs_for(pair)) is not None:
        return own
    paths = sorted(SHIPPED.glob(f"*-{models_code(*_marks(pair).values())}.json"))
    others = (_loaded(path, path.stat().st_mtime_ns) for path in paths)
    return next((cost for cost in others if cost.measured.get("device_type") == pair.device.type), None)


def check_costs(cost: CostModel, pair: ModelPair) -> None:
    """Raise ValueError if these are not the costs of this pair on its device."""
    found = {"device": device_name(pair.device)} | _marks(pair)
    own = {"device": cost.device} | {role: model["fingerprint"] for role, model in cost.models.items()}
    for what, value in found.items():
        if value != own[what]:
            raise ValueError(f"these costs belong to the {what} {own[what]!r}, not to {value!r}; run `bass calibrate`")


def cache_folder() -> Path:
    """Return the user's folder of measured costs: $XDG_CACHE_HOME/bass-hands-on/costs, by default in ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "bass-hands-on" / "costs"


def device_name(device: torch.device) -> str:
    """Return the device name used for costs: the GPU, or the processor with the number of torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' * (threads > 1)}"


@functools.lru_cache(maxsize=32)
def _loaded(path: Path, changed: int) -> CostModel:
    """Return the costs in a file with this modification time. `generate` calls this each time."""
    return CostModel.load(path)


def _marks(pair: ModelPair) -> dict[str, str]:
    """Return the fingerprints of the pair, computed once per model; on a GPU, each tensor is copied to the host."""
    for model in pair.models:
        if model not in _MARKS:
            _MARKS[model] = fingerprint(model)
    is_model = isinstance(pair.draft, PreTrainedModel)
    return {"target": _MARKS[pair.target], "draft": _MARKS[pair.draft] if is_model else fingerprint(pair.drafter)}
