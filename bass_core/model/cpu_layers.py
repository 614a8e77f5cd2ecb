"""Faster operators for a model's layers on a CPU, where layers run operator by operator.

A decode pass multiplies each weight with few tokens. For few float32 rows, torch's `linear` (MKL) is slow on CPUs of
other makers than Intel. Weights times tokens, instead of tokens times weights, is up to twice as fast. oneDNN is as
fast if a product is large enough to repay the call. On Intel CPUs `linear` is the fastest of the three, by up to a
half. For small weights, the time outside the products dominates. A norm is a single operator here instead of six. The
layers of Llama and Qwen2 run as a whole (`WholeLayer`): a pass of the embedded target over one token takes two thirds
of the time.

The layers compute the same functions; the terms of a sum may be added in another order.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bass_core import environment
from bass_core.model.cache import RaggedCache
from bass_core.model.forward_pass import Pass, current_pass
from bass_core.model.fused_projections import joint
from bass_core.model.patching import Change, is_plain, is_touched, written_in
from bass_core.model.transformers_internals import CACHE, ROTATE

STREAMED = 2**23  # bytes of weights beyond any CPU cache; below this size `linear` is as fast
SMALL = 2**15  # up to so many elements of a weight, `linear` is the fastest for a single row
FEW = (*range(1, 12), 16)  # rows for which weights times tokens beat `linear`; 12 to 15 take longer than 16
LARGE = 2**22  # multiplications; from so many on, oneDNN repays the call


LAYERS = "LlamaDecoderLayer", "Qwen2DecoderLayer"  # classes of transformers that run as a whole
Weights = list[tuple[Tensor, Tensor | None]]  # weight and bias of each product


def faster_than_linear(processor: str) -> bool:
    """Return True if `product` is faster than `linear` on a processor of this name."""
    return torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and "Intel" not in processor


FASTER = faster_than_linear(environment.processor())


class FasterLayers:
    """The faster operators of a model. Modules with hooks, another class or a replaced `forward` stay unchanged."""

    def __init__(self, model: nn.Module, whole: bool = True):
        """whole: run layers of Llama and Qwen2 as a whole. The path `eager` calls the layers' own attention."""
        streamed = FASTER and sum(each.nbytes for each in model.parameters()) >= STREAMED
        multiply = product if streamed else _linear
        known = [each for each in model.modules() if whole and _is_known(each)]
        self.layers = [each for layer in known if (each := WholeLayer(layer, multiply)).is_plain]
        self.kinds = {type(each.layer): each.layer for each in self.layers}  # a layer of each class
        inside = {part for each in self.layers for part in each.layer.modules()}
        self.parts: list[Change] = []
        for module in model.modules():
            if module in inside:
                continue
            if _is_rms_norm(module):
                self.parts.append((vars(module), "forward", _whole_norm(module)))
            elif streamed and is_plain(module) and module.weight.dtype == torch.float32:
                self.parts.append((vars(module), "forward", lambda x, m=module: product(x, m.weight, m.bias)))

    def changes(self) -> list[Change]:
        """Return the changes (`patching.changed`) that install these operators now."""
        parts = [change for change in self.parts if "forward" not in change[0]]
        hooked = hooks._global_forward_hooks or hooks._global_forward_pre_hooks
        if hooked or not all(map(_is_known, self.kinds.values())):
            return parts
        return parts + [(vars(each.layer), "forward", each) for each in self.layers if each.is_unchanged()]


# --- products -------------------------------------------------------------------------------------


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)  # looked up at each call, as the user may have replaced F.linear


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear`, computed by the fastest method. x [..., N], weight [M, N], bias [M] -> [..., M]."""
    many, size = weight.shape
    rows = x.shape[:-1].numel()
    if rows == 0 or x.dtype != torch.float32 or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    if rows * many * size >= LARGE:
        return _by_onednn(x, rows, weight, bias)
    if rows not in FEW or (rows == 1 and many * size < SMALL):
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, size)
    # MKL's own function for a single row is slower than two rows.
    out = torch.mm(weight, flat.T).T if rows > 1 else torch.mm(weight, torch.cat((flat, flat)).T).T[:1]
    out = out.contiguous().view(*x.shape[:-1], many)
    return out if bias is None else out + bias


def _by_onednn(x: Tensor, rows: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear` by oneDNN. Compiled code takes at least a third of a megabyte per shape, so rows are rounded up
    to few numbers (8, 16, … 128, 144, … 256, 288, …), from 64 on by at most an eighth."""
    more = -rows % (1 << max(3, rows.bit_length() - 4))
    linear = torch.ops.mkldnn._linear_pointwise.default
    if not more:
        return linear(x, weight, bias, "none", [], "")
    out = linear(F.pad(x.reshape(rows, -1), (0, 0, 0, more)), weight, bias, "none", [], "")
    return out[:rows].view(*x.shape[:-1], -1)


# --- norms ----------------------------------------------------------------------------------------

RMS_NORMS = tuple(f"{family}RMSNorm" for family in ("Llama", "Mistral", "Mixtral", "Phi3", "Qwen2", "Qwen3"))


def _is_rms_norm(module: nn.Module) -> bool:
    """Return True for a float32 norm of transformers that computes the bits of `F.rms_norm`."""
    return _is_theirs(module, RMS_NORMS) and not is_touched(module) and module.weight.dtype == torch.float32


def _is_theirs(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Return True for a module of transformers' models with one of these class names and its own `forward`."""
    kind = type(module)
    where = kind.__module__ if kind.__name__ in names else ""
    code = inspect.unwrap(kind.forward)
    return where.startswith("transformers.models.") and written_in(code) == sys.modules[where].__file__


def _whole_norm(module: nn.Module) -> Callable:
    forward, shape = module.forward, module.weight.shape

    def whole(x: Tensor, *more, **options) -> Tensor:
        if x.dtype != torch.float32 or more or options:
            return forward(x, *more, **options)
        return F.rms_norm(x, shape, module.weight, module.variance_epsilon)

    return whole


# --- whole layers ---------------------------------------------------------------------------------


class WholeLayer:
    """The `forward` of a Llama-like layer in few operators: one product of adjacent sibling projections, one rotation
    of queries and keys, and no calls of modules. Passes outside a session run the layer's own `forward`."""

    def __init__(self, layer: nn.Module, multiply: Callable[..., Tensor]):
        attention, mlp = layer.self_attn, layer.mlp
        self.layer, self.kind, self.attention, self.multiply = layer, type(layer), attention, multiply
        siblings = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]
        linear = [part for group in (*siblings, [attention.o_proj, mlp.down_proj]) for part in group]
        self.is_plain = all(map(is_plain, linear)) and not any(map(is_touched, layer.modules()))
        parts = [(parent, name, part) for parent in layer.modules() for name, part in parent._modules.items()]
        self._parts = [(parent._modules, name, part, type(part)) for parent, name, part in parts]
        tables = [(part._parameters, name) for part in linear for name in part._parameters]
        self._weights = [(table, name, _address(table[name])) for table, name in tables]
        self.qkv, self.gate_up = (  # a single product if the weights are adjacent, or one for each module
            [one] if (one := joint(group)) else [(part.weight, part.bias) for part in group] for group in siblings
        )
        self.out, self.down = ((part.weight, part.bias) for part in linear[-2:])
        norms = layer.input_layernorm, layer.post_attention_layernorm
        self.first_norm, self.second_norm = (_whole_norm(n) if _is_rms_norm(n) else n.forward for n in norms)
        self.activation, self.size = mlp.act_fn.forward, attention.head_dim
        self.heads, kv_heads = (part.out_features // self.size for part in linear[:2])
        self.rotating = self.heads + kv_heads

    def is_unchanged(self) -> bool:
        """Return True if the owner has added no hook, replaced no module or class, and moved no weight."""
        same = all(
            table.get(name) is part and type(part) is kind and not is_touched(part)
            for table, name, part, kind in self._parts
        )
        here = all(_address(table.get(name)) == address for table, name, address in self._weights)
        return same and here and type(self.layer) is self.kind and "forward" not in vars(self.layer)

    def _products(self, x: Tensor, weights: Weights) -> Tensor:
        found = [self.multiply(x, *each) for each in weights]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def __call__(self, hidden_states: Tensor, *arguments, position_embeddings=None, **options) -> Tensor:
        current, cache = current_pass(), options.get(CACHE)
        if current is None or arguments or not isinstance(cache, RaggedCache) or torch.compiler.is_compiling():
            options["position_embeddings"] = position_embeddings
            return type(self.layer).forward(self.layer, hidden_states, *arguments, **options)
        rows, width, _ = hidden_states.shape
        x = self._products(self.first_norm(hidden_states), self.qkv)
        heads = x.view(rows, width, -1, self.size).transpose(1, 2)  # [B, H + 2 H_kv, Q, D]
        rotated = _rotated(heads[:, : self.rotating], *current.once(_factors, *position_embeddings))
        new = rotated[:, self.heads :], heads[:, self.rotating :]
        keys, values = cache.update(*new, self.attention.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.attention.config._attn_implementation]
        how = {"scaling": self.attention.scaling, "sliding_window": getattr(self.attention, "sliding_window", None)}
        out, _ = attend(self.attention, rotated[:, : self.heads], keys, values, None, **how)
        hidden_states = hidden_states + self.multiply(out.reshape(rows, width, -1), *self.out)
        gate, up = self._products(self.second_norm(hidden_states), self.gate_up).chunk(2, -1)
        return hidden_states + self.multiply(self.activation(gate) * up, *self.down)


def _address(weight: nn.Parameter | None) -> tuple | None:
    return None if weight is None else (weight.data_ptr(), weight.stride())


def _is_known(layer: nn.Module) -> bool:
    """Return True for an unmodified layer of transformers whose parts and rotation are of the same file."""
    if not _is_theirs(layer, LAYERS):
        return False
    where = sys.modules[type(layer).__module__]
    parts = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
    code = [type(part).forward for part in parts] + [vars(where)[ROTATE]]
    return all(written_in(inspect.unwrap(each)) == where.__file__ for each in code)


def _rotated(x: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
    """Return x cos + (-x2, x1) sin for x = (x1, x2). x [B, H, Q, D]; cos and signed (-sin1, sin2) [B, 1, Q, D]."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(signed))


def _factors(current: Pass, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of `_rotated` for cos and sin [B, Q, D]."""
    first, second = sin.chunk(2, -1)
    return cos.unsqueeze(1), torch.cat([-first, second], -1).unsqueeze(1)
