"""Bytes and operations of a pass, counted from a model; peaks of a device."""

import pytest
import torch
from tiny import tiny_model
from torch.utils.flop_counter import FlopCounterMode

import bass_core as bass
from bass_core.cost_model import Device, Roofline, Workload, measure_device

DEVICE = Device("made up", bandwidth=100.0, flops=1000.0)
WORK = Workload(weights=1000, products=900, layers=2, heads=4, kv_heads=2, head_dim=8, element=2)


@pytest.fixture(scope="module")
def pair():
    return bass.load_pair(dtype="float32")


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "gemma2", "phi3", "gpt_neox", "starcoder2"])
def test_operations_are_those_that_torch_counts(architecture):
    model = tiny_model(architecture)
    model.set_attn_implementation("eager")  # of the fused ones it counts nothing
    ids = torch.randint(3, 20, (3, 6))
    work = Workload.of(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, use_cache=False)
    assert work.flops(3, 6, 6) == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_weights_are_all_parameters_but_tables_that_are_looked_up(architecture):
    model = tiny_model(architecture)
    tables = {id(p): p.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    head = id(model.get_output_embeddings().weight)
    looked_up = sum(size for table, size in tables.items() if table != head)
    assert Workload.of(model).weights == sum(p.numel() for p in model.parameters()) - looked_up
    assert looked_up > 0 or head in tables


def test_a_config_is_enough(pair):
    assert Workload.of(pair.target.config, torch.float32) == Workload.of(pair.target)
    assert Workload.of(pair.target.config, torch.bfloat16).element == 2


def test_a_mixture_of_experts_is_refused():
    with pytest.raises(ValueError, match="mixture of experts"):
        Workload.of(tiny_model("mixtral"))


def test_a_pass_reads_weights_once_and_keys_of_every_row():
    alone, eight = WORK.bytes(1, 1, 50), WORK.bytes(8, 1, 50)
    per_row = 2 * 2 * 2 * 8 * (50 + 1) * 2  # keys and values, layers, heads, their size, positions, bytes
    assert alone == 2 * 1000 + per_row and eight == 2 * 1000 + 8 * per_row
    assert WORK.flops(8, 3, 50) == 24 * (2 * 900 + 4 * 2 * 4 * 8 * 50)


def test_the_roof_is_memory_below_the_ridge_and_arithmetic_above():
    roofline = Roofline(WORK, DEVICE)
    assert DEVICE.ridge == 10
    for shape in ((1, 1, 10), (8, 1, 10), (64, 5, 10)):
        memory, arithmetic = WORK.bytes(*shape) / 100, WORK.flops(*shape) / 1000
        assert roofline.seconds(*shape) == max(memory, arithmetic)
        assert (roofline.intensity(*shape) > DEVICE.ridge) == (arithmetic > memory)
    assert roofline.seconds(1, 1, 10) == WORK.bytes(1, 1, 10) / 100
    assert roofline.seconds(64, 5, 10) == WORK.flops(64, 5, 10) / 1000


def test_peaks_are_measured():
    found = measure_device("cpu", torch.float32, copied=2**20, sides=(64,), seconds=0.01)
    assert found.name and found.bandwidth > 0 and found.flops > 0
