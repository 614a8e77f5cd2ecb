import copy
from concurrent.futures import ThreadPoolExecutor

import decoded
import pytest
import torch
from decoded import by_transformers as alone
from readers import tiny_reader
from tiny import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, BartConfig, BartForConditionalGeneration

import bass_core as bass
from bass_core.model import probe
from bass_core.model.architectures import switch


def fresh(**options):
    return tiny_model.__wrapped__(**options)


def greedy(model, draft=None) -> list[list[int]]:
    return decoded.greedy(bass.ModelPair(model, draft))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.layers.__setitem__(1, fresh(seed=1).model.layers[1]),
        lambda model: model.to(torch.float64),
        lambda model: model.set_attn_implementation("eager"),
    ],
    ids=["layer", "dtype", "attention"],
)
def test_changed_model_is_probed_again_and_decoded_as_it_is(change):
    model = fresh()
    before = greedy(model)
    change(model)
    assert greedy(model) == alone(model)
    assert before == alone(fresh())


def mixing(forward):
    """Return `forward` with mixed states of neighbouring tokens, impossible for a batch of rows."""
    return lambda *arguments: forward(*arguments[:-1], arguments[-1].roll(1, dims=1))


CHANGES = {
    "forward": lambda patch, mlp: patch.setattr(mlp, "forward", mixing(mlp.forward)),
    "class": lambda patch, mlp: patch.setattr(type(mlp), "forward", mixing(type(mlp).forward)),
    "hook": lambda patch, mlp: mlp.register_forward_hook(lambda module, args, out: out + out.roll(1, dims=1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_code_replaced_after_a_verdict_is_refused_if_it_differs(change, monkeypatch):
    model = fresh()
    greedy(model)
    CHANGES[change](monkeypatch, model.model.layers[0].mlp)
    with pytest.raises(ValueError, match="its logits are off"):
        greedy(model)


def test_refusals_of_a_moment_are_not_kept():
    model = fresh()
    weight = model.model.layers[0].mlp.up_proj.weight
    value = weight[0, 0].item()
    weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="the forward pass of LlamaForCausalLM gives NaN or infinite logits"):
        greedy(model)
    weight.data[0, 0] = value
    assert greedy(model) == alone(model)


def test_nan_logits_over_a_cache_are_refused():
    def spoil(module, args, given, output):
        if given.get("use_cache"):
            output.logits = output.logits * torch.nan

    model = fresh()
    model.register_forward_hook(spoil, with_kwargs=True)
    with pytest.raises(ValueError, match="pad: its logits are off by inf"):
        greedy(model)


def test_verdict_under_autocast_is_one_for_autocast(monkeypatch):
    model = fresh()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert probe.resolve(model) == "pad"
        monkeypatch.setattr(probe, "_tolerance", lambda dtype: 0.0)
        with pytest.raises(ValueError, match=r"eager: under torch.autocast\(torch.bfloat16\) its logits are off"):
            probe.resolve(model.double())
    monkeypatch.undo()
    assert probe.resolve(model.float()) == "pad"


def state_of(model) -> dict:
    owners = {name: vars(module) for name, module in model.named_modules()} | {"config": vars(model.config)}
    tables = {(name, key): value for name, table in owners.items() for key, value in table.items()}
    inner = {(*name, key): each for name, table in tables.items() if type(table) is dict for key, each in table.items()}
    return tables | inner


def of_kind(kind: str, **options):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=97, **sizes, **options)).eval()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("big_bird", {"is_decoder": True, "attention_type": "block_sparse"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("phi3", {"pad_token_id": 0}),
    ],
    ids=["BigBird", "dynamic rope", "phi3"],
)
def test_probe_leaves_the_model_as_it_was(kind, options):
    model = of_kind(kind, max_position_embeddings=2048, **options)
    before, buffers = state_of(model), [buffer.clone() for buffer in model.buffers()]
    for path in ("pad", "eager"):
        complaint = probe.probe(model, path)
        assert complaint is None or kind == "big_bird"
    after = state_of(model)
    assert after.keys() == before.keys()
    assert [name for name, value in before.items() if after[name] is not value] == []
    assert all(map(torch.equal, model.buffers(), buffers))


def test_length_dependent_attention_is_refused():
    changes = r"changes BigBirdModel.attention_type from 'block_sparse' to 'original_full'; set it before decoding"
    with pytest.raises(ValueError, match=changes):
        greedy(of_kind("big_bird", is_decoder=True))


def test_session_opens_while_another_decodes_the_same_model():
    model = fresh()
    with bass.Session(bass.ModelPair(model)) as running, running.prepared():
        assert greedy(model) == alone(fresh())


def test_models_of_one_config_object_decode_together():
    config = BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, init_std=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    target, draft = (BartForConditionalGeneration(config).eval() for _ in range(2))
    before = copy.deepcopy(vars(config))
    found = greedy(target, draft)
    assert found == greedy(target) and len({tuple(row) for row in found}) > 1
    assert vars(config) == before
    refused = pytest.raises(RuntimeError, match="model that shares its config object, is decoding in another thread")
    with bass.Session(bass.ModelPair(target)) as running, running.prepared(), ThreadPoolExecutor(1) as other, refused:
        other.submit(greedy, draft).result()


def test_probe_changes_no_model_in_use(monkeypatch):
    model, changed = fresh(architecture="mistral", sliding_window=40), []
    monkeypatch.setattr(probe, "within_reach", changed.append)
    in_use = pytest.raises(RuntimeError, match="is decoding in another thread")
    with ThreadPoolExecutor(1) as other, switch(model, "pad").on(), in_use:
        other.submit(probe.resolve, model, "eager").result()
    assert changed == []


def test_verdict_while_the_model_is_decoding_is_not_kept():
    model = tiny_reader.__wrapped__("t5", "bfloat16")
    with switch(model, "pad").on():
        probe.probe(model, "eager")
    assert probe.resolve(model, "eager") == "eager"
