"""A model's layers through `torch.compile`: one compilation serves all layers of a kind, and every model of that shape.
What surrounds them is compiled in parts of its own.

Compiling a whole model takes minutes for deep ones, again for each number of tokens. Its layers are the same code on
other weights: compiled by themselves they take seconds, whatever the depth. What a layer takes from the cache is handed
to it alone, since code that picks one of many layers by its number would be compiled for each number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.custom_graph_pass import CustomGraphPass
from transformers import PreTrainedModel

from bass_core.gpu import fused_projections
from bass_core.gpu.graphs import unwatched
from bass_core.model.architectures import layers_of
from bass_core.model.cache import RaggedCache, RaggedLayer
from bass_core.model.patching import changed
from bass_core.model.runner import Layers

BACKEND = "inductor"
GRAPHS = 1024  # of one kind of layer in a process: eight for each shape of model that has it

_compiled: dict[Callable, Callable] = {}  # by the layers' own forward; what is compiled lives as long as the process


class LaunchedLayers(Layers):
    """Layers on a GPU, operator by operator. Sibling projections lie side by side, since a later session that compiles
    would move weights that recordings point at."""

    def __init__(self, model: PreTrainedModel, cache: RaggedCache):
        self.model, self.cache, self.changes = model, cache, []
        self.siblings = fused_projections.arrange(model)


class CompiledLayers(LaunchedLayers):
    """Layers through `torch.compile` in passes of fixed shape, sibling projections as one product."""

    @contextmanager
    def fixed(self) -> Iterator[None]:
        products = [change for group in self.siblings for change in fused_projections.together(group)]
        with changed(products), using(self.model, self.cache):
            yield

    def fused(self, function: Callable) -> Callable:
        return region(function)


class LayerView:
    """The cache as one layer sees it."""

    def __init__(self, layer: RaggedLayer):
        self.layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return self.layer.update(key_states, value_states)

    def get_seq_length(self, *args) -> int:
        return self.layer.get_seq_length()


@contextmanager
def using(model: PreTrainedModel, cache: RaggedCache) -> Iterator[None]:
    """Inside, the model's layers run compiled, over this cache. Raises ValueError for a model without such a list."""
    layers = layers_of(model)
    if len(layers) != len(cache.layers) or any("forward" in vars(layer) for layer in layers):
        raise ValueError(
            f"{type(model).__name__} cannot be compiled layer by layer: {len(cache.layers)} layers keep keys and "
            f"values, its list has {len(layers)}, or something stands in for their own code (hooks of accelerate, "
            "say). Use compile='off' or 'graphs'"
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
            f"{type(model).__name__}'s layers cannot be compiled ({reason}). Use compile='off' or 'graphs'"
        ) from error
    finally:
        for each in (*layers, *around):
            vars(each).pop("forward", None)  # the class's own is seen again


@contextmanager
def _open_shapes() -> Iterator[None]:
    """Numbers of rows, tokens and slots stay open in compiled code (but for one row, one token): eight graphs serve a
    pair. Two numbers that happen to agree are two (duck shapes), and a layer's constants stay constants."""
    limits = {"recompile_limit": GRAPHS, "accumulated_recompile_limit": GRAPHS}
    numbers = torch.fx.experimental._config.patch(use_duck_shape=False)
    passes = torch._inductor.config.patch(joint_custom_pre_pass=_OneOfEach())
    with torch._dynamo.config.patch(**limits, specialize_float=True), numbers, passes:
        yield


class _OneOfEach(CustomGraphPass):
    """Where two operators of a graph do the same, one is left: products of siblings whose weights lie side by side."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        graph.owning_module.graph = fx_graph_cse(graph)

    def uuid(self) -> str:
        return "bass: one of each"


def region(function: Callable) -> Callable:
    """The function as one compiled region, for tensors of any shape."""
    compiled = _compile(function)

    def call(*args):
        with _open_shapes():
            return compiled(*args)

    return call


def _is_code(module: nn.Module) -> bool:
    """Whether a part of a decoder beside its layers is worth compiling: a norm or rotary factors of the model's own are
    many operators, a module of torch's is one."""
    own = not type(module).__module__.startswith("torch.") and not isinstance(module, nn.Embedding)
    return own and "forward" not in vars(module)


def _with_view(layer: nn.Module, view: LayerView, cache: RaggedCache) -> Callable:
    compiled = _compile(type(layer).forward)

    def forward(*args, **kwargs):
        args = [view if value is cache else value for value in args]
        return compiled(layer, *args, **{name: view if value is cache else value for name, value in kwargs.items()})

    return forward


def _compile(function: Callable, whole: bool = True) -> Callable:
    """whole: it is refused if a part of it cannot be compiled."""
    if function not in _compiled:
        _compiled[function] = unwatched(torch.compile(function, fullgraph=whole, dynamic=True, backend=BACKEND))
    return _compiled[function]
