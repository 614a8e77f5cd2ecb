"""torch.compile keeps the tokens, compiles few graphs for all shapes, and restores the model."""

import pytest
import torch
from recording import pair
from tiny import ragged_prompts, tiny_model
from torch._dynamo.utils import counters
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import bass_core as bass
from bass_core.gpu import compiled_layers, overlap
from bass_core.gpu.graphs import NothingReadByHost, NotRecordable
from bass_core.model.architectures import layers_of
from bass_lab.synthetic_acceptance import SyntheticAcceptance

PROMPTS = ragged_prompts(5, 11)


def decode(models, compile, prompts=PROMPTS, **options):
    options = {"draft_length": 2, "max_new_tokens": 12, "eos_token_id": ()} | options
    return bass.generate(models, prompts, compile=compile, **options)


def assert_equals_eager(models, **options) -> bass.Generation:
    expected, found = (decode(models, way, **options) for way in ("off", "compiled"))
    assert [s.tolist() for s in found.sequences] == [s.tolist() for s in expected.sequences]
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert found.trace.meta["compile"] == "compiled"
    return found


def watched(function):
    """Capture nothing, but refuse host access like a CUDA graph."""
    with NothingReadByHost():
        function()
    return function


@pytest.fixture
def graphs(traced_only, monkeypatch):
    """Return the calls of the compiled graphs: graphs of layers, and small graphs around them."""
    layers, around = [], []

    def keep(graph, inputs):
        config = torch._dynamo.config
        assert min(config.recompile_limit, config.accumulated_recompile_limit) >= compiled_layers.GRAPHS
        calls = [node.target for node in graph.graph.nodes]
        (layers if torch._C._nn.linear in calls else around).append(calls)
        return graph.forward

    monkeypatch.setattr(compiled_layers, "BACKEND", keep)
    monkeypatch.setattr(overlap, "launched_each_time", watched)
    return layers, around


@pytest.mark.ci
def test_few_graphs_serve_all_steps_and_sessions(graphs):
    room = {"max_position_embeddings": 256}
    models = bass.ModelPair(tiny_model.__wrapped__(num_hidden_layers=3, **room), tiny_model(noise=0.1, **room))
    found = assert_equals_eager(models, prompts=ragged_prompts(130, 134), max_new_tokens=24)
    steps = found.trace.steps.query("kind == 'decode'")
    assert steps.step.nunique() > 12 and (steps.drafted < steps.k).any()  # drafts are cut at the end of a row
    assert len(graphs[0]) == 2  # one draft token; two draft tokens and three target tokens
    assert counters["graph_break"] == {}
    known = dict(counters["stats"])
    decode(models, "compiled")
    assert counters["stats"] == known
    assert not any("forward" in vars(module) for model in models.models for module in model.modules())
    # This hook reads on the host between compiled parts.
    models.target.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * float(args[0].sum() > 0),))
    with pytest.raises(NotRecordable, match="compile='off'"):
        decode(models, "compiled")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "phi3", "opt", "codegen"])
@pytest.mark.usefixtures("traced_only")
def test_layers_of_every_family_are_traced_whole(architecture):
    assert_equals_eager(pair(architecture), max_new_tokens=6)


@pytest.mark.ci
def test_machine_code_equals_eager(monkeypatch):
    """Two tokens in every pass keep the number of graphs at eight."""
    monkeypatch.setattr(compiled_layers, "_compiled", {})
    torch._dynamo.reset()
    counters.clear()
    assert_equals_eager(pair(), prompts=PROMPTS[:1], draft_length=1, temperature=0.8, max_new_tokens=24)
    # Layers (1); norm, rotary factors, token indices (2), random numbers, draw, NaN check.
    assert counters["stats"]["unique_graphs"] == 8 and counters["inductor"]["extern_calls"] > 0


@pytest.mark.slow
def test_eight_graphs_serve_every_batch_draft_length_and_cache(graphs):
    room = {"max_position_embeddings": 1024}
    models = bass.ModelPair(tiny_model(**room), tiny_model(hidden_size=16, num_hidden_layers=1, **room))
    options = {"compile": "compiled", "acceptance": SyntheticAcceptance.named("synthetic:0.8"), "eos_token_id": ()}
    for rows in (8, 32, 1):
        for k, new in ((0, 3), (6, 30), (5, 300), (bass.BassHeuristic(), 40)):
            with bass.Session(models, max_batch_size=rows, draft_length=k, **options) as session:
                for prompt in ragged_prompts(*range(9, 9 + rows)):
                    session.submit(prompt, max_new_tokens=new)
                for _ in range(3):  # the prompts and two steps
                    session.step()
    with bass.Session(models, max_batch_size=8, draft_length=3, **options) as session:
        for index, prompt in enumerate(ragged_prompts(*range(9, 17))):
            session.submit(prompt, max_new_tokens=3 + 4 * index)
        while len(session.rows.live) > 1 or session.rows.waiting:
            session.step()
    layers, around = graphs
    # Per model: one token or more, one row or more.
    assert len(layers) == 8 and counters["graph_break"] == {}
    assert len(around) <= 24


@pytest.mark.usefixtures("traced_only")
def test_layers_with_a_forward_of_the_owner_are_refused():
    models = bass.ModelPair(tiny_model.__wrapped__())
    layer = layers_of(models.target)[1]
    hooked = layer.forward = layer.forward
    with pytest.raises(ValueError, match=r"layer by layer.*compile='off'"):
        decode(models, "compiled", draft_length=0)
    assert layer.forward is hooked


class Branching(LlamaDecoderLayer):
    """A layer with a path that depends on values, like Mixtral's plain loop over experts."""

    def forward(self, hidden_states, *args, **options):
        read = float(hidden_states.abs().sum()) >= 0
        return super().forward(hidden_states if read else -hidden_states, *args, **options)


@pytest.mark.usefixtures("traced_only")
def test_model_that_cannot_be_traced_is_refused_by_name():
    models = bass.ModelPair(tiny_model.__wrapped__())
    layers = layers_of(models.target)
    for layer in layers:
        layer.__class__ = Branching
    with pytest.raises(ValueError, match=r"LlamaForCausalLM's layers cannot be compiled.*compile='off'"):
        decode(models, "compiled", draft_length=0)
    assert all("forward" not in vars(layer) for layer in layers)
