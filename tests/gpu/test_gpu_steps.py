"""Eager and captured decoding on a CUDA device: the same text, one wait per step, freed memory. `pytest -m gpu`."""

import dataclasses
import os
import warnings

import pytest
import recording
import torch
from tiny import feature_head, greedy_alone, ragged_prompts, tiny_model
from transformers import NoRepeatNGramLogitsProcessor
from trial_policies import StopWhenUnsure, TakingTurns

import bass_core as bass
import bass_lab as lab
from bass_core.exactness import sampling
from bass_core.exactness.randomness import Key, Purpose, uniform
from bass_core.model.runner import packs
from bass_lab.named_pairs import SHAPES, named_pair
from bass_lab.synthetic_acceptance import SyntheticAcceptance

HERE = torch.cuda.is_available()
# In a rehearsal (BASS_REHEARSE=1) models run on the CPU, and a recorder replaces CUDA graphs.
REHEARSED = not HERE and os.environ.get("BASS_REHEARSE") == "1"
DEVICE = "cpu" if REHEARSED else "cuda"
only_there = pytest.mark.skipif(not HERE, reason="looks at what a CUDA GPU alone has")
compiled = pytest.mark.skipif(not HERE, reason="layers are compiled in tests of their own")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (HERE or REHEARSED), reason="needs a CUDA GPU")]
PROMPTS = ragged_prompts(5, 11, 3, 17, 8)
WAYS = ["graphs", pytest.param("compiled", marks=compiled), pytest.param("compiled+graphs", marks=compiled)]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    if REHEARSED:
        recording.use_on_cpu(monkeypatch)


def pair_on_gpu(architecture="llama", dtype="float64", **changes):
    models = (tiny_model.__wrapped__(architecture, dtype=dtype, noise=noise, **changes) for noise in (0.0, 0.1))
    return bass.ModelPair(*(model.to(DEVICE) for model in models))


def decode(pair, compile="auto", **options):
    options = {"max_new_tokens": 32, "draft_length": 3, "eos_token_id": ()} | options
    return bass.generate(pair, PROMPTS, compile=compile, **options)


def texts(generation) -> list[list[int]]:
    return [sequence.tolist() for sequence in generation.sequences]


def alone(pair, prompts=PROMPTS, new=32) -> list[list[int]]:
    return [greedy_alone(pair.target, prompt.to(DEVICE), new).tolist() for prompt in prompts]


@pytest.mark.parametrize("way", ["off", *WAYS])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "mistral", "gpt2", "opt", "codegen"])
def test_greedy_text_is_transformers(architecture, way):
    pair = pair_on_gpu(architecture)
    out = decode(pair, way)
    assert out.trace.meta["compile"] == way
    assert texts(out) == alone(pair)
    assert {sequence.device.type for sequence in out.sequences} == {"cpu"}
    if HERE and architecture != "codegen":  # codegen has separate attention code
        assert (out.trace.meta["attention"], out.trace.meta["kernels"]) == ("ragged", "triton")


def test_nucleus_is_the_same_alone_and_in_a_batch():
    logits = torch.randn(8, 1, 100_000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    params = bass.SamplingParams(temperature=1.0, top_p=0.9)
    together = sampling.probabilities(logits, params)
    for row in range(8):
        for _ in range(10):
            assert torch.equal(sampling.probabilities(logits[row : row + 1], params)[0] > 0, together[row] > 0)


@pytest.mark.parametrize("draft", ["model", "n-gram"])
def test_coupled_text_equals_regular_decoding(draft):
    pair = pair_on_gpu()
    pair = pair if draft == "model" else bass.ModelPair(pair.target)
    options = {"temperature": 0.9, "verification": "coupled", "trace": "tokens"}
    regular, drafted = decode(pair, draft_length=0, **options), decode(pair, max_batch_size=3, **options)
    assert texts(regular) == texts(drafted)


@only_there
def test_random_numbers_are_the_same_on_both_devices():
    parts = torch.arange(5), torch.arange(5) * 7
    on_cpu = uniform(Key(*parts, Purpose.DRAFT, torch.arange(9)))
    on_gpu = uniform(Key(*(part.cuda() for part in parts), Purpose.DRAFT, torch.arange(9).cuda()))
    assert torch.equal(on_cpu, on_gpu.cpu())


def test_embedded_pair_decodes_in_bf16():
    out = bass.generate(bass.load_pair(), ["def add(a, b):\n"] * 4, temperature=0.8, max_new_tokens=48)
    assert out.trace.summary()["alpha"] > 0.3


def test_packed_passes_of_ragged_lengths_give_the_same_text():
    """One row of four drafts in each step: verification is packed, and rounded up on a GPU."""
    pair = pair_on_gpu()
    out = decode(pair, "off", draft_length=TakingTurns(5))  # captured passes have fixed shapes
    assert texts(out) == alone(pair)
    steps = out.trace.steps[out.trace.steps.kind == "decode"]
    assert any(packs((part.drafted + 1).tolist(), part.drafted.max() + 1) for _, part in steps.groupby("step"))


SAMPLING = {
    "token": {"temperature": 0.9},
    "block": {"temperature": 0.9, "verification": "block"},
    "coupled": {"temperature": 0.9, "verification": "coupled"},
    "processed": {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2},
    "processors": {"temperature": 0.9, "processors": [bass.Penalties(1.2, 0.4, 0.2), bass.Bias({3: 2.0})]},
    "synthetic": {"acceptance": SyntheticAcceptance.named("synthetic:0.7")},
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("policy", [3, bass.BassHeuristic(initial=2), StopWhenUnsure(4)], ids=str)
def test_captured_steps_equal_eager_steps(sampling, policy):
    pair = pair_on_gpu()
    expected, found = (decode(pair, way, draft_length=policy, **SAMPLING[sampling]) for way in ("off", "graphs"))
    assert texts(found) == texts(expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafter", ["suffix", "features"])
def test_other_drafters_give_the_text_of_eager_steps(drafter, way):
    target = pair_on_gpu().target
    made = {"suffix": bass.SuffixDrafter, "features": lambda: bass.FeatureDrafter(feature_head(target))}
    pair = bass.ModelPair(target, made[drafter]())
    for options in ({}, {"temperature": 2.0, "verification": "coupled" if drafter == "suffix" else "token"}):
        expected, found = (decode(pair, each, max_batch_size=3, **options) for each in ("off", way))
        assert texts(found) == texts(expected)
        assert found.trace.steps.drafted.sum() > 0


@pytest.mark.parametrize("way", WAYS)
def test_rows_with_own_sampling_equal_eager_steps(way):
    own, found = ({}, {"temperature": 0.9}, {"temperature": 0.7, "top_k": 20}, {"repetition_penalty": 1.3}), []
    own += ({"processors": [NoRepeatNGramLogitsProcessor(2)], "top_logprobs": 2, "draft_length": 2},)
    for compile in ("off", way):
        with bass.Session(pair_on_gpu(), compile=compile, draft_length=3, eos_token_id=()) as session:
            handles = [session.submit(p, max_new_tokens=24, **o) for p, o in zip(PROMPTS, own, strict=True)]
            found.append(recording.texts(session, handles))
    assert found[0] == found[1]


@only_there
def test_auto_captures_graphs():
    assert decode(pair_on_gpu()).trace.meta["compile"] == "graphs"
    assert decode(pair_on_gpu("mixtral")).trace.meta["compile"] == "off"


@only_there
@pytest.mark.parametrize("way", WAYS[::2])
def test_host_waits_only_for_the_steps_result(way):
    with bass.Session(pair_on_gpu(), compile=way, draft_length=3, eos_token_id=()) as session, session.prepared():
        handles = [session.submit(prompt, max_new_tokens=70) for prompt in PROMPTS[:4]]
        for _ in range(6):  # the prefill, and steps with captures
            session.step()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                for _ in range(5):
                    session.step()
                    assert session.device_step.is_ahead
                session.cancel(handles[0])  # the row's result is fetched after the step's own result
                session.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(session.rows.live) == 3
        assert [str(wait.message) for wait in waits if "called a synchronizing" in str(wait.message)] == []


@only_there
def test_steps_may_be_taken_on_any_stream():
    streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for of_step in (lambda at: torch.cuda.current_stream(), lambda at: streams[at % 2]):
        with bass.Session(pair_on_gpu(), compile="graphs", draft_length=3, eos_token_id=()) as session:
            handles = [session.submit(prompt, max_new_tokens=60) for prompt in PROMPTS]
            for at in range(200):
                with torch.cuda.stream(of_step(at)):
                    session.step()
                    if at == 8:
                        session.cancel(handles[1])
                    if at == 12:
                        session.reserve(400)  # the old memory returns to the stream's pool
                if session.idle:
                    break
            torch.cuda.synchronize()
            found.append([session.result(handle).sequence.tolist() for handle in handles])
    assert found[0] == found[1]


@only_there
def test_session_frees_its_memory():
    pair = pair_on_gpu()
    decode(pair, "graphs")  # memory that libraries keep
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        decode(pair, "graphs")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


@only_there
def test_recordings_survive_freed_cublas_workspaces():
    """The compiled `generate` of transformers frees the workspaces."""
    with bass.Session(pair_on_gpu(dtype="bfloat16"), compile="graphs", draft_length=3, eos_token_id=()) as session:
        found = []
        for _ in range(4):
            found.append(recording.texts(session, [session.submit(prompt, max_new_tokens=24) for prompt in PROMPTS]))
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch.full((1 << 24,), float("nan"), device="cuda")  # overwrites the freed workspaces
        assert found[1:] == found[:-1]


def test_captures_survive_new_and_ended_rows():
    with bass.Session(pair_on_gpu(), compile="graphs", draft_length=3, eos_token_id=(), max_batch_size=4) as session:
        session.reserve(80)
        made = []
        for more in (0, 1, 2, 3, 1, 1):  # 1 twice more: a shape is captured at the second use
            found = recording.texts(session, [session.submit(prompt, max_new_tokens=20 + more) for prompt in PROMPTS])
            assert found == alone(session.pair, new=20 + more)
            made.append(session.device_step.recordings)
        assert made[-2] == made[-1]


@only_there
@pytest.mark.parametrize("way", ["off", "graphs"])
def test_draft_ids_beyond_the_target_end_their_row(way):
    """A lookup of an id beyond the vocabulary would break the CUDA context."""

    class Foreign(bass.Drafter):
        def draft(self, context, lengths, policy):
            tokens = context.last_tokens().expand(-1, int(lengths.max())).clone()
            tokens[context.lengths > 8] = 1 << 40
            return bass.Draft.of(tokens, lengths)

    pair = bass.ModelPair(pair_on_gpu().target, Foreign())
    out = decode(pair, way, on_row_error="finish")
    assert set(out.finish_reasons) == {"error"}


@only_there
@pytest.mark.parametrize("way", WAYS[::2])
def test_the_embedded_pair_is_exact_on_the_recorded_path(way):
    report = lab.verify(bass.load_pair(), compile=way)
    assert report.passed, report.table()


@pytest.mark.parametrize("policy", [3, bass.BassHeuristic(initial=6, increment=5)], ids=str)
def test_moved_memory_is_recorded_again(policy):
    pair, found = pair_on_gpu(), []
    for way in ("off", "graphs"):
        with bass.Session(pair, compile=way, draft_length=policy, eos_token_id=()) as session:
            handles = [session.submit(PROMPTS[0], max_new_tokens=20)]
            for _ in range(5):
                session.step()
            handles.append(session.submit(PROMPTS[3], max_new_tokens=60))
            found.append(recording.texts(session, handles))
            assert session.trace.meta["compile"] == way
    assert found[0] == found[1]


@only_there
def test_dummy_weights_are_made_on_the_gpu_and_once(monkeypatch):
    small = dataclasses.replace(SHAPES["paper-7.8b"], target=SHAPES["paper-7.8b"].draft)  # for any GPU
    monkeypatch.setitem(SHAPES, "paper-7.8b", small)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pair = named_pair("paper-7.8b", weights="dummy")
    size = sum(p.numel() * p.element_size() for model in pair.models for p in model.parameters())
    table = pair.draft.lm_head.weight.nbytes  # exists twice until the weights are tied
    assert torch.cuda.max_memory_allocated() - before < 1.05 * size + table
