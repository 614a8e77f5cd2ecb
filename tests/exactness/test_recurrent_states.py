"""Recurrent, convolution and index states: rows reject drafts, wait, move, share prompts and are interrupted.

Tiny random models of transformers, one for each function in `recurrent.SCANS` and each way in which layers call it.
"""

import functools

import kinds
import numpy as np
import pytest
import torch
from double import Double
from sessions import run_to_the_end
from stale import texts_over_poison
from tabular_state import tabular_state
from tiny import feature_head, greedy_alone, ragged_prompts
from transformers import GenerationConfig, PreTrainedModel
from trial_policies import PerRow

import bass_core as bass
from bass_core.drafters import FeatureDrafter, SuffixDrafter
from bass_core.loading.quantization import quantized
from bass_core.model import probe, recurrent
from bass_lab.checks.enumeration import EXACT, exact_law, law_of_engine
from bass_lab.checks.tabular import total_variation
from bass_lab.drafters import LayerSkipDrafter

NEW = 10
PROMPTS = ragged_prompts(5, 11, 17, 1, 2, 23, 60, 30)
CHANGES = {"lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}}
FAMILIES = {  # kind of model: the function or the case that it stands for
    "qwen3_next": "gated delta rule, packed",
    "kimi_linear": "Kimi delta attention",
    "nemotron_h": "Mamba-2, whose scan clamps its time steps and whose step does not",
    "falcon_h1": "attention and a state in one layer",
    "jamba": "Mamba-1, whose scan has no initial state",
    "zamba": "a scan per head",
    "mamba2": "no attention",
    "lfm2": "convolutions alone",
    "deepseek_v32": "index keys",
}


@functools.cache
def model(kind: str, dtype: str = "float64", noise: float = 0.0) -> PreTrainedModel:
    return kinds.tiny(kind, noise, **CHANGES.get(kind, {})).to(getattr(torch, dtype))


@functools.cache
def alone(kind: str, dtype: str = "float64") -> list[list[int]]:
    return [greedy_alone(model(kind, dtype), prompt, NEW).tolist() for prompt in PROMPTS]


def pair_of(kind: str, dtype: str = "float64", draft="model") -> bass.ModelPair:
    return bass.ModelPair(model(kind, dtype), model(kind, dtype, noise=0.05) if draft == "model" else draft)


def decoded(pair: bass.ModelPair, **options) -> bass.Generation:
    options = {"draft_length": 4, "max_batch_size": 8, "eos_token_id": ()} | options
    return bass.generate(pair, PROMPTS, max_new_tokens=NEW, **options)


def texts(generation: bass.Generation) -> list[list[int]]:
    return [sequence.tolist() for sequence in generation.sequences]


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_text_equals_the_single_row(kind):
    for options in ({}, {"draft_length": PerRow(4), "max_batch_size": 3}):
        out = decoded(pair_of(kind), **options)
        assert texts(out) == alone(kind)
        assert 0.05 < out.trace.summary()["alpha"] < 1
    assert texts(decoded(pair_of(kind, "float32"), draft_length=3)) == alone(kind, "float32")
    assert texts(decoded(pair_of(kind, draft=None), draft_length=0, max_batch_size=5)) == alone(kind)


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba", "lfm2"])
@pytest.mark.parametrize("path", ["split", "eager"])
def test_other_attention_paths(kind, path):
    assert texts(decoded(pair_of(kind), attention=path, draft_length=PerRow(3))) == alone(kind)


@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_join_leave_and_move_while_long_prompts_are_read(kind):
    pair = pair_of(kind)
    with bass.Session(pair, max_batch_size=3, draft_length=3, prefill_chunk=4, eos_token_id=()) as session:
        handles = [session.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS[:3]]
        for _ in range(8):
            session.step()
        session.cancel(handles[0])
        handles += [session.submit(prompt, max_new_tokens=NEW) for prompt in (*PROMPTS[3:], PROMPTS[5], PROMPTS[0])]
        run_to_the_end(session)
        found = [session.result(handle).sequence.tolist() for handle in handles]
    own = alone(kind)
    assert found[1:] == [*own[1:], own[5], own[0]]
    assert 0 < handles[1].drafted


DRAFTERS = {
    "first layers": lambda target: LayerSkipDrafter(1),
    "quantized copy": lambda target: quantized(target, "int8"),
    "feature head": lambda target: FeatureDrafter(feature_head(target)),
    "n-grams": lambda target: bass.NgramDrafter(),
    "suffixes": lambda target: SuffixDrafter(),
    "attention only": lambda target: kinds.tiny("llama").to(torch.float32),
}


@pytest.mark.parametrize("draft", DRAFTERS)
def test_every_drafter_serves_a_hybrid_target(draft):
    target = model("qwen3_next", "float32")
    out = decoded(bass.ModelPair(target, DRAFTERS[draft](target)), max_batch_size=3, draft_length=3)
    assert texts(out) == alone("qwen3_next", "float32")


def test_recurrent_draft_serves_a_target_without_states():
    target = kinds.tiny("llama")
    out = decoded(bass.ModelPair(target, kinds.tiny("mamba")), max_batch_size=3)
    assert texts(out) == [greedy_alone(target, prompt, NEW).tolist() for prompt in PROMPTS]


class Paused(bass.DraftLengthPolicy):
    """Draft in some steps only, rows with different lengths: rows miss different numbers of tokens, also beyond 16."""

    name = "paused"

    def __init__(self, pause: int):
        self.pause, self.count = pause, 0

    def plan(self, rows):
        self.count += 1
        return 0 if self.count % self.pause else np.array([(3 * i + 1) % 5 for i in range(len(rows.ids))])


@pytest.mark.parametrize(("kind", "pause", "new"), [("qwen3_next", 3, 24), ("jamba", 22, 30), ("lfm2", 4, 20)])
def test_draft_catches_up_after_steps_without_drafts(kind, pause, new):
    """With the target as its own draft, all drafted tokens are accepted if no token was missed or read twice."""
    pair = bass.ModelPair(model(kind), model(kind))
    out = bass.generate(
        pair, PROMPTS[:5], max_new_tokens=new, draft_length=Paused(pause), max_batch_size=4, eos_token_id=()
    )
    assert texts(out) == [greedy_alone(model(kind), prompt, new).tolist() for prompt in PROMPTS[:5]]
    assert out.trace.summary()["alpha"] == 1


def test_coupled_samples_do_not_depend_on_draft_length_or_batch():
    options = {"num_return_sequences": 2, "temperature": 0.8, "verification": "coupled", "seed": 1}
    regular = decoded(pair_of("qwen3_next", draft=None), draft_length=0, **options)
    for draft, length, size in (("model", 4, 3), (LayerSkipDrafter(1), 2, 8), ("model", PerRow(4), 1)):
        out = decoded(pair_of("qwen3_next", draft=draft), draft_length=length, max_batch_size=size, **options)
        assert texts(out) == texts(regular)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_distribution_of_a_recurrent_target_and_draft(rule):
    target, draft = tabular_state(2, seed=1), tabular_state(2, seed=2)
    found = law_of_engine(target, draft, 4, lambda: 3, verification=rule)
    assert total_variation(found, exact_law(target, 4)) < EXACT
    prompts = ([0, 1], [1, 0, 0])
    found = law_of_engine(target, draft, 3, lambda: PerRow(most=2), prompts, verification=rule)
    assert total_variation(found, exact_law(target, 3, prompts)) < EXACT


def test_distribution_after_a_row_moves():
    target, draft = tabular_state(2, seed=3), tabular_state(2, seed=4)
    found = law_of_engine(target, draft, 3, lambda: 2, num_return_sequences=3, max_batch_size=2)
    assert total_variation(found, exact_law(target, 3, ([0, 1],) * 3)) < EXACT


@pytest.mark.parametrize("kind", ["nemotron_h", "qwen3_next"])
def test_logits_equal_the_models_own_steps_in_double_precision(kind):
    """The functions compute in float32 even in float64 models. Without this, the error is below 1e-12."""
    with Double():
        assert probe._probe_error(model(kind), "pad") < 1e-12


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba", "lfm2"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_interrupt_in_any_pass_changes_no_text(kind, chunk, monkeypatch):
    """Ctrl-C between two layers, in each pass of target and draft in turn: the repeated step gives the same text."""
    pair = pair_of(kind)
    layers = [list(each.modules()) for each in pair.models]
    for role in (0, 1):
        last = [layer for layer in layers[role] if recurrent.keeps_state(layer)][-1]
        for call in range(1, 26):
            calls = iter(range(1000))

            def interrupt(*args, calls=calls, call=call):
                if next(calls) == call:
                    raise KeyboardInterrupt

            with monkeypatch.context() as patch, _session(pair, prefill_chunk=chunk) as session:
                handles = [session.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS[:3]]
                patch.setitem(last._forward_pre_hooks, 0, interrupt)
                while not session.idle:
                    try:
                        session.step()
                    except KeyboardInterrupt:
                        pass
                found = [session.result(handle).sequence.tolist() for handle in handles]
                assert found == alone(kind)[:3], (role, call)


def _session(pair: bass.ModelPair, **options) -> bass.Session:
    return bass.Session(pair, **({"draft_length": 3, "max_batch_size": 2, "eos_token_id": ()} | options))


def test_rejected_drafts_alone_change_no_text():
    class Wrong(bass.NgramDrafter):
        def draft(self, context, lengths, policy):
            known = [alone("jamba")[0]] * len(lengths)
            at = context.lengths_host - len(PROMPTS[0])
            tokens = [[(row[min(a + j, NEW - 1)] + 1) % 97 for j in range(4)] for row, a in zip(known, at, strict=True)]
            return bass.Draft.of(torch.tensor(tokens), np.minimum(lengths, 4))

    out = bass.generate(pair_of("jamba", draft=Wrong()), [PROMPTS[0]], max_new_tokens=NEW, eos_token_id=())
    assert texts(out) == alone("jamba")[:1]
    assert out.trace.summary()["alpha"] == 0


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba"])
def test_memory_per_row_is_that_of_the_formula_and_stays_flat(kind):
    """State, convolution inputs, and the inputs of K + 1 tokens of the last pass."""
    k, rows = 3, 4
    with _session(pair_of(kind), max_batch_size=rows, draft_length=k) as session:
        sizes = set()
        for _ in range(50):
            for prompt in PROMPTS[:4]:
                session.submit(prompt, max_new_tokens=6)
            run_to_the_end(session)
            sizes.add(session.target.states.row_bytes)
    assert len(sizes) == 1
    config = model(kind).config
    if kind == "qwen3_next":
        heads, size = config.linear_num_value_heads, config.linear_key_head_dim
        channels, width = 3 * heads * size, config.linear_conv_kernel_dim
        state, token = heads * size * size * 4, channels * 8 + 2 * heads * 8  # float32; q, k, v and two gates
    else:
        channels, width = config.mamba_expand * config.hidden_size, config.mamba_d_conv
        state, token = channels * config.mamba_d_state * 8, 3 * channels * 8 + 2 * config.mamba_d_state * 8
    window, positions = (width - 1) * channels * 8, 2 * 8
    assert sizes == {state + window + (k + 1) * (token + channels * 8) + positions}  # of a single layer


@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v32"])
def test_stale_slots_never_matter(kind):
    assert texts_over_poison(pair_of(kind), PROMPTS[:6], NEW) == alone(kind)[:6]


def test_saved_prompts_serve_later_samples():
    pair = pair_of("qwen3_next")
    out = decoded(pair, num_return_sequences=3, max_batch_size=4)
    assert texts(out) == [text for text in alone("qwen3_next") for _ in range(3)]


def test_steps_are_launched_and_recording_is_refused():
    with pytest.raises(ValueError, match="recurrent states do not support CUDA graphs"):
        decoded(pair_of("qwen3_next"), compile="compiled")


def test_model_is_left_as_it_was():
    target = model("qwen3_next")
    decoded(pair_of("qwen3_next"))
    assert all("forward" not in vars(module) for module in target.modules())
    target.generation_config = GenerationConfig()
    assert greedy_alone(target, PROMPTS[0], NEW).tolist() == alone("qwen3_next")[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("llama", "keys and values by position, which later tokens overwrite"),
        ("qwen3_next", "recurrent states of 1 layers (torch_chunk_gated_delta_rule of transformers)"),
        ("lfm2", "states of 2 convolutions"),
        ("deepseek_v32", "an index's keys"),
    ],
)
def test_kept_state_is_explained(kind, words):
    assert words in recurrent.explained(model(kind))


def test_package_of_kernels_is_named(monkeypatch):
    layer = next(layer for layer in model("qwen3_next").modules() if recurrent.keeps_state(layer))

    def chunk_gated_delta_rule(*args, **kwargs): ...

    chunk_gated_delta_rule.__module__ = "fla.ops.gated_delta_rule"
    table = recurrent.plain_forward(layer).__globals__
    monkeypatch.setitem(table, "torch_chunk_gated_delta_rule", chunk_gated_delta_rule)
    assert "of fla)" in recurrent.explained(model("qwen3_next"))
