import gc
import weakref

import pytest
import torch
from tiny import tiny_model

import bass_core as bass
from bass_core.model import attention, probe
from bass_core.model.forward_pass import Pass, running

B, HEADS, KV_HEADS, Q, S, D = 3, 4, 2, 3, 12, 8
ENDS = [4, 12, 7]  # keys per row after the pass


def reference(query, key, value, visible, softcap=None, sinks=None):
    """Return attention [B, Q, H, D] in float64, computed per row and head over the visible keys."""
    out = torch.zeros(B, Q, HEADS, D, dtype=torch.float64)
    for b in range(B):
        for h in range(HEADS):
            k, v = key[b, h // (HEADS // KV_HEADS)], value[b, h // (HEADS // KV_HEADS)]
            for q in range(Q):
                seen = visible[b, q]
                scores = k[seen] @ query[b, h, q] * D**-0.5
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h : h + 1]])
                weights = scores.softmax(0)[: int(seen.sum())]
                out[b, q, h] = weights @ v[seen]
    return out


@pytest.mark.parametrize("path", [attention.pad_attention, attention.split_attention])
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 3}, {"softcap": 2.0}, {"s_aux": torch.linspace(-1, 1, HEADS).double()},
     {"sliding_window": 5, "softcap": 1.0, "s_aux": torch.zeros(HEADS).double()}],
    ids=str,
)  # fmt: skip
def test_attention_equals_the_reference(path, options):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(B, heads, length, D, generator=generator, dtype=torch.float64)
        for heads, length in ((HEADS, Q), (KV_HEADS, S), (KV_HEADS, S))
    )
    positions = torch.tensor(ENDS)[:, None] - Q + torch.arange(Q)
    ends = torch.tensor(ENDS)
    current = Pass(positions, positions, ends - Q, ends, range(B), max(ENDS), max(ENDS) + 1, ENDS)
    with running(current):
        found, _ = path(None, query, key, value, None, scaling=D**-0.5, **options)
    visible = current.visible(options.get("sliding_window"))
    expected = reference(query, key, value, visible, options.get("softcap"), options.get("s_aux"))
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()


def test_window_and_chunk_bound_the_visible_keys():
    positions, ends = torch.tensor([[6]]), torch.tensor([7])
    current = Pass(positions, positions, ends - 1, ends, range(1), 10, 11, [7])
    seen = lambda **options: current.visible(**options)[0, 0].nonzero().flatten().tolist()  # noqa: E731
    assert seen() == [0, 1, 2, 3, 4, 5, 6]
    assert seen(window=3) == [4, 5, 6]
    assert seen(chunk=4) == [4, 5, 6]


def test_bypassing_models_use_eager_or_are_refused():
    assert probe.resolve(tiny_model("llama")) == "pad"
    assert probe.resolve(tiny_model("falcon")) == "eager"
    # Llama 4's chunked layers pass wrong results to the interface, and the model counts positions itself.
    with pytest.raises(ValueError, match=r"pad: its logits are off .* eager: its logits are off"):
        probe.resolve(tiny_model("llama4", attention_chunk_size=8))


@pytest.mark.parametrize("architecture", ["mistral", "llama"])
def test_probe_finds_keys_that_should_be_hidden(monkeypatch, architecture):
    """Two faults: an ignored sliding window, and visible stale slots."""
    original = Pass.visible
    assert probe.probe(tiny_model(architecture, seed=5), "pad") is None
    wrong = {
        "mistral": lambda self, window=None, chunk=None: original(self),
        "llama": lambda self, *args: torch.ones_like(original(self, *args)),
    }
    monkeypatch.setattr(Pass, "visible", wrong[architecture])
    assert "logits are off" in probe.probe(tiny_model(architecture, seed=6), "pad")


def test_probe_leaves_the_model_as_it_was_and_keeps_none_alive():
    model = tiny_model.__wrapped__("llama", seed=7).train()
    before = model.config.to_dict(), model.config._attn_implementation
    probe.resolve(model)
    assert all(module.training for module in model.modules())
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_unknown_paths_and_kernels_without_a_gpu_are_refused():
    with pytest.raises(ValueError, match="attention must be one of"):
        probe.resolve(tiny_model(), "flash")
    with pytest.raises(ValueError, match=r"needs the Triton kernels: .* need a CUDA GPU, and the model is on cpu"):
        bass.generate(bass.ModelPair(tiny_model()), torch.tensor([3, 4]), max_new_tokens=4, attention="ragged")
