"""Which attention path does this model get? Each model is asked what it *does*, once.

Some architectures silently ignore transformers' attention interface, others use it with masks of their own. So
`resolve` compares ragged passes over a cache with the model's plain forward pass, and refuses what differs.
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bass_core import kernel_ops
from bass_core.attention import PATHS, context_length, evaluating
from bass_core.runner import Runner

# A model's answer does not change: (path, error) per model, forgotten with it.
_probed: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, str | None]] = weakref.WeakKeyDictionary()


def resolve(model: PreTrainedModel, wanted: str = "auto") -> str:
    """The attention path that `model` gets: "ragged", "pad", "split" or "eager".

    "auto" takes the fastest path that the model passes the probe with; any other name is taken or refused.
    Raises ValueError where the path does not exist here or the model computes something else with it.
    """
    if wanted not in ("auto", *PATHS):
        raise ValueError(f"attention must be one of auto, {', '.join(PATHS)}; got {wanted!r}")
    if wanted == "ragged" and not kernel_ops.run_on(model.device):
        raise ValueError(
            f"attention='ragged' needs the Triton kernels, and {kernel_ops.obstacle(model.device)}. "
            "Use attention='auto', 'pad', 'split' or 'eager'"
        )
    _refuse_stateful(model)
    if wanted != "auto":
        candidates = [wanted]
    elif model.device.type == "cuda" and kernel_ops.run_on(model.device):
        candidates = ["ragged", "pad", "eager"]
    else:
        candidates = ["pad", "eager"]
    complaints = {}
    for path in candidates:
        complaints[path] = probe(model, path)
        if complaints[path] is None:
            return path
    reasons = "; ".join(f"{path}: {why}" for path, why in complaints.items())
    raise ValueError(
        f"{type(model).__name__} cannot be decoded over a ragged cache ({reasons}). "
        + ("Try attention='auto'." if wanted != "auto" else "Models with ALiBi positions or own masks are refused.")
    )


def _refuse_stateful(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if getattr(model, "_is_stateful", False) or unknown:
        detail = f" (layer types {', '.join(sorted(map(str, unknown)))})" if unknown else ""
        raise ValueError(
            f"{type(model).__name__} keeps a recurrent state{detail}: a rejected draft cannot be rolled back by not "
            "writing. Use a model whose layers are all attention."
        )


def probe(model: PreTrainedModel, path: str) -> str | None:
    """None if the model's ragged passes equal its plain forward pass on this path, else what went wrong.

    Two rows of different length, longer than the smallest window or chunk, over a cache full of stale values: prefill,
    write rejected tokens, overwrite them, compare logits. The result is remembered per model.
    """
    known = _probed.setdefault(model, {})
    if path not in known:
        try:
            error = _probe_error(model, path)
            known[path] = (
                None
                if error <= (limit := _tolerance(model.dtype))
                else (f"its logits are off by {error:.1e} of their size (allowed {limit:.0e})")
            )
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as exception:  # whatever a foreign architecture raises is the answer
            known[path] = f"{type(exception).__name__}: {str(exception).splitlines()[0] if str(exception) else ''}"
    return known[path]


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 6e-2)


@torch.inference_mode()
def _probe_error(model: PreTrainedModel, path: str) -> float:
    """Largest relative error of the ragged passes' logits, over two rows."""
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    length = max(8, min([w for w in windows if w], default=0) + 4)
    length = min(length, (context_length(model) or math.inf) - 3)
    lengths = [length, length - 3]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, config.vocab_size, (2, length + 3), generator=generator).to(model.device)
    with Runner(model, path, max_rows=2, capacity=length + 3) as runner:
        runner.feed_last(ids, lengths, length)  # allocates
        for buffer in (b for layer in runner.cache.layers for b in layer.buffers()):
            buffer.fill_(1e4)  # stale values that no query may see
        runner.feed_last(ids, lengths, length)
        starts = torch.tensor(lengths, device=ids.device)
        following = starts[:, None] + torch.arange(3, device=ids.device)  # [2, 3]
        runner.feed(
            ids.flip(0).gather(1, following), starts, [3, 3], starts_host=lengths
        )  # tokens that will be rejected
        passes = [
            runner.feed(ids.gather(1, following), starts, [3, 1], starts_host=lengths, packed=packed)
            for packed in ((False,) if path == "eager" else (False, True))
        ]
    expected = [_plain_logits(model, ids[b : b + 1, : n + 3]) for b, n in enumerate(lengths)]
    return max(
        _relative_error(logits[b, :q], expected[b][n : n + q])
        for logits in passes
        for b, (n, q) in enumerate(((length, 3), (lengths[1], 1)))
    )


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference by the size of the largest finite logit; -inf equals -inf, and NaN is an infinite error."""
    difference = torch.where(found == expected, 0.0, (found - expected).abs().double())
    return float((difference.amax() / expected[expected.isfinite()].abs().amax()).nan_to_num(nan=math.inf))


def _plain_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The model's own forward pass, in evaluation mode: [T, V]."""
    with evaluating(model):
        return model(input_ids=ids, use_cache=False).logits[0]
