"""Faster operators for a model's layers on a CPU, where layers run operator by operator.

A decode pass multiplies each weight with few tokens. For few float32 rows, torch's `linear` (MKL) is slow on CPUs of
other makers than Intel. Weights times tokens, instead of tokens times weights, is up to twice as fast. oneDNN is as
fast if a product is large enough to repay the call. On Intel CPUs `linear` is the fastest of the three, by up to a
half. For small weights, the time outside the products dominates. A norm is a single operator here instead of six,
rotary positions take eight instead of sixteen, and `forward` skips the attribute lookup of weights (a microsecond).

The layers compute the same functions; the terms of a sum may be added in another order.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bass_core import environment
from bass_core.model.forward_pass import Pass, current_pass
from bass_core.model.patching import Change, is_plain, is_touched, written_in
from bass_core.model.transformers_internals import ROTATE

STREAMED = 2**23  # bytes of weights beyond any CPU cache; below this size `linear` is as fast
SMALL = 2**15  # up to so many elements of a weight, `linear` is the fastest for a single row
FEW = (*range(1, 12), 16)  # rows for which weights times tokens beat `linear`; 12 to 15 take longer than 16
LARGE = 2**22  # multiplications; from so many on, oneDNN repays the call


def faster_than_linear(processor: str) -> bool:
    """Return True if `product` is faster than `linear` on a processor of this name."""
    return torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and "Intel" not in processor


FASTER = faster_than_linear(environment.processor())


def changes(model: nn.Module) -> list[Change]:
    """Return the changes (`patching.changed`) that install these operators. Modules in other dtypes stay unchanged, as
    do modules with hooks, another class or a replaced `forward`."""
    streamed = FASTER and sum(each.nbytes for each in model.parameters()) >= STREAMED
    multiply = product if streamed else _linear
    found, rotating = [], {}
    for module in model.modules():
        if _is_rms_norm(module):
            found.append((vars(module), "forward", _whole_norm(module)))
        elif is_plain(module) and module.weight.dtype == torch.float32:
            found.append((vars(module), "forward", _product_of(module, multiply)))
        elif (forward := _rotating(module, rotating)) is not None:
            found.append((vars(module), "forward", types.MethodType(forward, module)))
    return found


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


def _product_of(module: nn.Linear, multiply: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    parameters = module._parameters  # skips the module's attribute lookup

    def forward(input: Tensor) -> Tensor:
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # a parametrization replaced a parameter
            return type(module).forward(module, input)
        return multiply(input, weight, bias)

    return forward


# --- norms ----------------------------------------------------------------------------------------


def _is_rms_norm(module: nn.Module) -> bool:
    """Return True if a float32 module computes the same bits as `F.rms_norm`."""
    weight, forward = module._parameters.get("weight"), type(module).forward
    if weight is None or weight.dtype != torch.float32 or "variance_epsilon" not in vars(module):
        return False
    if forward not in _is_rms_norm_of:
        _is_rms_norm_of[forward] = _agrees_with_rms_norm(module)
    return _is_rms_norm_of[forward] and "forward" not in vars(module)


_is_rms_norm_of: dict[Callable, bool] = {}  # by the forward of the module's class


@torch.inference_mode(False)
@torch.no_grad()
def _agrees_with_rms_norm(module: nn.Module) -> bool:
    twin, size = copy.deepcopy(module), module.weight.shape
    numbers = torch.Generator().manual_seed(0)
    twin.weight.data = torch.randn(size, generator=numbers, device="cpu")
    scales = 10.0 ** torch.arange(-8, 8, device="cpu").view(16, *[1] * len(size))
    x = torch.randn(16, *size, generator=numbers, device="cpu") * scales
    try:
        return torch.equal(twin.forward(x), F.rms_norm(x, size, twin.weight, twin.variance_epsilon))
    except (AttributeError, RuntimeError, TypeError):  # its forward needs other arguments
        return False


def _whole_norm(module: nn.Module) -> Callable:
    forward, parameters, shape = module.forward, module._parameters, module.weight.shape

    def whole(x: Tensor, *more, **options) -> Tensor:
        if x.dtype != torch.float32 or more or options:
            return forward(x, *more, **options)
        return F.rms_norm(x, shape, parameters["weight"], module.variance_epsilon)

    return whole


# --- rotary positions -----------------------------------------------------------------------------


def _rotating(module: nn.Module, known: dict[Callable, Callable | None]) -> Callable | None:
    """Return the forward of an attention module's class with the faster rotation, or None for other modules. known: a
    cache of results."""
    forward = inspect.unwrap(type(module).forward)  # without transformers' renaming of arguments
    if is_touched(module) or ROTATE not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return None
    if forward not in known:
        known[forward] = _calling(forward, ROTATE, _rotation(forward)) if _rotates_halves(forward) else None
    return known[forward]


def _rotates_halves(forward: types.FunctionType) -> bool:
    """Return True if the forward calls its file's own rotation from transformers, with the same bits as `rotated`."""
    theirs, batch_slot = forward.__globals__.get(ROTATE), written_in(forward)
    if not (forward.__module__ or "").startswith("transformers.models.") or written_in(theirs) != batch_slot:
        return False
    if theirs not in _rotates_halves_of:
        _rotates_halves_of[theirs] = _agrees_with_rotation(theirs)
    return _rotates_halves_of[theirs]


_rotates_halves_of: dict[Callable, bool] = {}


def _calling(forward: types.FunctionType, name: str, function: Callable) -> types.FunctionType:
    """Return a copy of the forward with `function` under the global `name`. The original module stays unchanged."""
    where = forward.__globals__ | {name: function}
    del where["__name__"]  # compilers would look up globals in transformers' module by this name
    own = types.FunctionType(forward.__code__, where, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return own


def _rotation(forward: types.FunctionType) -> Callable:
    """Return `rotated` with a fallback to the forward's own rotation. Layers of a pass share the factors."""
    where = forward.__globals__
    theirs = where[ROTATE]

    def rotate(*arguments, **options) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():  # compilers fuse the original operators
            return theirs(*arguments, **options)
        if where[ROTATE] is theirs and not options and len(arguments) == 4 and _knows(*arguments):
            q, k, cos, sin = arguments
            current = current_pass()
            try:
                factors = _factors(current, cos, sin) if current is None else current.once(_factors, cos, sin)
                return rotated(q, *factors), rotated(k, *factors)
            except (RuntimeError, ValueError):  # unsupported shapes, such as 4-D factors
                pass
        return where[ROTATE](*arguments, **options)

    return rotate


def _knows(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return True if all tensors are float32 and whole heads are rotated."""
    return q.dtype == k.dtype == cos.dtype == sin.dtype == torch.float32 and q.shape[-1] == cos.shape[-1]


def rotated(x: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
    """Return x cos + (-x2, x1) sin for x = (x1, x2), to the bit. Raises RuntimeError for other shapes.

    x [B, H, Q, D]; cos and signed (-sin1, sin2) [B, 1, Q, D].
    """
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(signed))


def _factors(current: Pass | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of `rotated` for cos and sin [B, Q, D]."""
    first, second = sin.chunk(2, -1)
    return cos.unsqueeze(1), torch.cat([-first, second], -1).unsqueeze(1)


@torch.inference_mode(False)
@torch.no_grad()
def _agrees_with_rotation(theirs: Callable) -> bool:
    numbers = torch.Generator().manual_seed(0)
    shapes = (2, 4, 3, 16), (2, 2, 3, 16), (2, 3, 16), (2, 3, 16)
    q, k, cos, sin = (torch.randn(shape, generator=numbers, device="cpu", dtype=torch.float32) for shape in shapes)
    factors = _factors(None, cos, sin)
    try:
        found_q, found_k = theirs(q, k, cos, sin)
        return torch.equal(found_q, rotated(q, *factors)) and torch.equal(found_k, rotated(k, *factors))
    except Exception:  # any error means that the function takes other arguments
        return False
