"""Layers with a recurrent state, in a batch whose rows reject draft tokens.

A recurrent state cannot step back. `RowState` therefore keeps a state per row, valid before position `at`, and the
inputs of the recurrence from `at` on. A pass replays the inputs up to its first token, and reads new tokens from a copy
of the state. Rolling back a rejected draft means not advancing, as for keys and values. `Pass.committed_until` marks
the tokens that stay.

A layer's own `forward` runs unchanged, with a `StandIn` as the cache, and with `StandIn.scan` in place of the function
that computes the recurrence. `SCANS` lists these functions of transformers; add further functions there.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bass_core.model.cache import RaggedCache, free
from bass_core.model.forward_pass import Pass
from bass_core.model.transformers_internals import called_names, plain_forward

Tokens = dict[str, Tensor]  # inputs of a recurrence by name, [B, Q, ...]


class Scan(NamedTuple):
    """A function of transformers that computes a recurrence over the tokens of a pass.

    tokens: arguments with an entry per token, along axis `time`. initial: argument for the state before the first
    token, or None if the function starts from zeros. step(own, tokens, rest, state): returns output and state after a
    single token. own: globals of the layer's module. tokens: [B, 1, ...]. rest: the other arguments.
    """

    name: str
    tokens: tuple[str, ...]
    initial: str | None
    step: Callable[[dict, Tokens, dict, Tensor], tuple[Tensor, Tensor]]
    time: int = 1


def _delta_step(name: str) -> Callable:
    """Return the step of a delta rule, whose function for single tokens takes the same arguments."""

    def step(own: dict, tokens: Tokens, rest: dict, state: Tensor) -> tuple[Tensor, Tensor]:
        rest = {key: value for key, value in rest.items() if key != "chunk_size"}
        return own[name](**tokens, **rest, initial_state=state)

    return step


def _mamba2_step(own: dict, tokens: Tokens, rest: dict, state: Tensor) -> tuple[Tensor, Tensor]:
    x, dt, b, c = (tokens[name][:, 0] for name in ("hidden_states", "dt", "B", "C"))
    state, size = state.clone(), state.shape[2]
    a = rest["A"][:, None, None].expand(-1, size, state.shape[3])
    d, bias = (rest[name][:, None].expand(-1, size) for name in ("D", "dt_bias"))
    options = {"z": None, "dt_bias": bias, "dt_softplus": rest["dt_softplus"]}
    dt = dt[..., None].expand(-1, -1, size)
    return own["mamba2_selective_state_update"](state, x, dt, a, b, c, d, **options)[:, None], state


def _mamba_step(own: dict, tokens: Tokens, rest: dict, state: Tensor) -> tuple[Tensor, Tensor]:
    x, dt, b, c, z = (tokens[name][:, 0] for name in ("hidden_states", "dt", "B", "C", "z"))
    state, d = state.clone(), rest["D"].to(x.dtype)
    options = {"z": z, "dt_bias": rest["delta_bias"], "dt_softplus": rest["delta_softplus"]}
    return own["mamba_selective_state_update"](state, x, dt, rest["A"], b, c, d, **options)[..., None], state


_QKV = ("query", "key", "value", "g", "beta")
_SSM = ("hidden_states", "dt", "B", "C")
SCANS = (
    Scan("torch_chunk_gated_delta_rule", _QKV, "initial_state", _delta_step("torch_recurrent_gated_delta_rule")),
    Scan("chunk_kimi_delta_attention", _QKV, "initial_state", _delta_step("recurrent_kimi_delta_attention")),
    Scan("mamba2_chunk_scan", _SSM, "initial_states", _mamba2_step),
    Scan("mamba_selective_scan", (*_SSM, "z"), None, _mamba_step, time=2),
)


# --- the layers of a model ------------------------------------------------------------------------


def keeps_state(layer: nn.Module) -> bool:
    """Return True for a layer with a convolution state or a recurrent state that this module can roll back."""
    called = called_names(layer)
    if "update_recurrent_state" in called:
        return _scan_of(layer) is not None
    return "update_conv_state" in called


def has_state(model: PreTrainedModel) -> bool:
    """Return True if some layers of the model keep a state per row."""
    return any(map(keeps_state, model.modules()))


def has_index(model: PreTrainedModel) -> bool:
    """Return True if some layers select keys by an index, whose own keys are kept by position."""
    return any("update_indexer" in called_names(module) for module in model.modules())


def explained(model: PreTrainedModel) -> str:
    """Return a sentence about the model's caches: the stored data, and the rollback of a rejected draft."""
    scans = Counter(_scan_of(layer) for layer in model.modules() if keeps_state(layer))
    parts = ["keys and values by position, which later tokens overwrite"]
    if has_index(model):
        parts.append("an index's keys, likewise")
    if count := scans.pop(None, 0):
        parts.append(f"states of {count} convolutions, which advance only by committed tokens")
    for scan, count in scans.items():
        layer = next(layer for layer in model.modules() if keeps_state(layer) and _scan_of(layer) is scan)
        function = f"{scan.name} of {_package(layer, scan)}"
        parts.append(f"recurrent states of {count} layers ({function}), which advance only by committed tokens")
    return "; ".join(parts)


def _package(layer: nn.Module, scan: Scan) -> str:
    """Return the package of the function that computes a scan: transformers, or kernels such as fla or mamba_ssm."""
    function = plain_forward(layer).__globals__[scan.name]
    function = inspect.getclosurevars(function).nonlocals.get("implementation", function)
    return function.__module__.split(".")[0]


@functools.cache
def _argument_names(function: Callable) -> list[str]:
    return list(inspect.signature(function).parameters)


def _scan_of(layer: nn.Module) -> Scan | None:
    return next((scan for scan in SCANS if scan.name in called_names(layer)), None)


def with_row_states(layer: nn.Module) -> Callable:
    """Return the layer's `forward`. In passes over a ragged cache, the layer keeps a state per row."""
    forward, own, scan = layer.forward, plain_forward(layer), _scan_of(layer)
    signature = inspect.signature(own)

    def with_states(*args, **kwargs) -> Any:
        bound = signature.bind(layer, *args, **kwargs)
        name = next((name for name, value in bound.arguments.items() if isinstance(value, RaggedCache)), None)
        if name is None:
            return forward(*args, **kwargs)
        cache, current = bound.arguments[name], bound.arguments[name].current
        stand_in, function = StandIn(cache, layer), own
        if scan is not None:  # a copy of the function, because other threads use the module's globals
            table = {**own.__globals__, scan.name: functools.partial(stand_in.scan, scan, own.__globals__)}
            function = types.FunctionType(own.__code__, table, own.__name__, own.__defaults__, own.__closure__)
            function.__kwdefaults__ = own.__kwdefaults__
        first = list(signature.parameters)[1]
        given = {first: current.unpack(bound.arguments[first]), name: stand_in}
        given |= {mask: None for mask in bound.arguments if mask.endswith("mask")}  # padding is known by KV slot
        bound.arguments.update(given)
        return current.pack(function(*bound.args, **bound.kwargs))

    return with_states


class StandIn:
    """The cache that a layer's `forward` receives in a pass. Without an earlier state, the layer calls the scan."""

    def __init__(self, cache: RaggedCache, layer: nn.Module):
        self.states: RowStates = cache.by_row
        self.current, self.layer_idx, self._scans = cache.current, getattr(layer, "layer_idx", 0), 0
        offsets = torch.arange(self.current.positions.shape[1])
        at = torch.tensor(self.current.starts_host)[:, None] + offsets  # [B, Q]
        self._valid = (at >= 0) & (at < torch.tensor(self.current.kv_lengths)[:, None])  # False for padding

    def get_conv_state(self, *args, **kwargs) -> None:
        """Return None: the layer then calls `update_conv_state` for passes of any length."""

    get_recurrent_state = has_previous_state = get_conv_state  # the last one: transformers before 5.24

    def update_recurrent_state(self, state: Tensor, *args, **kwargs) -> None:
        """Do nothing: `scan` stores the state."""

    def update_conv_state(
        self, x: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs
    ) -> Tensor:
        """Return x [B, C, Q] after the inputs that a causal convolution of this size reads before x."""
        if conv_kernel_size is None:
            raise ValueError("its convolution has no kernel size")
        x = self._masked(x.transpose(1, 2))  # [B, Q, C]

        def replay(window: Tensor, token: Tokens) -> Tensor:
            return torch.cat([window[:, 1:], token["x"]], 1)

        def read(window: Tensor | None) -> tuple[Tensor, Tensor]:
            if window is None:
                window = x.new_zeros(len(x), conv_kernel_size - 1, x.shape[2])
            seen = torch.cat([window, x], 1)
            return seen, seen[:, seen.shape[1] - conv_kernel_size + 1 :]

        state = self.states.of(f"convolution {state_idx}", layer_idx)
        return state.read({"x": x}, self.current, replay, read).transpose(1, 2)

    def scan(self, scan: Scan, own: dict, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Return the outputs of a scan over the pass's tokens, and an empty tensor in place of the last state."""
        names = _argument_names(own[scan.name])
        rest = dict(zip(names, args, strict=False)) | kwargs
        tokens = {name: rest.pop(name).movedim(scan.time, 1) for name in scan.tokens}  # [B, Q, ...]
        rest.pop(scan.initial, None)

        def step(state: Tensor, token: Tokens) -> tuple[Tensor, Tensor]:
            return scan.step(own, token, rest, state)

        def read(state: Tensor | None) -> tuple[Tensor, Tensor]:
            if self._in_one_call(scan):
                given = rest | {name: self._masked(each).movedim(1, scan.time) for name, each in tokens.items()}
                if scan.initial is not None:
                    given[scan.initial] = state
                first = [given.pop(name) for name in names[: len(args)]]  # packages for GPUs name these differently
                return own[scan.name](*first, **given)
            outputs = []
            for q in range(self._valid.shape[1]):
                output, state = step(state, {name: each[:, q : q + 1] for name, each in tokens.items()})
                outputs.append(output)
            return torch.cat(outputs, scan.time), state

        state = self.states.of(f"scan {self._scans}", self.layer_idx)
        self._scans += 1
        output = state.read(tokens, self.current, lambda *each: step(*each)[1], read)
        return output, output.new_empty(0)

    def _in_one_call(self, scan: Scan) -> bool:
        """Return True if a single call of the scan reads the pass, as in transformers' prefill.

        Draft tokens are read step by step, as in transformers' decoding. In half precision, a scan rounds differently.
        Padding of a prefill precedes the text: there the state is zero and remains zero.
        """
        return self.current.settles and (scan.initial is not None or max(self.current.starts_host) <= 0)

    def _masked(self, tokens: Tensor) -> Tensor:
        if self._valid.all():
            return tokens
        hidden = ~self._valid.to(tokens.device)
        return tokens.masked_fill(hidden.view(*hidden.shape, *[1] * (tokens.ndim - 2)), 0)


# --- states by row --------------------------------------------------------------------------------


class RowState:
    """A recurrent state per row, valid before position `at`, and the recurrence's inputs from `at` on.

    state: [batch slots, ...]. inputs: by name [batch slots, width, ...], by offset from `at`. at: int64 [batch slots],
    on the host.
    """

    def __init__(self, rows: int):
        self.rows, self.state, self.inputs = rows, None, {}
        self.at = torch.zeros(rows, dtype=torch.int64)

    @property
    def width(self) -> int:
        """The number of inputs that the buffers hold per row."""
        return next((each.shape[1] for each in self.inputs.values()), 0)

    def read(self, tokens: Tokens, current: Pass, replay: Callable, read: Callable) -> Any:
        """Advance the rows of a pass to their committed tokens, and return the output of the pass.

        tokens: inputs [B, Q, ...] of the pass. replay(state, token): returns the state after a further token.
        read(state): returns the output of the pass and the last state. The state is None in the cache's first pass.
        """
        rows = slice(current.batch_slots.start, current.batch_slots.stop)
        starts = torch.tensor(current.starts_host).clamp(min=0)
        until, ends = torch.tensor(current.committed_until), torch.tensor(current.kv_lengths)
        behind = starts - self.at[rows]  # tokens between the state and the pass
        if int(behind.min()) < 0 or int(behind.max()) > self.width:
            raise RuntimeError("a pass starts before the recurrent state, or after the inputs that it left")
        settled = state = None if self.state is None else self.state[rows]
        kept = (until - self.at[rows]).minimum(behind)
        for offset in range(int(behind.max())):
            after = replay(state, {name: each[rows, offset : offset + 1] for name, each in self.inputs.items()})
            state, settled = _where(offset < behind, after, state), _where(offset < kept, after, settled)
        output, final = read(state)
        if current.settles:
            self._put(rows, final, ends, {})
        else:
            self._put(rows, settled, until, self._inputs(rows, tokens, kept, starts - until, ends - starts))
        return output

    def _inputs(self, rows: slice, tokens: Tokens, kept: Tensor, lead: Tensor, count: Tensor) -> Tokens:
        """Return the inputs from the new position on, after the state took in `kept` tokens. Offsets `lead` to `lead` +
        `count` hold inputs of this pass, the others hold inputs of earlier passes. kept, lead, count: int64 [B]."""
        queries = next(iter(tokens.values())).shape[1]
        offsets = torch.arange(max(self.width, int(lead.max()) + queries))
        own = (offsets >= lead[:, None]) & (offsets < (lead + count)[:, None])  # [B, width]
        old = (offsets + kept[:, None]).clamp(max=max(self.width - 1, 0))
        index = torch.where(own, self.width + offsets - lead[:, None], old)
        found = {}
        for name, each in tokens.items():
            both = torch.cat([self.inputs[name][rows], each], 1) if self.width else each
            at = index.to(each.device).view(*index.shape, *[1] * (each.ndim - 2))
            found[name] = both.gather(1, at.expand(-1, -1, *each.shape[2:]))
        return found

    def _put(self, rows: slice, state: Tensor, at: Tensor, inputs: Tokens) -> None:
        """Write the rows' state, position and inputs in a single call, so that an interrupt leaves all or none."""
        if self.state is None:
            self.state = state.new_zeros(self.rows, *state.shape[1:])
        if any(each.shape[1] > self.width for each in inputs.values()):
            wider = {name: each.new_zeros(self.rows, *each.shape[1:]) for name, each in inputs.items()}
            for name, old in self.inputs.items():
                wider[name][:, : old.shape[1]] = old
            self.inputs = wider
        into = [self.inputs[name][rows, : each.shape[1]] for name, each in inputs.items()]
        torch._foreach_copy_([self.state[rows], self.at[rows], *into], [state, at, *inputs.values()])

    def buffers(self) -> list[Tensor]:
        """Return all allocated tensors, [batch slots, ...]."""
        return [self.at, *([] if self.state is None else [self.state]), *self.inputs.values()]


class RowStates:
    """The recurrent states of a cache by name and layer, as its `RowStore`."""

    def __init__(self, cache: RaggedCache):
        self.cache, self.found = cache, defaultdict(lambda: RowState(cache.max_rows))
        cache.by_row = self

    def of(self, name: str, layer: int) -> RowState:
        """Return the state of this name, created on first use."""
        return self.found[name, layer]

    @property
    def row_bytes(self) -> int:
        """Bytes per row of all states and inputs."""
        return sum(buffer.nbytes for buffer in self.buffers()) // self.cache.max_rows

    def buffers(self) -> list[Tensor]:
        """Return all allocated tensors, [batch slots, ...]."""
        return [table for each in self.found.values() for table in each.buffers()]

    def clear(self, batch_slots: range) -> None:
        """Begin new texts in these batch slots."""
        if tables := self.buffers():
            torch._foreach_zero_([table[batch_slots.start : batch_slots.stop] for table in tables])

    def move_row(self, source: int, batch_slots: range) -> None:
        tables = self.buffers()
        to = [table[batch_slot] for batch_slot in batch_slots for table in tables]
        torch._foreach_copy_(to, [table[source] for _ in batch_slots for table in tables])

    def save_row(self, batch_slot: int) -> list[Tensor]:
        """Return a copy of a row after the prompt: alternately position and state. No inputs are pending then."""
        tables = (table for each in self.found.values() for table in (each.at, each.state))
        return [table[batch_slot].clone() for table in tables]

    def load_row(self, batch_slots: range, saved: list[Tensor]) -> None:
        for each, at, state in zip(self.found.values(), saved[::2], saved[1::2], strict=True):
            rows = slice(batch_slots.start, batch_slots.stop)
            each.at[rows], each.state[rows] = at, state

    def release(self) -> None:
        free(self.buffers())
        self.found.clear()


def _where(chosen: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return the new states of the chosen rows, bool [B] on the host, and the old states of the others."""
    if chosen.all():
        return new
    return torch.where(chosen.to(new.device).view(-1, *[1] * (new.ndim - 1)), new, old) if chosen.any() else old
