"""Run a model's layers through `torch.compile`. All layers of a kind share a compilation, in all models of that shape.

Compiling a deep model as a whole takes minutes, and again for each number of tokens. The layers run the same code with
different weights: compiling a single layer takes seconds for any depth. Each layer receives only its own part of the
cache, since code that indexes the cache by layer number would be compiled for each number.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.custom_graph_pass import CustomGraphPass
from transformers import PreTrainedModel

from bass_core.gpu.graphs import unwatched
from bass_core.model.architectures import layers_of
from bass_core.model.cache import RaggedCache, RaggedLayer
from bass_core.model.fused_projections import Group, arrange, joint
from bass_core.model.patching import Change, changed
from bass_core.model.runner import Layers

BACKEND = "inductor"
GRAPHS = 1024  # limit of compiled graphs per kind of layer and process; each model shape takes eight

_compiled: dict[Callable, Callable] = {}  # compiled functions by original function, kept for the whole process


class LaunchedLayers(Layers):
    """Layers on a GPU, operator by operator. Sibling projections are made adjacent here already. A later session with
    compiled layers would otherwise move weights to which captured graphs point."""

    def __init__(self, model: PreTrainedModel, cache: RaggedCache):
        self.model, self.cache, self.faster = model, cache, None
        self.siblings = arrange(model)


class CompiledLayers(LaunchedLayers):
    """Layers through `torch.compile` in passes of fixed shape, with sibling projections as one matrix product."""

    @contextmanager
    def fixed(self) -> Iterator[None]:
        products = [change for group in self.siblings for change in together(group)]
        with changed(products), using(self.model, self.cache):
            yield

    def fused(self, function: Callable) -> Callable:
        return region(function)


def together(group: Group) -> list[Change]:
    """Return changes for `patching.changed` to compute the group as a single product. Returns no changes if the weights
    are not adjacent any more or a module's forward is replaced."""
    one = joint(group)
    if one is None or any("forward" in vars(part) for part in group):
        return []
    changes, first = [], 0
    for part in group:
        own = {"_whole": one, "_first": first, "forward": types.MethodType(_part, part)}
        changes += [(vars(part), name, value) for name, value in own.items()]
        first += part.out_features
    return changes


def _part(self: nn.Linear, x: Tensor) -> Tensor:
    """Forward of one module: its columns of the joint product. A compiler merges the equal products of the siblings."""
    return F.linear(x, *self._whole)[..., self._first : self._first + self.out_features]


class LayerView:
    """The part of the cache that belongs to one layer."""

    def __init__(self, layer: RaggedLayer):
        self.layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return self.layer.update(key_states, value_states)

    def get_seq_length(self, *args) -> int:
        return self.layer.get_seq_length()


@contextmanager
def using(model: PreTrainedModel, cache: RaggedCache) -> Iterator[None]:
    """Run the model's layers compiled, over this cache, inside the context. Raises ValueError if the model's layers
    cannot be compiled."""
    layers = layers_of(model)
    if len(layers) != len(cache.layers) or any("forward" in vars(layer) for layer in layers):
        raise ValueError(
            f"{type(model).__name__} cannot be compiled layer by layer: the cache has {len(cache.layers)} layers and "
            f"the model {len(layers)}, or a layer's forward is replaced (for instance by accelerate). Use "
            "compile='off' or 'graphs'"
        )
    around = [each for each in model.get_decoder().children() if _is_code(each)]
    try:
        for layer, cached in zip(layers, cache.layers, strict=True):
            layer.forward = _with_view(layer, LayerView(cached), cache)
        for each in around:
            each.forward = functools.partial(_compile(type(each).forward, whole=False), each)
        with _open_shapes():
            yield
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{type(model).__name__}'s layers cannot be compiled ({reason}); use compile='off' or 'graphs'"
        ) from error
    finally:
        for each in (*layers, *around):
            vars(each).pop("forward", None)  # restores the class's method


@contextmanager
def _open_shapes() -> Iterator[None]:
    """Compile with dynamic numbers of rows, tokens and KV slots. Eight graphs serve a pair, since sizes of 1 are
    specialized. Equal sizes stay separate symbols (no duck shapes), and float constants of a layer are specialized."""
    limits = {"recompile_limit": GRAPHS, "accumulated_recompile_limit": GRAPHS}
    numbers = torch.fx.experimental._config.patch(use_duck_shape=False)
    passes = torch._inductor.config.patch(joint_custom_pre_pass=_OneOfEach())
    with torch._dynamo.config.patch(**limits, specialize_float=True), numbers, passes:
        yield


class _OneOfEach(CustomGraphPass):
    """Eliminates common subexpressions of a graph, here the joint products of sibling projections."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        graph.owning_module.graph = fx_graph_cse(graph)

    def uuid(self) -> str:
        return "bass: one of each"


def region(function: Callable) -> Callable:
    """Return the function compiled as one region, for tensors of any shape."""
    compiled = _compile(function)

    def call(*args):
        with _open_shapes():
            return compiled(*args)

    return call


def _is_code(module: nn.Module) -> bool:
    """Return True if a module next to the layers is worth compiling. Norms and rotary embeddings of the model's code
    consist of many operators; a module of torch is a single operator."""
    own = not type(module).__module__.startswith("torch.") and not isinstance(module, nn.Embedding)
    return own and "forward" not in vars(module)


def _with_view(layer: nn.Module, view: LayerView, cache: RaggedCache) -> Callable:
    compiled = _compile(type(layer).forward)

    def forward(*args, **kwargs):
        args = [view if value is cache else value for value in args]
        return compiled(layer, *args, **{name: view if value is cache else value for name, value in kwargs.items()})

    return forward


def _compile(function: Callable, whole: bool = True) -> Callable:
    """Return the compiled function. whole: fail if a part of the function cannot be compiled."""
    if function not in _compiled:
        _compiled[function] = unwatched(torch.compile(function, fullgraph=whole, dynamic=True, backend=BACKEND))
    return _compiled[function]
