"""Layers through torch.compile: the same tokens, few compilations for all shapes, and a model left as it was."""

import dataclasses
import threading

import pytest
import torch
from recording import assert_same, pair, use_on_cpu
from tiny import ragged_prompts, tiny_model
from torch._dynamo.utils import counters

import bass_core as bass
from bass_core import attention, compiled_layers, randomness, step_ahead
from bass_core.graphs import NothingReadByHost, NotRecordable

PROMPTS = ragged_prompts(5, 11)


def decode(models, compile, new=12, **options):
    options = {"draft_length": 2, "eos_token_id": ()} | options
    return bass.generate(models, PROMPTS, max_new_tokens=new, compile=compile, **options)


def assert_equals_eager(models, **options):
    expected, found = (decode(models, way, **options) for way in ("off", "compiled"))
    assert [s.tolist() for s in found.sequences] == [s.tolist() for s in expected.sequences]
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert found.trace.meta["compile"] == "compiled"


def test_compiled_equals_eager(monkeypatch):
    """By inductor, to machine code, seconds per shape: drafting one token makes all passes two tokens long."""
    monkeypatch.setattr(compiled_layers, "_compiled", {})  # nothing of what was compiled before
    torch._dynamo.reset()
    counters.clear()
    found = {}
    for way in ("off", "compiled"):
        options = {"draft_length": 1, "temperature": 0.8, "eos_token_id": ()}
        with bass.Session(pair(), compile=way, **options) as session:
            handle = session.submit(PROMPTS[0], max_new_tokens=24)
            while not session.idle:
                session.step()
            found[way] = session.result(handle)
    assert torch.equal(found["compiled"].sequence, found["off"].sequence)
    torch.testing.assert_close(found["compiled"].logprobs, found["off"].logprobs, rtol=0, atol=1e-5)
    # One for layers; the norm, rotary factors, where tokens go (2), random numbers, the draw, whether all was finite.
    assert counters["stats"]["unique_graphs"] == 8 and counters["inductor"]["extern_calls"] > 0


@pytest.mark.parametrize(
    "architecture",
    [
        "gpt2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gemma2", "qwen2", "mistral", "phi3", "opt", "codegen")
        ),
    ],
)
@pytest.mark.usefixtures("traced_only")
def test_layers_of_every_family_are_traced_whole(architecture):
    assert_equals_eager(pair(architecture))


def test_nothing_is_compiled_anew_over_fifty_steps(graphs):
    """One graph for one token, one for more, whatever the depth; and then none, while rows grow step by step."""
    layers, _ = graphs
    room = {"max_position_embeddings": 512}
    models = bass.ModelPair(tiny_model(num_hidden_layers=7, **room), tiny_model(noise=0.1, **room))
    options = {"draft_length": 2, "acceptance": "synthetic:0.3", "eos_token_id": ()}
    with bass.Session(models, compile="compiled", **options) as session:
        for prompt in ragged_prompts(130, 134):
            session.submit(prompt, max_new_tokens=90)
        for _ in range(3):
            session.step()
        known = dict(counters["stats"])
        assert len(layers) == 2  # the draft's one token; its two and the target's three
        while len(session.rows.live) == 2:  # to the end of a row, where drafts are cut
            session.step()
        assert counters["stats"] == known
        steps = session.trace.steps.query("kind == 'decode'")
        assert steps.step.nunique() > 52 and (steps.drafted < steps.k).any()
        assert counters["graph_break"] == {}


@pytest.fixture
def graphs(traced_only, monkeypatch):
    """The graphs that are compiled: lists of what they call, those of layers and the small ones around them."""
    layers, around = [], []

    def keep(graph, inputs):
        calls = [node.target for node in graph.graph.nodes]
        (layers if torch._C._nn.linear in calls else around).append(calls)
        return graph.forward

    monkeypatch.setattr(compiled_layers, "BACKEND", keep)
    return layers, around


@pytest.mark.slow
def test_eight_graphs_serve_every_batch_draft_length_and_cache(graphs):
    """The shapes of the GPU benchmark's quick plan, and rows that end one after the other."""
    room = {"max_position_embeddings": 1024}
    models = bass.ModelPair(tiny_model(**room), tiny_model(hidden_size=16, num_hidden_layers=1, **room))
    options = {"compile": "compiled", "acceptance": "synthetic:0.8", "eos_token_id": ()}
    for rows in (8, 32, 1):
        for k, new in ((0, 3), (6, 30), (5, 300), (bass.BassHeuristic(), 40)):
            with bass.Session(models, max_batch_size=rows, draft_length=k, **options) as session:
                for prompt in ragged_prompts(*range(9, 9 + rows)):
                    session.submit(prompt, max_new_tokens=new)
                for _ in range(3):  # the prompts, and two steps
                    session.step()
    with bass.Session(models, max_batch_size=8, draft_length=3, **options) as session:
        for index, prompt in enumerate(ragged_prompts(*range(9, 17))):
            session.submit(prompt, max_new_tokens=3 + 4 * index)
        while len(session.rows.live) > 1 or session.rows.waiting:
            session.step()
    layers, around = graphs
    # Of each model those for one token and for more, for one row and for more.
    assert len(layers) == 8 and counters["graph_break"] == {}
    assert len(around) <= 24


def test_both_limits_to_compiling_anew_are_raised():
    before = torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit
    with compiled_layers._open_shapes():
        during = torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit
        assert min(during) > max(before)
    assert before == (torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit)


def test_random_numbers_and_draws_are_the_same_to_the_bit_when_compiled():
    generator = torch.Generator().manual_seed(0)
    streams = torch.randint(-(2**63), 2**63 - 1, (3,), generator=generator)
    alone = randomness.StepKeys(streams, torch.tensor([0, 5, 2**40]), 4)
    compiled = dataclasses.replace(alone, fused=compiled_layers.region)
    assert torch.equal(compiled._numbers, alone._numbers)
    for seed in range(50):
        generator.manual_seed(seed)
        probs = torch.rand(3, 40, generator=generator).pow(8)
        probs[:, seed % 40] = 0
        for slot in range(4):
            expected = randomness.draw(probs, alone.draft(slot))
            assert torch.equal(randomness.draw(probs, compiled.draft(slot)), expected)


def test_the_largest_logit_is_the_first_of_equals():
    """One operator gives it and its id, where `argmax` alone had given the id."""
    logits = torch.randint(0, 4, (64, 97), generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[0, 5], logits[1, 7] = torch.nan, torch.inf
    assert torch.equal(logits.max(-1).indices, logits.argmax(-1)) and logits.max(-1).values[:2].isfinite().sum() == 0


def watched(function):
    """Records nothing, but looks for what a CUDA graph could not hold."""
    with NothingReadByHost():
        function()
    return function


@pytest.mark.usefixtures("traced_only")
def test_what_the_host_reads_outside_the_compiled_layers_is_noticed(monkeypatch):
    monkeypatch.setattr(step_ahead, "launched_each_time", watched)
    target = tiny_model.__wrapped__()
    models = bass.ModelPair(target, tiny_model(noise=0.1))
    decode(models, "compiled")
    target.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * float(args[0].sum() > 0),))
    with pytest.raises(NotRecordable, match="compile='off'"):
        decode(models, "compiled")


@pytest.mark.usefixtures("traced_only")
def test_layers_are_the_models_own_again_afterwards():
    models = pair()
    decode(models, "compiled")
    assert all("forward" not in vars(layer) for layer in compiled_layers.layers_of(models.target))


@pytest.mark.usefixtures("traced_only")
def test_layers_in_somebody_elses_hands_are_not_touched():
    """accelerate, for one, hangs its hooks on a layer's forward."""
    models = bass.ModelPair(tiny_model.__wrapped__(), tiny_model())
    layer = compiled_layers.layers_of(models.target)[1]
    hooked = layer.forward = layer.forward
    with pytest.raises(ValueError, match=r"layer by layer.*compile='off'"):
        decode(models, "compiled")
    assert layer.forward is hooked


@pytest.mark.usefixtures("traced_only")
def test_a_model_that_cannot_be_traced_is_refused_by_name():
    """Mixtral's plain loop over experts depends on which of them have tokens."""
    models = pair("mixtral")
    with pytest.raises(ValueError, match=r"MixtralForCausalLM's layers cannot be compiled.*compile='off'"):
        decode(models, "compiled")
    assert all("forward" not in vars(layer) for layer in compiled_layers.layers_of(models.target))


def test_sessions_of_the_same_shape_share_what_was_compiled(traced_only):
    models = pair()
    decode(models, "compiled")
    known = dict(counters["stats"])
    decode(models, "compiled")
    assert counters["stats"] == known


def test_recorded_and_compiled_steps_have_the_same_columns(monkeypatch):
    use_on_cpu(monkeypatch)
    recorded, _ = assert_same(pair(), PROMPTS, new=6, draft_length=2)
    assert recorded.trace.summary()["compile"] == "graphs"


def test_the_pass_at_hand_is_no_default_of_a_class():
    """torch 2.11 would compile the default, None, where the thread has a pass."""
    found = []
    thread = threading.Thread(target=lambda: found.append(attention._thread.current))
    thread.start()
    thread.join()
    assert found == [None] and not hasattr(type(attention._thread), "current")
