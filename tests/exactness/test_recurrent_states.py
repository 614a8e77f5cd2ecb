"""Recurrent, convolution and index states: rows reject drafts, wait, move, share prompts and are interrupted.

Tiny random models of transformers, one for each function in `recurrent.SCANS` and each way in which layers call it.
"""

import copy
import functools
import itertools
from types import SimpleNamespace

import kinds
import numpy as np
import pytest
import torch
from double import Double
from sessions import run_to_the_end, session_over
from stale import texts_over_poison
from tabular_state import tabular_state
from tiny import BYTES, byte_tokenizer, feature_head, greedy_alone, ragged_prompts
from transformers import GenerationConfig, PreTrainedModel
from trial_policies import PerRow

import bass_core as bass
from bass_core.drafters import FeatureDrafter, SuffixDrafter
from bass_core.loading.quantization import quantized
from bass_core.model import probe, recurrent
from bass_lab.checks import doctor
from bass_lab.checks.enumeration import EXACT, exact_law, law_of_engine
from bass_lab.checks.tabular import total_variation
from bass_lab.drafters import LayerSkipDrafter

NEW = 10
PROMPTS = ragged_prompts(5, 11, 17, 1, 2, 23, 60, 30)
CHANGES = {"lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}}
FAMILIES = {  # kind of model: the function or the case that it stands for
    "qwen3_next": "gated delta rule, packed",
    "kimi_linear": "Kimi delta attention",
    "nemotron_h": "Mamba-2; only the scan clamps its time steps",
    "falcon_h1": "attention and a state in one layer",
    "jamba": "Mamba-1; the scan has no initial state",
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


@pytest.mark.parametrize(("kind", "path"), [("qwen3_next", "split"), ("jamba", "eager"), ("mamba", "eager")])
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
    assert handles[1].drafted > 0


DRAFTERS = {
    "first layers": lambda target: LayerSkipDrafter(1),
    "quantized copy": lambda target: quantized(target, "int8"),
    "feature head": lambda target: FeatureDrafter(feature_head(target)),
    "n-grams": lambda target: bass.NgramDrafter(),
    "suffixes": lambda target: SuffixDrafter(),
    "attention only": lambda target: kinds.tiny("llama").to(torch.float32),
}


@pytest.mark.parametrize(
    ("kind", "draft"),
    [*(("qwen3_next", draft) for draft in DRAFTERS), *((kind, "first layers") for kind in ("falcon_h1", "mamba2"))],
)
def test_every_drafter_serves_a_hybrid_target(kind, draft):
    target = model(kind, "float32")
    out = decoded(bass.ModelPair(target, DRAFTERS[draft](target)), max_batch_size=3, draft_length=3)
    assert texts(out) == alone(kind, "float32")


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
    found = law_of_engine(target, draft, 2, lambda: 2, num_return_sequences=3, max_batch_size=2)
    assert total_variation(found, exact_law(target, 2, ([0, 1],) * 3)) < EXACT


def test_states_equal_a_recurrence_from_the_start_after_any_passes():
    """Rows settle, repeat, skip and reject different numbers of tokens. A state is a number modulo a prime."""
    generator = np.random.default_rng(0)
    rows, length, prime = 5, 400, 10_007
    tokens = torch.from_numpy(generator.integers(1, prime, (rows, 4 * length)))
    reference = torch.zeros(rows, 4 * length + 1, dtype=torch.int64)
    for position in range(4 * length):
        reference[:, position + 1] = (3 * reference[:, position] + tokens[:, position]) % prime
    states, known, passes = recurrent.RowState(rows), np.zeros(rows, int), 0

    def replay(state, token):
        return (3 * state + token["x"][:, 0]) % prime

    while known.min() < length:
        first = int(generator.integers(rows))
        slots = np.arange(first, int(generator.integers(first, rows)) + 1)
        whole = passes == 0 or generator.random() < 0.1
        slots = np.arange(rows) if passes == 0 else slots
        at = states.at.numpy()[slots]
        until = generator.integers(at, np.minimum(known[slots], at + 6) + 1)
        starts = generator.integers(until, known[slots] + 1)
        counts = np.full(len(slots), 3) if whole else generator.integers(0, 5, len(slots))
        counts[0] = max(counts[0], 1)
        true = counts if whole else generator.integers(0, counts + 1)
        width = int(counts.max())
        offsets = starts[:, None] + np.arange(width)
        right = torch.arange(width) < torch.from_numpy(true)[:, None]
        fed = torch.where(right, tokens[slots[:, None], offsets], 1)
        ends = (starts + counts).tolist()
        current = SimpleNamespace(
            batch_slots=range(slots[0], slots[-1] + 1),
            starts_host=starts.tolist(),
            kv_lengths=ends,
            committed_until=ends if whole else until.tolist(),
            settles=bool(whole),
        )

        def read(state, fed=fed):
            outputs = [torch.zeros_like(fed[:, 0]) if state is None else state]
            for q in range(fed.shape[1]):
                outputs.append((3 * outputs[-1] + fed[:, q]) % prime)
            return torch.stack(outputs, 1), outputs[-1]

        found = states.read({"x": fed}, current, replay, read)
        for row, start, stays, out in zip(slots, starts, true, found, strict=True):
            assert out[: stays + 1].tolist() == reference[row, start : start + stays + 1].tolist()
        kept = np.where(true == counts, known[slots], 0)  # later inputs of earlier passes are still right
        known[slots] = ends if whole else np.maximum(starts + true, kept)
        passes += 1
    assert passes > 200


@pytest.mark.parametrize("kind", ["nemotron_h", "qwen3_next"])
def test_logits_equal_the_models_own_steps_in_double_precision(kind):
    """The functions compute in float32 even in float64 models. Without this, the error is below 1e-12."""
    with Double():
        assert probe._probe_error(model(kind), "pad") < 1e-12


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba", "lfm2"])
@pytest.mark.parametrize(("chunk", "policy"), [(None, 3), (4, 3), (None, Paused)], ids=["short", "chunks", "paused"])
def test_interrupt_in_any_pass_changes_no_text(kind, chunk, policy, monkeypatch):
    """Ctrl-C before the last layer, in each pass of target and draft in turn. The first row is then cancelled, and
    another row moves before the step is repeated. The draft is the target: all drafts must be accepted."""
    target, draft = model(kind), copy.deepcopy(model(kind))
    pair = bass.ModelPair(target, draft)
    for interrupted, call in itertools.product((target, draft), range(1, 16)):
        last = [layer for layer in interrupted.modules() if recurrent.keeps_state(layer)][-1]
        calls = itertools.count()

        def interrupt(*args, calls=calls, call=call):
            if next(calls) == call:
                raise KeyboardInterrupt

        length = policy if policy == 3 else policy(2)
        options = {"draft_length": length, "max_batch_size": 2, "prefill_chunk": chunk, "eos_token_id": ()}
        with monkeypatch.context() as patch, bass.Session(pair, **options) as session:
            handles = [session.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS[:4]]
            patch.setitem(last._forward_pre_hooks, 0, interrupt)
            while not session.idle:
                try:
                    session.step()
                except KeyboardInterrupt:
                    session.cancel(handles[0])
            found = [session.result(handle).sequence.tolist() for handle in handles]
        assert found[1:] == alone(kind)[1:4]
        assert found[0] == alone(kind)[0][: len(found[0])]
        assert sum(each.accepted for each in handles) == sum(each.drafted for each in handles) > 0


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
    with session_over(pair_of(kind), max_batch_size=rows, draft_length=k) as session:
        sizes = set()
        for _ in range(50):
            for prompt in PROMPTS[:4]:
                session.submit(prompt, max_new_tokens=6)
            run_to_the_end(session)
            sizes.add(session.target.states.row_bytes)
        described = doctor._cache_bytes(session.pair.target, "pad")[1]
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
    per_token = token + channels * 8
    assert sizes == {state + window + (k + 1) * per_token + positions}  # of a single layer
    assert described == state + window + per_token + positions


def test_full_memory_counts_the_states():
    with session_over(pair_of("mamba"), max_batch_size=4) as session:
        session.submit(PROMPTS[0], max_new_tokens=6)
        run_to_the_end(session)
        per_row = session.target.states.row_bytes
        advice = str(session.target.cache.explain(MemoryError()))
    assert f"takes {per_row / 1e9:.3g} GB per row" in advice


@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v32"])
def test_stale_slots_never_matter(kind):
    assert texts_over_poison(pair_of(kind), PROMPTS[:6], NEW) == alone(kind)[:6]


def test_saved_prompts_serve_later_samples():
    pair = pair_of("qwen3_next")
    out = decoded(pair, num_return_sequences=3, max_batch_size=4)
    assert texts(out) == [text for text in alone("qwen3_next") for _ in range(3)]


def test_stream_generate_and_server_give_the_same_text():
    pytest.importorskip("uvicorn")  # absent where a GPU box runs the tests
    from serving import post, served

    target, draft = (kinds.tiny("qwen3_next", noise, vocab_size=BYTES) for noise in (0.0, 0.05))
    pair = bass.ModelPair(target, draft, byte_tokenizer())
    prompt = "def add(a, b):\n"
    ids = torch.tensor([pair.tokenizer(prompt)["input_ids"]])
    expected = pair.tokenizer.decode(greedy_alone(target, ids[0], NEW), skip_special_tokens=True)
    with served(pair, session={"draft_length": 3}) as server:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        assert post(server, **body).json()["choices"][0]["text"] == expected
    options = {"max_new_tokens": NEW, "draft_length": 3}
    assert "".join(text for _, text in bass.stream(pair, prompt, eos_token_id=(), **options)) == expected
    own = {"custom_generate": bass.bass_generate, "draft_model": draft, "do_sample": False, "eos_token_id": None}
    out = target.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **own, **options)
    assert pair.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == expected


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
