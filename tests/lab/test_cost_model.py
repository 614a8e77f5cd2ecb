import pytest
import torch
from tiny import forward_passes, ragged_prompts, tiny_model
from torch.utils.flop_counter import FlopCounterMode

import bass_core as bass
from bass_core.loop.trace import Trace
from bass_lab.measure.roofline import Device, Roofline, StepWork, utilisation

DEVICE = Device("made up", bandwidth=100.0, flops=1000.0)
WORK = StepWork(weights=1000, products=900, layers=2, heads=4, kv_heads=2, head_dim=8, element=2)
DRAFT_WORK = StepWork(weights=100, products=90, layers=1, heads=1, kv_heads=1, head_dim=1, element=2)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "phi3"])
def test_operations_equal_torchs_count(architecture):
    model = tiny_model(architecture)
    model.set_attn_implementation("eager")  # torch does not count fused attention
    ids = torch.randint(3, 20, (3, 6))
    work = StepWork.of(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, use_cache=False)
    assert work.flops(3, 6, 6) == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_weights_exclude_lookup_tables(architecture):
    model = tiny_model(architecture)
    tables = {id(p): p.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    head = id(model.get_output_embeddings().weight)
    looked_up = sum(size for table, size in tables.items() if table != head)
    assert StepWork.of(model).weights == sum(p.numel() for p in model.parameters()) - looked_up
    assert looked_up > 0 or head in tables


def test_a_config_is_enough():
    target = bass.load_pair().target
    assert StepWork.of(target.config, torch.float32) == StepWork.of(target)
    assert StepWork.of(target.config, torch.bfloat16).element == 2


def test_mixture_of_experts_is_refused():
    with pytest.raises(ValueError, match="mixture of experts"):
        StepWork.of(tiny_model("mixtral"))


def test_a_pass_reads_weights_once_and_keys_of_every_row():
    alone, eight = WORK.bytes(1, 1, 50), WORK.bytes(8, 1, 50)
    per_row = 2 * 2 * 2 * 8 * (50 + 1) * 2  # keys and values, layers, heads, head dimension, positions, bytes
    assert alone == 2 * 1000 + per_row and eight == 2 * 1000 + 8 * per_row
    assert WORK.flops(8, 3, 50) == 24 * (2 * 900 + 4 * 2 * 4 * 8 * 50)


def test_roof_is_memory_below_the_ridge_and_arithmetic_above():
    roofline = Roofline(WORK, DEVICE)
    assert DEVICE.ridge == 10
    for shape in ((1, 1, 10), (8, 1, 10), (64, 5, 10)):
        memory, arithmetic = WORK.bytes(*shape) / 100, WORK.flops(*shape) / 1000
        assert roofline.seconds(*shape) == max(memory, arithmetic)
        assert (roofline.intensity(*shape) > DEVICE.ridge) == (arithmetic > memory)
    assert roofline.seconds(1, 1, 10) == WORK.bytes(1, 1, 10) / 100
    assert roofline.seconds(64, 5, 10) == WORK.flops(64, 5, 10) / 1000


def run(*steps: dict) -> Trace:
    trace = Trace()
    for number, step in enumerate(steps):
        usual = {"row": [0], "kind": "decode", "k": 0, "drafted": 0, "accepted": 0, "emitted": 1}
        times = {"draft_ms": 0.0, "verify_ms": 1.0, "other_ms": 0.0}
        trace.record_step(step=number, **usual | times | step)
    return trace


PREFILL = {"row": [0, 1], "kind": "prefill", "kv_length": [9, 19], "verify_ms": 100.0}
DRAFTED = {"row": [0, 1], "k": 2, "drafted": [2, 1], "accepted": [1, 1], "emitted": [2, 2], "kv_length": [10, 20]}
DRAFTED |= {"draft_ms": 2.0, "verify_ms": 5.0, "other_ms": 1.0}
REGULAR = {"kv_length": [12], "verify_ms": 2.0}


def test_utilisation_by_hand():
    device = Device("made up", bandwidth=1e7, flops=1e8)  # 10 ms: 1e5 bytes, 1e6 operations
    used = utilisation(run(PREFILL, DRAFTED, REGULAR).steps, WORK, DRAFT_WORK, device)
    assert used.seconds == pytest.approx(0.010)
    # a token costs 2 * 900, each key 4 * 2 * 4 * 8 = 256
    verified = 3 * 1800 + 256 * (10 + 11 + 12) + 2 * 1800 + 256 * (20 + 21) + 1800 + 256 * 12
    emitted = 2 * 1800 + 256 * (10 + 11) + 2 * 1800 + 256 * (20 + 21) + 1800 + 256 * 12
    assert used.verified == pytest.approx(verified / 1e6) and verified == 32_816
    assert used.emitted == pytest.approx(emitted / 1e6) and emitted == 27_944
    # the draft's 2 * 90 and 4: row 0 feeds two tokens and then one, row 1 feeds two
    drafted = 3 * 180 + 4 * (9 + 10 + 11) + 2 * 180 + 4 * (19 + 20)
    assert used.draft == pytest.approx(drafted / 1e6) and drafted == 1_176
    # positions read and written: 64 elements each of the target, 2 of the draft; two bytes an element
    target = 2 * (1000 + 64 * (9 + 3 + 19 + 2)) + 2 * (1000 + 64 * (11 + 1))
    draft = 2 * (100 + 2 * (8 + 2 + 18 + 2)) + 2 * (100 + 2 * (10 + 1))
    assert used.bandwidth == pytest.approx((target + draft) / 1e5) and target + draft == 10_324


def test_regular_decoding_emits_all_verified_positions():
    used = utilisation(run(PREFILL, REGULAR, REGULAR).steps, WORK, DRAFT_WORK, DEVICE)
    assert used.verified == used.emitted > 0 and used.draft == 0


def test_cut_off_tokens_are_not_counted():
    steps = run(DRAFTED).steps
    whole, cut = (utilisation(each, WORK, None, DEVICE) for each in (steps, steps.assign(emitted=[1, 2])))
    assert cut.verified == whole.verified and cut.bandwidth == whole.bandwidth
    assert whole.emitted - cut.emitted == pytest.approx((1800 + 256 * 11) / (0.008 * DEVICE.flops))


def test_a_pass_at_its_roof_uses_the_whole_bandwidth():
    regular = REGULAR | {"verify_ms": 1e3 * Roofline(WORK, DEVICE).seconds(1, 1, 11)}  # one cached, one written
    used = utilisation(run(regular).steps, WORK, None, DEVICE)
    assert used.bandwidth == pytest.approx(1) and used.verified < 1


def test_utilisation_of_nothing_is_refused():
    for trace in (Trace(), Trace("off"), run(PREFILL)):
        with pytest.raises(ValueError, match="no decode steps"):
            utilisation(trace.steps, WORK, None, DEVICE)


@pytest.mark.parametrize("draft_length", [0, 4])
def test_passes_and_tokens_equal_the_engines(draft_length):
    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.1))
    options = {"max_new_tokens": 20, "draft_length": draft_length, "eos_token_id": ()}
    bass.generate(pair, ragged_prompts(7), **options)  # selects the attention path
    once = StepWork(weights=1, products=1, layers=0, heads=0, kv_heads=0, head_dim=0, element=1)
    nothing = StepWork(weights=0, products=0, layers=0, heads=0, kv_heads=0, head_dim=0, element=1)
    with forward_passes(pair.target) as verified, forward_passes(pair.draft) as drafted:
        steps = bass.generate(pair, ragged_prompts(7), **options).trace.steps
    for passes, works in ((verified[1:], (once, nothing)), (drafted[1:], (nothing, once))):  # without the prefill
        used = utilisation(steps, *works, Device("unit", bandwidth=1.0, flops=1.0))
        assert used.bandwidth * used.seconds == pytest.approx(len(passes))
        operations = 2 * sum(batch * query_length for batch, query_length in passes)
        assert (used.verified + used.draft) * used.seconds == pytest.approx(operations)
