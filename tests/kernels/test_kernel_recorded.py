"""Steps of fixed shapes over the Triton kernels, in Triton's interpreter: what a CUDA graph would hold of them."""

import pytest
from kernel_launches import counted
from recording import use_fixed_steps, use_on_cpu
from tiny import ragged_prompts, tiny_model

import bass_core as bass
from bass_core.gpu import compiled_layers
from bass_core.gpu.graph_step import GraphStep

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize(
    "way", [pytest.param("graphs", marks=pytest.mark.ci), pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_kernels_stay_whole_in_recordings_and_in_compiled_code(monkeypatch, way):
    """Ragged attention with its work list, the write into the cache and fused verification, each one operator."""
    use_on_cpu(monkeypatch)
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiled_layers, "_compiled", {})
    models = bass.ModelPair(tiny_model(num_hidden_layers=1), tiny_model(num_hidden_layers=1, noise=0.1))
    expected, found = (
        bass.generate(
            models,
            ragged_prompts(5, 11),
            max_new_tokens=3,
            draft_length=1,
            temperature=0.8,
            eos_token_id=(),
            attention="ragged",
            compile=how,
        )
        for how in ("off", way)
    )
    assert [s.tolist() for s in found.sequences] == [s.tolist() for s in expected.sequences]
    assert (found.trace.meta["attention"], found.trace.meta["kernels"]) == ("ragged", "triton")


@pytest.mark.slow
def test_the_passes_of_a_draft_phase_share_a_plan(monkeypatch):
    models, found, run = bass.ModelPair(tiny_model(), tiny_model(noise=0.1)), {}, GraphStep._run
    options = {"max_new_tokens": 9, "draft_length": 3, "eos_token_id": (), "attention": "ragged"}
    expected = bass.generate(models, ragged_prompts(5, 70), **options)

    def counting(self, key, function):
        with counted() as launches:
            result = run(self, key, function)
        found[key[0], key[2]] = launches["around"]["_plan"], launches["model"]["_attend_pieces"]
        return result

    use_fixed_steps(monkeypatch)
    monkeypatch.setattr(GraphStep, "_run", counting)
    sequences = bass.generate(models, ragged_prompts(5, 70), **options).sequences
    assert [s.tolist() for s in sequences] == [s.tolist() for s in expected.sequences]
    layers = models.draft.config.num_hidden_layers
    assert found["draft", 3] == (1, 3 * layers)
    assert found["verify", 3] == (1, layers)
